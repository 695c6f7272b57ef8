"""What waits at the gate: updates that an optimizer's step left to be run when their chunks are needed, the
thread on which the CPU makes them beside the one that trains, snapshots that must copy data before it
changes, and observers of steps. See docs/notes/overlap.md and docs/notes/gpu.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import torch

from gemini.chunk import ChunkObserver, TensorIds
from gemini.runtime.gate.gradients import StatePiece
from gemini.system.threads import Workers


class PendingUpdate(Protocol):
    """What one optimizer step does to one chunk group, or a part of one, with everything it needs to know.

    ``order``: the group's place in forward order, and the part's, its identity among pending updates.
    ``tensors``: all of it; using any of them needs the update first. ``gradients``: those that it will use
    up. ``chunks``: the chunks that all of them lie in. ``has_moments``: its operators are moments of a step.
    """

    order: tuple[int, int]
    has_moments: bool
    tensors: tuple[int, ...]
    gradients: frozenset[int]
    chunks: frozenset[int]

    @property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """The chunks, ascending, that each operator still to run needs at once."""
        ...

    @property
    def can_begin(self) -> bool:
        """Whether all of it belongs on HOST and none of it was begun: :meth:`begin` leaves it to the CPU."""
        ...

    @property
    def is_begun(self) -> bool:
        """Whether the CPU is at it, or has done it since: chunks are pinned on HOST until :meth:`run`."""
        ...

    def repeat(self, update: PendingUpdate) -> None:
        """Do what ``update``, of the same at a later step, does, once this one has run."""

    def begin(self) -> None:
        """Begin all of it, in the background where that is possible. Raises as :meth:`run`."""
        ...

    def settle(self) -> None:
        """Wait for what was begun; the caller unpins everything. What is left stays for :meth:`run`."""
        ...

    def run(self) -> None:
        """Do what is left, if anything. What fails to start can be repeated: it has changed nothing."""
        ...


# How many updates by the CPU are begun where a pending one becomes due: it has something to do while those on
# DEVICE wait for their states, and what it uses is pinned step by step.
BEGUN_AT_ONCE = 2


class PendingUpdates:
    """The pending updates of one model, at most one per chunk group, or part of one.

    Ctrl-C loses none: they come all at once, and each stays until it has run to its end.
    """

    def __init__(self) -> None:
        self.by_tensor: dict[int, PendingUpdate] = {}  # always the same object: every PreOp looks into it
        self._moments: dict[tuple[int, int], PendingUpdate] = {}  # those that are moments, by their order

    def __bool__(self) -> bool:
        return bool(self.by_tensor)

    def add(self, updates: Iterable[PendingUpdate]) -> None:
        """Keep updates until they have run; one that has not takes on the next of the same."""
        pairs = [(update, self.by_tensor.get(update.tensors[0])) for update in updates]
        for update, before in pairs:
            if before is not None:
                before.repeat(update)
        updates = [update for update, before in pairs if before is None]
        self._moments.update({update.order: update for update in updates if update.has_moments})
        self.by_tensor.update({tensor: update for update in updates for tensor in update.tensors})

    def remove(self, update: PendingUpdate) -> None:
        """Forget an update that has run."""
        for tensor in update.tensors:
            self.by_tensor.pop(tensor, None)
        self._moments.pop(update.order, None)

    def clear(self) -> None:
        """Forget every update: the memory they would change is going away."""
        self.by_tensor.clear()
        self._moments.clear()

    def moments(self) -> list[PendingUpdate]:
        """Return what is pending and a part of a step's order, in this order."""
        return _in_order(self._moments.copy().values())

    def all(self) -> list[PendingUpdate]:
        """Return what is pending, in forward order."""
        return _in_order(self.by_tensor.copy().values())  # at once: another thread may ask

    def needed_by(self, tensors: Iterable[int]) -> list[PendingUpdate]:
        """Return what has to run before ``tensors`` may be used, in forward order."""
        found = self.by_tensor
        return _in_order(found[tensor] for tensor in tensors if tensor in found)

    def next_to_begin(self) -> list[PendingUpdate]:
        """Return what the CPU is to begin where an update has become due, in forward order."""
        return list(islice((update for update in self.moments() if update.can_begin), BEGUN_AT_ONCE))

    def begun(self) -> list[PendingUpdate]:
        """Return what the CPU has begun, in forward order."""
        return [update for update in self.moments() if update.is_begun]


