"""Galvatron's decision trees: the candidates for the strategy of a layer.

A pipeline divides the ranks evenly into stages. The ranks of a stage are the leaves of a tree. Each level
divides them by data parallelism (``dp``), sharded data parallelism (``sdp``, ZeRO 3) or tensor parallelism
(``tp``), by a power of two from 2 on. No method occurs twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from gemini.errors import ConfigError

METHODS = ("dp", "sdp", "tp")
_MOST_RANKS = 2**16


@dataclass(frozen=True)
class Candidate:
    """How ranks share a layer. ``levels``: (method, degree) from the root of the tree; ``recompute``: the
    layer is recomputed in backward."""

    pp: int
    levels: tuple[tuple[str, int], ...]
    recompute: bool = False

    def degree(self, method: str) -> int:
        """Return the degree of a method; 1 if it has no level."""
        return dict(self.levels).get(method, 1)

    def __str__(self) -> str:
        """Return text such as ``pp 2, tp 2 > sdp 2, recompute``; the root comes first."""
        levels = " > ".join(f"{method} {degree}" for method, degree in self.levels)
        parts = [f"pp {self.pp}"] if self.pp > 1 or not levels else []
        return ", ".join([*parts, *([levels] if levels else []), *(["recompute"] if self.recompute else [])])


def candidates(num_ranks: int, *, pruned: bool = True, recompute: bool = False) -> tuple[Candidate, ...]:
    """Return all candidates for a layer on ``num_ranks`` ranks, by pipeline degree.

    ``pruned``: exclude dp combined with sdp, because sdp alone is never worse (takeaway 3 of Galvatron).
    ``recompute``: yield each candidate with and without recomputation.

    Raises:
        ConfigError: the number is not a power of two.
    """
    if type(num_ranks) is not int or num_ranks < 1 or num_ranks & (num_ranks - 1) or num_ranks > _MOST_RANKS:
        raise ConfigError(
            f"Galvatron's trees divide ranks by powers of two; {num_ranks} is none from 1 to {_MOST_RANKS}"
        )
    ways = (False, True) if recompute else (False,)
    return tuple(
        Candidate(2**depth, levels, way)
        for depth in range(num_ranks.bit_length())
        for levels in _trees(num_ranks >> depth)
        if not pruned or not {"dp", "sdp"} <= {method for method, _ in levels}
        for way in ways
    )


def counts(num_ranks: int, *, pruned: bool = True, recompute: bool = False) -> dict[int, int]:
    """Return the number of candidates for each pipeline degree. Raises the errors of :func:`candidates`."""
    found: dict[int, int] = {}
    for each in candidates(num_ranks, pruned=pruned, recompute=recompute):
        found[each.pp] = found.get(each.pp, 0) + 1
    return found


def _trees(leaves: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the levels of all trees with ``leaves`` leaves."""
    exponent = leaves.bit_length() - 1
    for height in range(min(exponent, len(METHODS)) + 1):
        for methods in permutations(METHODS, height):
            for exponents in _sums(exponent, height):
                yield tuple((method, 2**each) for method, each in zip(methods, exponents, strict=True))


def _sums(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered sums of ``parts`` whole numbers above 0."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    for first in range(1, total - parts + 2):
        for rest in _sums(total - first, parts - 1):
            yield (first, *rest)
