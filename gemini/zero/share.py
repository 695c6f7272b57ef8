"""Share: which part of every chunk a rank owns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini.chunk import Chunk

# Shards begin at multiples of this many elements, so that those of every dtype fill 4 KiB pages.
_SHARD_ALIGN = 2048


@dataclass(frozen=True)
class Share:
    """The ``rank``-th of ``size`` equal parts."""

    rank: int
    size: int

    def whole_numel(self, numel: int) -> int:
        """Return the elements of a chunk with room for ``numel`` that is cut into equal parts."""
        unit = self.size * _SHARD_ALIGN
        return -(-numel // unit) * unit

    def range_of(self, whole_numel: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of a chunk of :meth:`whole_numel` elements."""
        part = whole_numel // self.size
        return self.rank * part, (self.rank + 1) * part


@dataclass(frozen=True)
class GroupShard:
    """Elements ``[start, stop)`` of a parameter chunk, which this rank owns, and their gradient.

    ``param_tensor`` is the shard of the parameters in the chunk table; each parameter has a tensor of its own
    on ``grad``, which is None for what is frozen.
    """

    start: int
    stop: int
    param: Chunk
    param_tensor: int
    grad: Chunk | None

    def param_flat(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the parameter chunk, which must be among the shard's."""
        return self.param.tensor[start - self.start : stop - self.start]

    def clip(self, start: int, stop: int) -> tuple[int, int]:
        """Return what of ``[start, stop)`` the shard holds; an empty range at a place of the shard's where
        that is nothing."""
        low = min(max(start, self.start), self.stop)
        return low, max(low, min(stop, self.stop))
