"""Model data that is in no chunk: gradients as autograd made them, while nothing can be evicted."""

from __future__ import annotations

from gemini import _C


class LooseBytes:
    """How much there is now, and the most that there was on DEVICE together with chunks."""

    def __init__(self, table: _C.ChunkTable) -> None:
        self._table = table
        self.now = 0
        self.peak_device = 0

    def add(self, nbytes: int) -> None:
        """Count ``nbytes`` more, or less."""
        self.now += nbytes
        self.peak_device = max(self.peak_device, self._table.usage(_C.Tier.DEVICE) + self.now)
