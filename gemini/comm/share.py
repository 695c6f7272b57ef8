"""Share: which part of every chunk a rank owns, and which copy of the model that part is of."""

from __future__ import annotations

from dataclasses import dataclass

# Whole chunks stay for a step if they are so many times smaller than the largest: gathering them again would
# take the time of a message, keeping them takes next to nothing.
_SMALL_PART = 16

# Chunks are cut, into shards and state pieces, at multiples of this many elements: then parts of every dtype
# of two bytes and more fill 4 KiB pages.
CUT_NUMEL = 2048


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
        unit = self.size * CUT_NUMEL
        return -(-numel // unit) * unit

    def range_of(self, whole_numel: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of a chunk of :meth:`whole_numel` elements."""
        part = whole_numel // self.size
        return self.rank * part, (self.rank + 1) * part


def stays_whole(nbytes: int, largest: int) -> bool:
    """Say whether a whole chunk is small enough, beside the ``largest``, to stay once it is gathered."""
    return nbytes * _SMALL_PART <= largest