def _in_order(updates: Iterable[PendingUpdate]) -> list[PendingUpdate]:
    each = {update.order: update for update in updates}
    return [each[order] for order in sorted(each)]


class UpdateThread:
    """The thread beside the one that trains on which the CPU makes updates; started for the first of them."""

    def __init__(self) -> None:
        self._workers: Workers | None = None
        self._end: Callable[[], object] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Have ``work``, which raises nothing, done after what was submitted before. Raises ThreadError."""
        if self._workers is None:
            self._workers = Workers(1, "update", "updates by the CPU")
            # Also at exit: what runs uses memory that goes away.
            self._end = weakref.finalize(self, self._workers.close)
        self._workers.submit(work)

    def close(self) -> None:
        """Do what was submitted and end the thread. Idempotent."""
        self._workers = None
        if self._end is not None:
            self._end()


class GivenWork:
    """Work that was given to :class:`UpdateThread`; done once, however often it was given."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._is_given = False

    def give(self, thread: UpdateThread) -> None:
        """Have it done. Ctrl-C may come between any two lines: :meth:`wait` gives it once more."""
        thread.submit(self._do)
        self._is_given = True

    def wait(self, thread: UpdateThread) -> None:
        """Wait until it is done. Raises what it raised."""
        if not self._is_given:
            self.give(thread)
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def _do(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self._error = error
        self._is_over.set()


class Snapshot(Protocol):
    """Keeps the model data as it was at some moment until it has a copy of all of it.

    Called on the thread that trains.
    """

    def wants(self, piece: StatePiece) -> bool:
        """Whether :meth:`before_update` of this piece would copy anything."""
        ...

    def before_update(self, piece: StatePiece) -> None:
        """An optimizer is about to change ``piece`` and the parameters over it, which are pinned on
        DEVICE."""

    def before_write(self) -> None:
        """Weights or states are about to be replaced. May fetch chunks, and raise as that does."""

    def unsaved(self, tensors: TensorIds) -> frozenset[int]:
        """Return those of ``tensors`` that :meth:`before_change` would copy."""
        ...

    def before_change(self, tensors: TensorIds) -> None:
        """``tensors`` are about to be written to. May fetch chunks, and raise as that does."""

    def spoil(self, tensors: Iterable[int]) -> None:
        """User code has written to ``tensors`` before they were copied: nobody foresaw it."""

    def residence(self, resident: bool) -> bool:
        """Return ``resident``: from now on chunks stay on DEVICE, or they may leave it."""
        ...

    def step_ended(self) -> None:
        """The optimizer has ended a step."""

    def close(self, *, finish: bool) -> None:
        """Finish, and raise what went wrong, or give up. Idempotent."""


_NOTHING: frozenset[int] = frozenset()


class NoSnapshot:
    """What is there while nobody wants to know."""

    def wants(self, piece: StatePiece) -> bool:
        """Return False."""
        return False

    def before_update(self, piece: StatePiece) -> None:
        """Do nothing."""

    def before_write(self) -> None:
        """Do nothing."""

    def unsaved(self, tensors: TensorIds) -> frozenset[int]:
        """Return nothing."""
        return _NOTHING

    def before_change(self, tensors: TensorIds) -> None:
        """Do nothing."""

    def spoil(self, tensors: Iterable[int]) -> None:
        """Do nothing."""

    def residence(self, resident: bool) -> bool:
        """Return ``resident``."""
        return resident

    def step_ended(self) -> None:
        """Do nothing."""

    def close(self, *, finish: bool) -> None:
        """Do nothing."""


NO_SNAPSHOT = NoSnapshot()


class StepObserver(ChunkObserver, Protocol):
    """Is also told where steps begin and end, and runs the updates that were deferred.

    Called on the thread that trains; it must leave the manager alone.
    """

    def step_begins(self, number: int) -> None:
        """Step ``number``, from 1, begins with a forward pass."""

    def step_ended(self) -> None:
        """The optimizer has ended a step; planning, which belongs to none, may follow."""

    def step_settled(self) -> None:
        """All that follows from the step is done."""

    def run_update(self, update: PendingUpdate, run: Callable[[], None]) -> None:
        """Call ``run``, which begins ``update`` or does what is left of it, and let pass what it raises."""
