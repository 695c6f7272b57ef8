"""Pending updates: those that a step decided and has not run yet, and the thread on which the CPU runs
updates beside training. Also the observer of steps and their updates.

See docs/notes/overlap.md and docs/notes/gpu.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

import torch

from gemini.chunk.manager import ChunkObserver
from gemini.system.threads import Workers


class PendingUpdate(Protocol):
    """The update of one chunk group, or a part of one, that an optimizer step decided but has not run yet.

    ``order``: the group's place in forward order and the part's; identifies the update. ``tensors``: all of
    its tensors; a use of any of them needs the update first. ``gradients``: the gradients that it consumes.
    ``chunks``: the chunks of all these tensors. ``has_moments``: its operators are moments of a step, as for
    all groups except those in a choice.
    """

    order: tuple[int, int]
    has_moments: bool
    tensors: tuple[int, ...]
    gradients: frozenset[int]
    chunks: frozenset[int]

    @property
    def accesses(self) -> tuple[tuple[int, ...], ...]:
        """For each operator that has not run yet, the chunks that it needs at once, in ascending order."""
        ...

    @property
    def can_begin(self) -> bool:
        """Whether the whole update belongs on HOST and has not begun, so that :meth:`begin` hands it to the
        CPU."""
        ...

    @property
    def is_begun(self) -> bool:
        """Whether :meth:`begin` has handed it to the CPU: chunks are pinned on HOST until :meth:`run`."""
        ...

    def repeat(self, update: PendingUpdate) -> None:
        """Run ``update``, which is the same update of a later step, after this one."""

    def begin(self) -> None:
        """Begin the whole update, in the background if possible. Raises as :meth:`run`."""
        ...

    def settle(self) -> None:
        """Wait for the background work; the caller unpins everything. The rest is left for :meth:`run`."""
        ...

    def run(self) -> None:
        """Run the rest of the update, if any. An operator that fails to start has changed nothing and can be
        repeated."""
        ...


# Number of CPU updates to begin when a pending one becomes due. They keep the CPU busy while updates on
# DEVICE wait for their states, and pin memory only step by step.
BEGUN_AT_ONCE = 2


class PendingUpdates:
    """The pending updates of one model, at most one per chunk group or part of one.

    Safe against Ctrl-C: updates are added all at once, and each stays until it has finished.
    """

    def __init__(self) -> None:
        self.by_tensor: dict[int, PendingUpdate] = {}  # always the same dict: every PreOp reads it
        self._moments: dict[tuple[int, int], PendingUpdate] = {}  # updates with moments, by their order

    def __bool__(self) -> bool:
        return bool(self.by_tensor)

    def add(self, updates: Iterable[PendingUpdate]) -> None:
        """Add updates. If an earlier update of the same group is still pending, that one runs the new one
        after itself."""
        pairs = [(update, self.by_tensor.get(update.tensors[0])) for update in updates]
        for update, before in pairs:
            if before is not None:
                before.repeat(update)
        updates = [update for update, before in pairs if before is None]
        self._moments.update({update.order: update for update in updates if update.has_moments})
        self.by_tensor.update({tensor: update for update in updates for tensor in update.tensors})

    def remove(self, update: PendingUpdate) -> None:
        """Remove an update that has run."""
        for tensor in update.tensors:
            self.by_tensor.pop(tensor, None)
        self._moments.pop(update.order, None)

    def clear(self) -> None:
        """Remove all updates, because their memory is being freed."""
        self.by_tensor.clear()
        self._moments.clear()

    def moments(self) -> list[PendingUpdate]:
        """Return the pending updates with moments, in forward order."""
        return _in_order(self._moments.copy().values())

    def all(self) -> list[PendingUpdate]:
        """Return all pending updates, in forward order."""
        return _in_order(self.by_tensor.copy().values())  # copied at once: another thread may call this

    def needed_by(self, tensors: Iterable[int]) -> list[PendingUpdate]:
        """Return the updates that must run before ``tensors`` may be used, in forward order."""
        found = self.by_tensor
        return _in_order(found[tensor] for tensor in tensors if tensor in found)

    def next_to_begin(self) -> list[PendingUpdate]:
        """Return the updates that the CPU should begin when one has become due, in forward order."""
        return list(islice((update for update in self.moments() if update.can_begin), BEGUN_AT_ONCE))

    def begun(self) -> list[PendingUpdate]:
        """Return the updates that the CPU has begun, in forward order."""
        return [update for update in self.moments() if update.is_begun]


def _in_order(updates: Iterable[PendingUpdate]) -> list[PendingUpdate]:
    each = {update.order: update for update in updates}
    return [each[order] for order in sorted(each)]


class UpdateThread:
    """The thread on which the CPU runs updates beside training; started at the first update."""

    def __init__(self) -> None:
        self._workers: Workers | None = None
        self._end: Callable[[], object] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Queue ``work``, which must not raise. Raises ThreadError if the thread cannot start."""
        if self._workers is None:
            self._workers = Workers(1, "update", "updates by the CPU")
            # Also at exit: running work uses memory that is about to be freed.
            self._end = weakref.finalize(self, self._workers.close)
        self._workers.submit(work)

    def close(self) -> None:
        """Finish the queued work and end the thread. Idempotent."""
        self._workers = None
        if self._end is not None:
            self._end()


class GivenWork:
    """Work for :class:`UpdateThread`, which runs once even if submitted several times."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._is_given = False

    def give(self, thread: UpdateThread) -> None:
        """Submit the work. Ctrl-C may interrupt between any two lines: :meth:`wait` then submits it again."""
        thread.submit(self._do)
        self._is_given = True

    def wait(self, thread: UpdateThread) -> None:
        """Wait until the work is done. Raises the work's exception."""
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


class StepObserver(ChunkObserver, Protocol):
    """Is notified of chunk events and of the beginning and end of steps, and runs deferred updates.

    Called on the thread that trains; it must not change the manager.
    """

    def step_begins(self, number: int) -> None:
        """Step ``number``, counted from 1, begins with a forward pass."""

    def step_ended(self) -> None:
        """The optimizer has ended a step; planning, which belongs to no step, may follow."""

    def step_settled(self) -> None:
        """All work after the step is done."""

    def run_update(self, update: PendingUpdate, run: Callable[[], None]) -> None:
        """Call ``run``, which begins or finishes ``update``, and pass its exceptions on."""
