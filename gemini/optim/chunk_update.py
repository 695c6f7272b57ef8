"""ChunkUpdate: the update of one chunk group, captured by ``step()`` and run in it or before the group's next
use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch._C import _DisableFuncTorch as OutsideTransforms

from gemini.chunk.chunk import StateSpec
from gemini.optim.host_update import HostPart, prepare_on_host
from gemini.optim.rule import Part, UpdateRule, UpdateStep
from gemini.optim.whole_parameter import WholeOverRanks, WholeParameter
from gemini.runtime import GeminiManager
from gemini.runtime.gate.gradients import MASTER, Place, StatePiece
from gemini.runtime.gate.pending_work import GivenWork, PendingUpdate
from gemini.runtime.storage.model_storage import HALF_LOADED, ChunkGroup, ManagedSlot, Mixture, Room
from gemini.system.process import paused_collector, shown_as

_HALF_UPDATED = "the last step failed half-way and updated only some parameters"


class _Operator(Protocol):
    """Context manager factory: pins tensors on DEVICE or HOST for a block, and marks those in ``dirty`` as
    written.
    """

    def __call__(
        self, tensors: list[int], dirty: list[int], *, on_host: bool = False
    ) -> AbstractContextManager[None]: ...


class Completeness:
    """Tracks whether weights and states belong together: every change that began has finished, or both were
    loaded since.
    """

    def __init__(self, weights: Mixture) -> None:
        self._weights = weights
        self._states = ""  # describes the change that failed half-way

    @property
    def broken(self) -> str:
        """Describe the change that failed half-way; "" if there is none."""
        return self._states or self._weights.reason

    @property
    def lacks_weights_alone(self) -> bool:
        """Whether the states have been loaded since the failure and only the weights have not."""
        return not self._states and bool(self._weights.reason)

    def begin(self, broken: str) -> None:
        """Mark as ``broken`` until :meth:`clear`."""
        self._weights.begin(broken)
        self._states = broken

    @contextmanager
    def change(self, broken: str = _HALF_UPDATED) -> Iterator[None]:
        """Mark as ``broken`` during the block, which changes weights and states; if the block raises, the
        mark stays.
        """
        with self._weights.change(broken):
            before, self._states = self._states, broken
            yield
            self._states = before

    @contextmanager
    def load_states(self) -> Iterator[None]:
        """Mark as broken during the block, which replaces all states; if it raises, the mark stays.
        Afterwards only the weights can be broken.
        """
        self._states = HALF_LOADED
        yield
        self._states = ""

    def clear(self) -> None:
        """Mark as complete: weights and states were loaded, or the change has finished."""
        self._states = ""
        self._weights.clear()


class ChunkUpdate:
    """Runs an update rule on the parameters of one group that have a gradient, one state piece at a time.

    Everything that affects the result is captured: hyper-parameters, step numbers, scaling.
    :class:`gemini.runtime.gate.pending_work.PendingUpdate` says how it may be used. Not thread-safe.
    """

    def __init__(
        self,
        manager: GeminiManager,
        group: ChunkGroup,
        order: int,
        steps: Mapping[ManagedSlot, UpdateStep],
        completeness: Completeness,
        rule: UpdateRule,
        room: Room | None = None,
        part: int | None = None,
    ) -> None:
        """Capture an update.

        Args:
            manager: the manager of the model.
            group: the chunk group.
            order: the index of ``group`` among all groups.
            steps: the step of each parameter of the group that has a gradient.
            completeness: marked as broken while values change.
            rule: the rule that updates them.
            room: the memory in which parameters that are split over ranks become whole; for rules that need
                whole parameters, over ranks.
            part: the index of one part of a cut group, which is updated by itself; None: the whole group.
        """
        self.order = order, part or 0
        self.has_moments = group.choice is None
        chunk_of = manager.chunks.table.chunk_of
        pieces = group.pieces
        if part is None:
            self.tensors = _tensors(group)
            self.chunks = frozenset(chunk_of(tensor) for tensor in self.tensors)
            self.gradients = frozenset(tensor for slot in steps for tensor in slot.trainable_grad.tensors)
        else:
            start, stop = group.parts[part]
            pieces = [piece for piece in pieces if start <= piece.start < stop]
            self.tensors, self.gradients = _tensors_of_part(group, part, pieces)
            self.chunks = frozenset()
        self._repeated: list[Mapping[ManagedSlot, UpdateStep]] = []  # steps of later updates, oldest first
        self._manager = manager
        self._group = group
        self.steps = steps
        self._completeness = completeness
        self._rule = rule
        self._used = list(steps) if part is None else []  # slots with gradients to free at the end
        self._rewritten: frozenset[int] | None = None  # parameters written by the user since their masters
        self._begun: list[tuple[_Piece, GivenWork]] = []  # pieces that the CPU is updating, pinned on HOST
        self._left: list[_Piece | WholeParameter]
        if self._rule.whole and manager.sharding is not None:
            assert room is not None  # made together with the states
            ranks = manager.sharding, room
            self._left = [
                WholeOverRanks(group, slot, step.states, chunk_of, *ranks) for slot, step in steps.items()
            ]
        elif self._rule.whole:
            self._left = [
                WholeParameter(group, slot, step.states, chunk_of)
                for slot, step in steps.items()
                if slot.pieces
            ]
        else:
            self._own = pieces
            self._left = self._pieces(steps)
        here = {slot for piece in self._left for slot in piece.slots}
        # Parameters with no element on this rank.
        self._elsewhere = [slot for slot in steps if slot not in here and not self._rule.whole]

    def _pieces(self, steps: Mapping[ManagedSlot, UpdateStep]) -> list[_Piece | WholeParameter]:
        """Return the pieces that ``steps`` update."""
        chunk_of = self._manager.chunks.table.chunk_of
        return [
            _Piece(self._group, piece, touched, steps[touched[0]].states, chunk_of)
            for piece in self._own
            if (touched := _touched(piece, steps))
        ]

    @property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """For each remaining operator, the chunks, ascending, that it needs at once."""
        return tuple(piece.chunks for piece in self._left) if self.has_moments else ()

    @property
    def can_begin(self) -> bool:
        """Whether :meth:`begin` may run: all of the update belongs on HOST, and none of it has begun."""
        is_on_host = self._manager.order.is_on_host
        alone = self._manager.sharding is None and not self._begun and bool(self._left)
        return (
            alone
            and self.has_moments
            and all(isinstance(left, _Piece) and is_on_host(left.chunks) for left in self._left)
        )

    @property
    def is_begun(self) -> bool:
        """Whether the CPU runs, or has run, a part of it in the background."""
        return bool(self._begun)

    def begin(self) -> None:
        """Start all pieces on the CPU in the background. Pieces that HOST cannot hold are updated on DEVICE
        now. Raises like :meth:`run`.
        """
        with OutsideTransforms():
            self._manager.shortage.retry(lambda: self._begin(self._manager.updates.late))

    def settle(self) -> None:
        """Wait for the background work; the caller unpins everything."""
        while self._begun:
            self._wait_for_first()
            del self._begun[0]

    def run_now(self) -> None:
        """Run the update inside the step; each piece is one moment."""
        updates = self._manager.updates
        operator = updates.inside if self.has_moments else updates.beside
        self._manager.shortage.retry(lambda: self._run(operator))

    def run(self) -> None:
        """Update the remaining pieces, then free the gradients.

        Raises:
            OutOfBudgetError, IoError: a chunk could not be fetched. Pieces updated so far stay updated;
                another call goes on with the remaining ones.
        """
        updates = self._manager.updates
        operator = updates.late if self.has_moments else updates.beside
        with OutsideTransforms():  # the use that needs the update may be inside a torch.func transform
            self._manager.shortage.retry(lambda: self._run(operator))
            while self._repeated:
                self._begin_next()
                self._manager.shortage.retry(lambda: self._run(operator))

    def repeat(self, update: PendingUpdate) -> None:
        """Run ``update``, of the same part at a later step, after this one."""
        assert isinstance(update, ChunkUpdate)
        self._repeated.append(update.steps)

    def _begin_next(self) -> None:
        steps = self._repeated[0]
        left = self._pieces(steps)
        # One statement without calls: Ctrl-C arrives before or after all of these assignments.
        self.steps, self._rewritten, self._left, self._repeated = steps, None, left, self._repeated[1:]

    @paused_collector()  # many short-lived objects, all freed at the end
    @shown_as("update")
    def _begin(self, operator: _Operator) -> None:
        rewritten = self._taken_rewritten()
        while self._left:
            left = self._left[0]
            if isinstance(left, _Piece) and self._belongs_on_host(left):
                self._give(left, rewritten)
            else:
                self._update(left, rewritten, operator)

    @paused_collector()
    @shown_as("update")
    def _run(self, operator: _Operator) -> None:
        rewritten = self._taken_rewritten()
        while self._begun:
            self._finish_oldest()
        while self._left:
            self._update(self._left[0], rewritten, operator)
        if self._rule.keeps_small and self._elsewhere:
            self._step_elsewhere()
        while self._used:  # free each once: on a rerun, new gradients may have taken their places
            self._used[-1].trainable_grad.end_update()
            del self._used[-1]

    def _taken_rewritten(self) -> frozenset[int]:
        if self._rewritten is None:
            own = set(self.tensors)
            params = [t for slot in self.steps for t in slot.param_ref.tensors if t in own]
            with self._completeness.change():
                self._rewritten = self._manager.written.take(params)
        return self._rewritten

    def _update(self, left: _Piece | WholeParameter, rewritten: frozenset[int], operator: _Operator) -> None:
        """Update one piece, with everything that it needs pinned at once."""
        if isinstance(left, WholeParameter):
            self._update_whole(left, rewritten, operator)
            return
        if self._belongs_on_host(left):
            self._update_on_host(left, rewritten, operator)
            return
        with operator(left.written + left.grads, left.written + _unmade(left)), torch.no_grad():
            self._manager.snapshot.before_update(left.piece)
            _make(left)
            run = self._prepare(self._parts(left, rewritten))
            with self._completeness.change():
                run()
                del self._left[0]
        _end(left)
        if not self.has_moments:
            self._manager.chunks.leave(left.kept)

    def _parts(self, left: _Piece, rewritten: frozenset[int]) -> list[Part]:
        """Return the parts of a pinned piece as the rule takes them."""
        piece, places = left.piece, left.piece.places
        param, *_ = self._group.updated
        memory = [param.tensor, *(chunk.tensor for chunk in piece.chunks.values())]
        if not places.is_of(left.states, memory):
            places.begin(left.states, memory)
        parts = []
        for slot in left.slots:
            place = places.by_slot.get(slot)
            if place is None:
                place = places.by_slot[slot] = self._place(left, slot)
            grad = slot.trainable_grad.flat(place.first, place.stop)
            if place.half_out is not None and self._is_newer(slot, piece, rewritten):
                place.values.copy_(place.half_out)  # user code wrote the parameter: copy it to the master
            step = self.steps[slot]
            parts.append(
                Part(place.values, grad, place.states, place.half_out, step, place.first, place.kept)
            )
        return parts

    def _place(self, left: _Piece, slot: ManagedSlot) -> Place:
        """Return the memory of one parameter within a piece."""
        piece, group = left.piece, self._group
        start, stop = slot.overlapping(piece)
        here = slice(start - piece.start, stop - piece.start)
        states = {
            state.name: piece.chunks[state.key].tensor[
                slot.place_in(piece, state) if state.per_block else here
            ]
            for state in left.states
        }
        param = group.values(start, stop)
        values, half_out = (piece.master(start, stop), param) if piece.has_master else (param, None)
        return Place(values, half_out, states, start - slot.start, stop - slot.start, {})

    def _is_newer(self, slot: ManagedSlot, piece: StatePiece, rewritten: frozenset[int]) -> bool:
        """Return whether user code has written the parameter's elements in ``piece`` since their
        last update.
        """
        if not rewritten:
            return False
        tensors = slot.param_ref.tensors
        return not rewritten.isdisjoint(
            self._group.tensors_under(piece, [slot]) if len(tensors) > 1 else tensors
        )

    def _update_whole(self, left: WholeParameter, rewritten: frozenset[int], operator: _Operator) -> None:
        (slot,) = left.slots
        with operator(left.written + left.grads, left.written + _unmade(left)), torch.no_grad():
            for piece in left.pieces:
                self._manager.snapshot.before_update(piece)
            _make(left)
            with self._completeness.change():
                part, put_back = left.gathered(
                    self.steps[slot], rewritten=not rewritten.isdisjoint(slot.param_ref.tensors)
                )
                self._prepare([part])()
                put_back()
                del self._left[0]
        _end(left)
        left.end(self._manager.chunks)

    def _step_elsewhere(self) -> None:
        """Step the small states of parameters with all elements on other ranks: small states are the same
        everywhere.
        """
        none = torch.empty(0, dtype=self._group.plan.updated_dtype, device="cpu")
        parts = []
        for step in (self.steps[slot] for slot in self._elsewhere):
            states = {state.name: none.clone() for state in step.states}
            parts.append(Part(none.clone(), none.clone(), states, None, step, 0))
        with torch.no_grad():
            self._rule.prepare(parts, "cpu")()

    def _belongs_on_host(self, left: _Piece) -> bool:
        """Whether the CPU updates the piece on HOST. If not, for example because HOST lacks room or a copy
        from DEVICE would be needed first, DEVICE updates it with the same bits.
        """
        manager = self._manager
        return (
            manager.order.is_on_host(left.chunks)
            and not manager.snapshot.wants(left.piece)
            and all(slot.trainable_grad.tensors for slot in left.slots)
            and manager.updates.can_use_host(left.written + left.grads)
        )

    def _update_on_host(self, left: _Piece, rewritten: frozenset[int], operator: _Operator) -> None:
        tensors = left.written + left.grads
        with operator(tensors, left.written, on_host=True), torch.no_grad(), self._completeness.change():
            self._prepare_on_host(left, rewritten, aside=False)()
            del self._left[0]

    def _prepare_on_host(self, left: _Piece, rewritten: frozenset[int], *, aside: bool) -> Callable[[], None]:
        parts = [
            HostPart(slot, self.steps[slot], self._is_newer(slot, left.piece, rewritten))
            for slot in left.slots
        ]
        by = self._rule, left.states
        return prepare_on_host(self._manager.chunks, self._group, left.piece, parts, by, aside)

    def _give(self, left: _Piece, rewritten: frozenset[int]) -> None:
        """Pin a piece on HOST and start its update on the CPU; it stays pinned."""
        updates = self._manager.updates
        updates.pin_late(left.written + left.grads, on_host=True)
        try:
            work = GivenWork(self._prepare_on_host(left, rewritten, aside=True))
        except BaseException:
            updates.unpin(left.written + left.grads, left.written)
            raise
        # One statement without calls: Ctrl-C arrives before or after both assignments, so that the piece is
        # never both begun and left, which would update it twice.
        self._begun, self._left = [*self._begun, (left, work)], self._left[1:]
        work.give(updates.thread)

    def _finish_oldest(self) -> None:
        """Wait until the CPU has updated the oldest piece that was started, and unpin it."""
        left = self._wait_for_first()
        del self._begun[0]
        self._manager.updates.unpin(left.written + left.grads, left.written)

    def _wait_for_first(self) -> _Piece:
        """Wait for the oldest piece that was started, and return it.

        Its error is raised only once. The piece then stays pinned until everything is unpinned, and the
        optimizer goes on only after a load.
        """
        left, work = self._begun[0]
        try:
            work.wait(self._manager.updates.thread)
        except Exception:
            self._completeness.begin(_HALF_UPDATED)
            del self._begun[0]
            raise
        return left

    def _prepare(self, parts: Sequence[Part]) -> Callable[[], object]:
        """Return a function that updates the pinned memory of ``parts``."""
        return self._rule.prepare(parts, self._group.param.tensor.device)


class _Piece:
    """A state piece still to be updated, the parameters with elements in it, and the tensors that
    this needs.
    """

    def __init__(
        self,
        group: ChunkGroup,
        piece: StatePiece,
        slots: Sequence[ManagedSlot],
        states: tuple[StateSpec, ...],
        chunk_of: Callable[[int], int],
    ) -> None:
        self.piece = piece
        self.slots = slots
        self.states = states
        masters = (MASTER,) if piece.has_master else ()
        self.kept = [piece.tensors[key] for key in (*masters, *(state.key for state in states))]
        self.written = group.tensors_under(piece, slots) + self.kept
        self.places = [(slot.trainable_grad, *slot.span_under(piece)) for slot in slots]
        self.grads = [tensor for grad, *place in self.places for tensor in grad.tensors_under(*place)]
        self.chunks = tuple(sorted({chunk_of(tensor) for tensor in self.written + self.grads}))


def _unmade(left: _Piece | WholeParameter) -> list[int]:
    """Return the gradient tensors of ``left`` that have no values yet."""
    return [tensor for grad, *place in left.places for tensor in grad.unmade_under(*place)]


def _make(left: _Piece | WholeParameter) -> None:
    """Create the missing gradients of ``left``, which is pinned."""
    for grad, *place in left.places:
        grad.make_under(*place)


def _end(left: _Piece | WholeParameter) -> None:
    """Free the gradients that ``left`` has used, if they are chunk parts that can be freed separately."""
    for grad, *place in left.places:
        grad.end_under(*place)


def _touched(piece: StatePiece, steps: Mapping[ManagedSlot, UpdateStep]) -> list[ManagedSlot]:
    return [slot for slot in steps if slot.start < piece.stop and piece.start < slot.stop]


def _tensors(group: ChunkGroup) -> tuple[int, ...]:
    """Return all tensors in the chunks of a group."""
    params = dict.fromkeys(tensor for slot in group.slots for tensor in slot.param_ref.tensors)
    values = [tensor for tensor in group.value_tensors(group.slots) if tensor not in params]
    grads = [t for slot in group.slots if slot.grad is not None for t in slot.grad.update_tensors]
    states = [tensor for piece in group.pieces for tensor in piece.tensors.values()]
    return (*params, *values, *grads, *states)


def _tensors_of_part(
    group: ChunkGroup, part: int, pieces: Sequence[StatePiece]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return all tensors of one part of a cut group, and the tensors of its gradient."""
    params = [slot.param_ref.tensors[part] for slot in group.slots]
    grads = [slot.grad.update_tensors[part] for slot in group.slots if slot.grad is not None]
    states = [tensor for piece in pieces for tensor in piece.tensors.values()]
    return (*params, *grads, *states), frozenset(grads)
