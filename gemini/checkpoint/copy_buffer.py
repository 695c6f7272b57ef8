"""Copies of values on their way to the files of a checkpoint."""

from __future__ import annotations

import torch

from gemini.checkpoint.blocks import Extent
from gemini.checkpoint.staging import MEMORY_ALIGN
from gemini.checkpoint.tensor_file import settled
from gemini.offload.direct_memory import direct_memory

BUFFER_BYTES = 4 * 2**20


class CopyBuffer:
    """Values on their way to files, one after the other, placed so that they need not be copied again."""

    def __init__(self) -> None:
        self._memory = direct_memory(BUFFER_BYTES)
        self._used = 0
        self._parts: list[tuple[Extent, int, torch.Tensor]] = []

    def add(self, extent: Extent, first: int, values: torch.Tensor) -> int:
        """Copy as many of ``values``, element ``first`` on, as fit; return how many."""
        begin = self._used + (extent.file.offset(extent.tensor, first) - self._used) % MEMORY_ALIGN
        size = values.dtype.itemsize
        count = min(values.numel(), (BUFFER_BYTES - begin) // size)
        if count > 0:
            copy = self._memory[begin : begin + count * size].view(values.dtype)
            copy.copy_(values[:count])
            self._parts.append((extent, first, copy))
            self._used = begin + count * size
        return max(count, 0)

    def write(self) -> None:
        """Write everything to its file, and be empty again."""
        with settled(extent.file for extent, _first, _values in self._parts):
            for extent, first, values in self._parts:
                extent.file.lend(extent.tensor, first, values)
        self._parts.clear()
        self._used = 0
