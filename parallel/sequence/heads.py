"""Which heads of attention each rank computes, for the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini.errors import ConfigError


@dataclass(frozen=True)
class Heads:
    """``queries`` heads over ``size`` ranks, as evenly as they go; ``keys`` heads of keys and values, each
    for as many neighbouring queries. A rank has the key heads that its queries need, so several may have the
    same one; ranks beyond the number of heads have none."""

    queries: int
    keys: int
    size: int

    def __post_init__(self) -> None:
        if self.keys < 1 or self.queries % self.keys:
            raise ConfigError(
                f"attention has {self.queries} heads of queries and {self.keys} of keys; the first must be a "
                "multiple of the second"
            )

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.queries // self.keys

    def of_queries(self, rank: int) -> slice:
        """Return the query heads of ``rank``."""
        least, more = divmod(self.queries, self.size)
        first = rank * least + min(rank, more)
        return slice(first, first + least + (rank < more))

    def of_keys(self, rank: int) -> slice:
        """Return the key heads of ``rank``."""
        mine = self.of_queries(rank)
        if mine.start == mine.stop:
            return slice(0, 0)
        return slice(mine.start // self.group, (mine.stop - 1) // self.group + 1)

    def matching(self, keys: torch.Tensor, rank: int) -> torch.Tensor:
        """Return this rank's ``keys`` (batch, its key heads, ...), or values, so that each is for as many
        neighbouring query heads: as they are, or one for each query head."""
        mine, theirs = self.of_queries(rank), self.of_keys(rank)
        whole_groups = mine.start % self.group == 0 and mine.stop % self.group == 0
        if whole_groups or theirs.stop - theirs.start <= 1:
            return keys
        index = torch.arange(mine.start, mine.stop, device=keys.device) // self.group - theirs.start
        return keys.index_select(1, index)


def count(heads: slice) -> int:
    """Return how many heads there are."""
    found: int = heads.stop - heads.start
    return found
