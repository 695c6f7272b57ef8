"""Who is told what happens to model data: a snapshot, before it changes, because a copy of it is being
written elsewhere; an observer, where steps begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from gemini.chunk import ChunkObserver, TensorIds
from gemini.runtime.gate.pending import PendingUpdate
from gemini.runtime.gate.state_piece import StatePiece


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
    """Is also told where steps begin and end, and runs the updates that were put off.

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
