"""What is told before model data changes: a copy of it is being written elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gemini.chunk import TensorIds
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
