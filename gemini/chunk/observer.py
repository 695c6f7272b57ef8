"""Callbacks of a ChunkManager for observers of its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gemini import _C


class ChunkObserver(Protocol):
    """Is told what happens, right after it has; times are seconds of ``time.perf_counter()``.

    Called on the thread that trains, for every operator: it must be quick, must not raise and must leave the
    manager alone.
    """

    def acquired(self, tensors: Sequence[int], asked_s: float, *, traced: bool) -> None:
        """``tensors``, asked for at ``asked_s``, are pinned on DEVICE."""

    def released(self, tensors: Sequence[int]) -> None:
        """``tensors`` are about to be unpinned."""

    def prefetched(self, begin_s: float) -> None:
        """What the order asks for next has been looked for and started."""

    def waited(self, tensors: Sequence[int], begin_s: float, end_s: float) -> None:
        """Chunks of ``tensors`` were not there at once: the time counts as a stall."""

    def submitted(self, action: _C.Action) -> None:
        """The transfer of ``action`` was given to its link."""

    def ended(self, action: _C.Action, result: _C.TransferResult) -> None:
        """The transfer of ``action`` has ended, and the table knows."""
