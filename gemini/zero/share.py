"""Share: which part of every chunk a rank owns, and which copy of the model that part is of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini.chunk import Chunk

# Whole chunks stay for a step if they are so many times smaller than the largest: gathering them again would
# take the time of a message, keeping them takes next to nothing.
_SMALL_PART = 16

# Shards begin at multiples of this many elements, so that those of every dtype fill 4 KiB pages.
_SHARD_ALIGN = 2048


@dataclass(frozen=True)
class Share:
    """The ``rank``-th of ``size`` equal parts, in the ``replica``-th of ``replicas`` copies of the model."""

    rank: int
    size: int
    replica: int = 0
    replicas: int = 1

    @property
    def world(self) -> int:
        """How many ranks train the model."""
        return self.size * self.replicas

    @property
    def place(self) -> int:
        """Which of them this is: those of one copy follow each other."""
        return self.replica * self.size + self.rank

    @property
    def members(self) -> range:
        """The places of the ranks that hold this copy."""
        return range(self.replica * self.size, (self.replica + 1) * self.size)

    def whole_numel(self, numel: int) -> int:
        """Return the elements of a chunk with room for ``numel`` that is cut into equal parts."""
        unit = self.size * _SHARD_ALIGN
        return -(-numel // unit) * unit

    def range_of(self, whole_numel: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of a chunk of :meth:`whole_numel` elements."""
        part = whole_numel // self.size
        return self.rank * part, (self.rank + 1) * part


def stays_whole(nbytes: int, largest: int) -> bool:
    """Say whether a whole chunk is small enough, beside the ``largest``, to stay once it is gathered."""
    return nbytes * _SMALL_PART <= largest


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
