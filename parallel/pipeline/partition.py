"""Contiguous parts of a row of layers: equal numbers of them, or parts of which the costliest costs least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from gemini.errors import ConfigError


def partition_uniform(
    num_items: int, pipeline_parallel_size: int, num_chunks: int = 1
) -> list[list[tuple[int, int]]]:
    """Return, for each rank, the ranges ``(start, end)`` of its chunks, as equal as they can be: the items
    are cut into ``num_chunks`` stretches, each of them over all ranks; longer ranges come last.

    Raises:
        ConfigError: a range would be empty.
    """
    ranks, parts = pipeline_parallel_size, pipeline_parallel_size * num_chunks
    if min(ranks, num_chunks) < 1 or num_items < parts:
        raise ConfigError(
            f"{num_items} layers do not go over {ranks} ranks with {num_chunks} chunks each: give {parts} or "
            "more layers, fewer ranks or fewer chunks"
        )
    if num_items % num_chunks:
        ends = list(accumulate(_sizes(num_items, parts)))
    else:
        ends = list(accumulate(_sizes(num_items // num_chunks, ranks) * num_chunks))
    ranges = list(zip([0, *ends], ends, strict=False))
    return [ranges[rank::ranks] for rank in range(ranks)]


def _sizes(count: int, parts: int) -> list[int]:
    short = parts - count % parts
    return [count // parts + (index >= short) for index in range(parts)]


def partition_balanced(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Return contiguous, non-empty ranges of ``costs`` of which the costliest costs least; among those, the
    ones with the least sum of squares. Exact.

    Raises:
        ConfigError: there are fewer items than parts.
    """
    count = len(costs)
    if parts < 1 or count < parts:
        raise ConfigError(f"{count} layers cannot be cut into {parts} stages; give {count} stages or fewer")
    sums = [0.0, *accumulate(costs)]
    costliest = _best_cuts(sums, parts, lambda so_far, cost: max(so_far, cost))[0]
    # Sums of floats differ in the last digit by where they begin.
    limit = costliest * (1 + 1e-9)

    def squares(so_far: float, cost: float) -> float:
        return so_far + cost * cost if cost <= limit else float("inf")

    ends = _best_cuts(sums, parts, squares)[1]
    return list(zip([0, *ends], ends, strict=False))


def _best_cuts(
    sums: Sequence[float], parts: int, add: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least total of ``parts`` ranges, and their ends; ``add(total, cost)`` adds a range."""
    count = len(sums) - 1
    best: list[tuple[float, list[int]]] = [(float("inf"), [])] * (count + 1)
    best[0] = (0.0, [])
    for part in range(1, parts + 1):
        row: list[tuple[float, list[int]]] = [(float("inf"), [])] * (count + 1)
        for end in range(part, count - (parts - part) + 1):
            totals = [(add(best[start][0], sums[end] - sums[start]), start) for start in range(part - 1, end)]
            total, start = min(totals)
            row[end] = (total, [*best[start][1], end])
        best = row
    return best[count]
