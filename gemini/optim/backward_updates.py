"""BackwardUpdates: runs updates inside a backward pass, each as soon as the gradients of its chunk group are
complete.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any
from weakref import WeakMethod

from gemini.errors import IoError, OutOfBudgetError, StateError
from gemini.memstats.trace import OPTIMIZER
from gemini.optim.chunk_update import ChunkUpdate, Completeness
from gemini.runtime import GeminiManager
from gemini.runtime.storage.model_storage import ChunkGroup, ManagedSlot, ModelStorage

logger = logging.getLogger(__name__)

# After this many passes in a row with fewer gradients of a group, the lower count becomes the expected one.
_PATIENCE = 3

_UNFINISHED = "a backward pass updated some parameters, but step() has not updated the rest"
_AGAIN = (
    "a parameter was used, or got a gradient, after this backward pass had updated it. Parameters "
    "now belong to two steps: load a checkpoint, and continue with overlap=True, which updates after "
    "all passes"
)
_APPLIED = (
    "the backward pass has already updated parameters with its gradients: call step() next; to "
    "accumulate gradients, run all passes except the last under model.no_sync()"
)


class _UpdatePhase(Enum):
    IDLE = auto()  # no pass has updated anything since the last step
    RUNNING = auto()  # a pass that updates is running
    APPLIED = auto()  # the pass has ended; step() must come next


class BackwardUpdates:
    """Decides when the update of a group runs in backward: once as many of its gradients have arrived as in
    any earlier pass, unless user hooks must see them first or the trace says that the weights are used again.

    :meth:`finish` leaves the other updates to the step, for example after a pass that differed, or if a chunk
    could not be fetched. From the first update to the end of the step, weights count as incomplete. Updated
    tensors are locked until the pass ends, and all tensors from then until the step.
    """

    def __init__(
        self,
        manager: GeminiManager,
        storage: ModelStorage,
        make_update: Callable[[ChunkGroup], ChunkUpdate | None],
        completeness: Completeness,
    ) -> None:
        """``make_update``: a method that returns the update of a group and counts its step; None if nothing
        there has a gradient. Held weakly: its object refers to the parameters, and their hooks refer to this
        object.
        """
        self._manager = manager
        self._storage = storage
        self._make_update = WeakMethod(make_update)
        self._completeness = completeness
        self._state = _UpdatePhase.IDLE
        self._expected: Counter[ManagedSlot] = Counter()  # the most gradients that a pass produced
        self._waited: Counter[int] = Counter()  # by group: passes in a row that produced fewer
        self._arrived: Counter[ManagedSlot] = Counter()
        self._watched: set[ManagedSlot] = set()  # arrived, and user hooks see them next
        self._missing: Counter[int] = Counter()  # by group: gradients still to come in this pass
        self._updated: dict[ManagedSlot, Any] = {}  # since the last step
        self._unfinished: list[ChunkUpdate] = []

    @property
    def awaits_step(self) -> bool:
        """Whether a backward pass has ended after updating parameters, so that step() must come next."""
        return self._state is _UpdatePhase.APPLIED

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """Run a backward pass in the block, with updates if it is the ``last`` one before step()."""
        self._reset()
        if last and self._expected and self._manager.can_defer_updates:
            self._state = _UpdatePhase.RUNNING
            for slot, count in self._expected.items():
                self._missing[id(slot.group)] += count
        try:
            yield
        except BaseException:
            self._reset()  # updated parameters stay updated: training cannot go on from here
            raise
        self._learn()
        self._state = _UpdatePhase.IDLE
        if self._updated:
            self._state = _UpdatePhase.APPLIED
            self._lock_all()

    def note(self, slot: ManagedSlot, *, is_watched: bool) -> None:
        """Record a gradient that arrived in its chunk. ``is_watched``: hooks of the user will see it next."""
        self._arrived[slot] += 1
        if is_watched:
            self._watched.add(slot)
        if self._state is not _UpdatePhase.RUNNING or self._arrived[slot] > self._expected[slot]:
            return
        group = slot.group
        self._missing[id(group)] -= 1
        if self._missing[id(group)] > 0 or group.grad is None:
            return
        if not self._watched.isdisjoint(group.slots):
            self._manager.order.keep_inside(group.grad.id)
        elif self._is_complete(group) and self._manager.order.is_early(group.grad.id):
            self._run(group)

    def finish(self, update: Callable[[], None], hypers: Mapping[ManagedSlot, Any]) -> None:
        """End the step: run the unfinished updates, then ``update``, which updates all remaining gradients.

        Raises:
            StateError: ``hypers`` differ from those of the updates that ran.
        """
        changed = [slot.name for slot, hyper in self._updated.items() if hypers.get(slot) != hyper]
        if changed:
            raise StateError(
                f"the learning rate or another setting of {changed[0]!r} has changed since "
                "backward() used it; with overlap='backward' change settings before backward(); undo "
                "this change"
            )
        self._manager.lock.open()
        try:
            while self._unfinished:
                self._unfinished[0].run_now()
                del self._unfinished[0]
            update()
        except BaseException:
            if self._state is _UpdatePhase.APPLIED:
                self._lock_all()
            raise
        if self._updated:
            self._completeness.clear()
        self._reset()

    def _learn(self) -> None:
        """Set the expected number of gradients from this pass. A lower number counts only after several
        passes.
        """
        for group in self._storage.groups:
            arrived = {slot: self._arrived[slot] for slot in group.slots}
            fewer = any(count < self._expected[slot] for slot, count in arrived.items())
            self._waited[id(group)] = self._waited[id(group)] + 1 if fewer else 0
            if fewer and self._waited[id(group)] < _PATIENCE:
                arrived = {slot: max(count, self._expected[slot]) for slot, count in arrived.items()}
            for slot, count in arrived.items():
                self._expected[slot] = count

    def _reset(self) -> None:
        self._state = _UpdatePhase.IDLE
        self._manager.lock.open()
        self._arrived.clear()
        self._watched.clear()
        self._missing.clear()
        self._updated.clear()
        self._unfinished.clear()

    def _lock_all(self) -> None:
        tensors = [tensor for group in self._storage.groups for tensor in _tensors(group)]
        self._manager.lock.add(tensors, _APPLIED)

    def _is_complete(self, group: ChunkGroup) -> bool:
        """Whether every parameter of the group that has a gradient received one in this pass."""
        return all(self._arrived[slot] for slot in group.slots if slot.has_grad)

    def _run(self, group: ChunkGroup) -> None:
        manager, phase = self._manager, self._manager.phase
        make_update = self._make_update()
        update = make_update(group) if make_update is not None else None
        if update is None:
            return
        if not self._updated:
            self._completeness.begin(_UNFINISHED)
        self._updated.update({slot: step.hyper for slot, step in update.steps.items()})
        self._unfinished.append(update)
        manager.enter(OPTIMIZER)
        try:
            update.run_now()
            self._unfinished.remove(update)
        except (OutOfBudgetError, IoError) as error:
            logger.info("an update waits for step(): %s", error)  # step() raises if it still fails
        finally:
            manager.enter(phase)
            manager.lock.add([tensor for slot in update.steps for tensor in _own(slot)], _AGAIN)


def _own(slot: ManagedSlot) -> tuple[int, ...]:
    return *slot.param_ref.tensors, *slot.trainable_grad.update_tensors


def _tensors(group: ChunkGroup) -> list[int]:
    """Return the tensors of a group that user code can access."""
    found = [tensor for slot in group.slots for tensor in slot.param_ref.tensors]
    return found + [t for slot in group.slots if slot.grad is not None for t in slot.grad.update_tensors]
