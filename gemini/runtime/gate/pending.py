"""Updates that an optimizer's step left to be run when their chunks are needed.

See docs/notes/overlap.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Protocol


class PendingUpdate(Protocol):
    """What one optimizer step does to one chunk group, with everything it needs to know.

    ``order``: the group's place in forward order, its identity among pending updates. ``tensors``: all of the
    group; using any of them needs the update first. ``gradients``: those that it will use up. ``chunks``: the
    chunks that all of them lie in.
    """

    order: int
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
    """The pending updates of one model, at most one per chunk group.

    Ctrl-C loses none: they come all at once, and each stays until it has run to its end.
    """

    def __init__(self) -> None:
        self.by_tensor: dict[int, PendingUpdate] = {}  # the same object for good: every PreOp looks into it

    def __bool__(self) -> bool:
        return bool(self.by_tensor)

    def add(self, updates: Iterable[PendingUpdate]) -> None:
        """Keep updates until they have run."""
        self.by_tensor.update({tensor: update for update in updates for tensor in update.tensors})

    def remove(self, update: PendingUpdate) -> None:
        """Forget an update that has run."""
        for tensor in update.tensors:
            self.by_tensor.pop(tensor, None)

    def clear(self) -> None:
        """Forget every update: the memory they would change is going away."""
        self.by_tensor.clear()

    def all(self) -> list[PendingUpdate]:
        """Return what is pending, in forward order."""
        return _in_order(self.by_tensor.copy().values())  # at once: another thread may ask

    def needed_by(self, tensors: Iterable[int]) -> list[PendingUpdate]:
        """Return what has to run before ``tensors`` may be used, in forward order."""
        found = self.by_tensor
        return _in_order(found[tensor] for tensor in tensors if tensor in found)

    def next_to_begin(self) -> list[PendingUpdate]:
        """Return what the CPU is to begin where an update has become due, in forward order."""
        return list(islice((update for update in self.all() if update.can_begin), BEGUN_AT_ONCE))

    def begun(self) -> list[PendingUpdate]:
        """Return what the CPU has begun, in forward order."""
        return [update for update in self.all() if update.is_begun]


def _in_order(updates: Iterable[PendingUpdate]) -> list[PendingUpdate]:
    each = {update.order: update for update in updates}
    return [each[order] for order in sorted(each)]
