"""Stray accesses: memory of evicted chunks touched outside operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.errors import EvictedAccessError


class StrayLog:
    """Which stray accesses were reported. One per process: one fault handler serves all models."""

    def __init__(self) -> None:
        self.reported = 0

    def settle(self) -> int | None:
        """Count the stray accesses so far as reported; return the address of the first that was not."""
        self.reported = _C.stray_count()
        return _C.take_stray()

    def report(self, models: Iterable[ChunkManager]) -> NoReturn:
        """Report a stray access once, whichever of ``models`` it hit: the next operator of any may use its
        result. Raises EvictedAccessError."""
        address = self.settle()
        models = list(models)
        chunks: set[int] = set()
        if address is not None:
            chunks = {chunks.chunk_at(address) for chunks in models} - {-1}
        for each in models:
            each.heal()
        raise EvictedAccessError(
            f"memory of evicted chunk {min(chunks, default='unknown')} was read or written outside an "
            "operator (a numpy view, or a tensor made from a raw pointer); results since then may be NaN. "
            "Clone the value while it is in use, for example param.detach().clone()"
        )


STRAYS = StrayLog()
