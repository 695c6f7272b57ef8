"""PeriodTimer: how long the operators of an iteration take, apart from waiting for their chunks."""

from __future__ import annotations

import time

from gemini.chunk import ChunkManager


class PeriodTimer:
    """Times each period from the return of its PreOp to the entry of the next one.

    What other accesses wait for transfers in between (an evaluation between micro-batches) does not count.
    """

    def __init__(self, chunks: ChunkManager) -> None:
        self.seconds: list[float] = []  # of the periods that are over
        self._chunks = chunks
        self._since: float | None = None  # None: no period is open
        self._stalled = 0.0

    def close_period(self) -> None:
        """Note that a PreOp begins, or that the iteration is over."""
        if self._since is not None:
            self._chunks.device.synchronize()
            waited = self._chunks.stall_seconds - self._stalled
            self.seconds.append(max(0.0, time.perf_counter() - self._since - waited))
            self._since = None

    def open_period(self) -> None:
        """Note that a PreOp has its chunks."""
        self._chunks.device.synchronize()
        self._stalled = self._chunks.stall_seconds
        self._since = time.perf_counter()
