"""Updates that run inside a backward pass, each as soon as the gradients of its chunk group are complete."""

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
from gemini.runtime import ChunkGroup, GeminiManager, ManagedSlot, ModelStorage

logger = logging.getLogger(__name__)

# Passes in a row that make fewer gradients of a group than one before, until that is what is expected.
_PATIENCE = 3

_UNFINISHED = "a backward pass updated some parameters, and step() has not updated the others"
_AGAIN = (
    "a parameter was used, or got a gradient, after this backward pass had updated it. Parameters are of two "
    "steps now: load a checkpoint, and train on with overlap=True, where updates wait for all passes"
)
_APPLIED = (
    "the backward pass has used its gradients up to update parameters: call step() next; to accumulate "
    "gradients, run all passes but the last one under model.no_sync()"
)


class _UpdatePhase(Enum):
    IDLE = auto()  # no pass has updated anything since the last step
    RUNNING = auto()  # a pass that updates is under way
    APPLIED = auto()  # it has ended; step() comes next


class BackwardUpdates:
    """Decides when the update of a group runs: once as many gradients of it have arrived as in any pass
    before, unless hooks of the user are to see them, or the trace says that the weights are used again.

    What it does not run, for a pass before did other things or a chunk could not be had, :meth:`finish`
    leaves to the step. From the first update to the end of the step weights count as incomplete; what was
    updated is locked while the pass goes on, and everything from its end to the step.
    """

    def __init__(
        self,
        manager: GeminiManager,
        storage: ModelStorage,
        make_update: Callable[[ChunkGroup], ChunkUpdate | None],
        completeness: Completeness,
    ) -> None:
        """``make_update``: a method that returns the update of what has a gradient in a group, its step
        counted. Its object is not kept alive: it knows the parameters, whose hooks know this one."""
        self._manager = manager
        self._storage = storage
        self._make_update = WeakMethod(make_update)
        self._completeness = completeness
        self._state = _UpdatePhase.IDLE
        self._expected: Counter[ManagedSlot] = Counter()  # the most gradients that a pass has made
        self._waited: Counter[int] = Counter()  # passes in a row that made fewer, by group
        self._arrived: Counter[ManagedSlot] = Counter()
        self._watched: set[ManagedSlot] = set()  # of those that have arrived
        self._missing: Counter[int] = Counter()  # gradients yet to come in this pass, by group
        self._updated: dict[ManagedSlot, Any] = {}  # since the last step
        self._unfinished: list[ChunkUpdate] = []

    @property
    def awaits_step(self) -> bool:
        """Whether a backward pass has run to its end and updated parameters, and step() comes next."""
        return self._state is _UpdatePhase.APPLIED

    @contextmanager
    def backward_pass(self, *, last: bool) -> Iterator[None]:
        """Update within the block, a backward pass; ``last`` says that it is the last one before step()."""
        self._reset()
        if last and self._expected and self._manager.can_defer_updates:
            self._state = _UpdatePhase.RUNNING
            for slot, count in self._expected.items():
                self._missing[id(slot.group)] += count
        try:
            yield
        except BaseException:
            self._reset()  # what was updated stays so, and nobody may go on from there
            raise
        self._learn()
        self._state = _UpdatePhase.IDLE
        if self._updated:
            self._state = _UpdatePhase.APPLIED
            self._lock_all()

    def note(self, slot: ManagedSlot, *, is_watched: bool) -> None:
        """A gradient has arrived in its chunk; ``is_watched``: hooks of the user are to see it next."""
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
        """End the step: run what is unfinished, then ``update``, which updates what else has a gradient.

        Raises:
            StateError: ``hypers`` are not those of the updates that ran.
        """
        changed = [slot.name for slot, hyper in self._updated.items() if hypers.get(slot) != hyper]
        if changed:
            raise StateError(
                f"the learning rate or another setting of {changed[0]!r} has changed since backward() used "
                "it; with overlap='backward' change settings before backward(), and take this change back"
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
        """Expect as many gradients as this pass has made, or more, unless the last passes made fewer."""
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
        """Whether what has a gradient there got it, or more of it, in this pass."""
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
            logger.info("an update waits for step(): %s", error)  # which raises if it still cannot be done
        finally:
            manager.enter(phase)
            manager.lock.add([tensor for slot in update.steps for tensor in _own(slot)], _AGAIN)


def _own(slot: ManagedSlot) -> tuple[int, ...]:
    return *slot.param_ref.tensors, *slot.trainable_grad.update_tensors


def _tensors(group: ChunkGroup) -> list[int]:
    """Return the tensors of a group that a program can get at."""
    found = [tensor for slot in group.slots for tensor in slot.param_ref.tensors]
    return found + [t for slot in group.slots if slot.grad is not None for t in slot.grad.update_tensors]
