"""Cuts a chain of blocks into the pipeline stages with the shortest step.

Alpa's inter-operator dynamic program: a step of m micro-batches takes the sum of all stages for one
micro-batch, plus m - 1 times the slowest stage. Limits for the slowest stage are tried in ascending order;
for each limit the least sum is computed. A range that does not fit takes infinitely long, so every stage may
have its own memory and recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]  # [stage, first, last]: one micro-batch in a stage with blocks [first, last)


@dataclass(frozen=True)
class Cut:
    """The blocks ``[first, last)`` of each stage, and the seconds of a step."""

    ranges: tuple[tuple[int, int], ...]
    step_seconds: float


def best_cut(seconds: Seconds, num_microbatches: int) -> Cut | None:
    """Return the cut with the shortest step; each stage has at least one block. None: no cut fits.

    ``seconds[stage, first, last]`` is the time of a stage with blocks ``[first, last)`` for one micro-batch;
    infinite if they do not fit.
    """
    _, count, _ = seconds.shape
    first, last = np.arange(count)[:, None], np.arange(count)[None, :]
    table = np.where(first < last, seconds, np.inf)
    slowest = np.unique(table[np.isfinite(table)])
    free = _least_sum(table)
    if not np.isfinite(free):
        return None
    best, limit = np.inf, np.inf
    for each in slowest[_fastest(table, slowest) :]:
        more = (num_microbatches - 1) * float(each)
        if more + free >= best:
            break
        total = _least_sum(np.where(table <= each, table, np.inf)) + more
        if total < best:
            best, limit = total, float(each)
    ranges = _ranges(np.where(table <= limit, table, np.inf))
    took = [float(table[stage, a, b]) for stage, (a, b) in enumerate(ranges)]
    return Cut(ranges, sum(took) + (num_microbatches - 1) * max(took))


def _fastest(table: Seconds, slowest: NDArray[np.float64]) -> int:
    """Return the index into ``slowest`` of the smallest limit for which a cut exists."""
    low, high = 0, len(slowest) - 1
    while low < high:
        middle = (low + high) // 2
        if np.isfinite(_least_sum(np.where(table <= slowest[middle], table, np.inf))):
            high = middle
        else:
            low = middle + 1
    return low


def _rows(table: Seconds) -> list[NDArray[np.float64]]:
    """Return the least sum for every number of stages, indexed by the number of blocks that they cover."""
    rows = [np.full(table.shape[1], np.inf)]
    rows[0][0] = 0.0
    for own in table:
        rows.append(np.min(rows[-1][:, None] + own, axis=0))
    return rows


def _least_sum(table: Seconds) -> float:
    return float(_rows(table)[-1][-1])


def _ranges(table: Seconds) -> tuple[tuple[int, int], ...]:
    rows, last = _rows(table), table.shape[1] - 1
    found: list[tuple[int, int]] = []
    for before, own in zip(reversed(rows[:-1]), table[::-1], strict=True):
        first = int(np.argmin(before + own[:, last]))
        found.append((first, last))
        last = first
    return tuple(reversed(found))


def sums_between(values: Sequence[float]) -> NDArray[np.float64]:
    """Return a table with ``[first, last]`` = the sum of ``values[first:last]``."""
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=np.float64))))
    return sums[None, :] - sums[:, None]
