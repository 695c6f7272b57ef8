"""Stages are cut as the best of all cuts is, with memory and recomputation that differ by stage."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from gemini.planner.stages import best_cut, sums_between


def drawn(seed: int) -> tuple[np.ndarray, int]:
    """Return what stages take, some of which do not fit, and a number of micro-batches."""
    draw = random.Random(seed)
    stages, count = draw.randint(1, 4), draw.randint(2, 7)
    sums = sums_between([draw.choice((1.0, 2.0, 5.0)) for _ in range(count)])
    sizes = sums_between([draw.choice((1.0, 3.0, 9.0)) for _ in range(count)])
    table = np.repeat(sums[None], stages, axis=0).copy()
    for stage in range(stages):
        room = draw.uniform(4.0, 14.0)
        table[stage] += (sizes > room / 2) * draw.uniform(0.0, 3.0)  # recomputation
        table[stage][sizes > room] = np.inf
    return table, draw.choice((1, 2, 8, 32))


def brute_force(table: np.ndarray, num_microbatches: int) -> float:
    stages, count = table.shape[0], table.shape[1] - 1
    least = float("inf")
    for cuts in combinations(range(1, count), stages - 1):
        ends = [0, *cuts, count]
        took = [float(table[at, ends[at], ends[at + 1]]) for at in range(stages)]
        least = min(least, sum(took) + (num_microbatches - 1) * max(took))
    return least


def test_the_best_of_all_cuts_is_found_and_none_where_none_fits() -> None:
    fitted = 0
    for seed in range(300):
        table, num_microbatches = drawn(seed)
        wanted, found = brute_force(table, num_microbatches), best_cut(table, num_microbatches)
        assert (found is None) == (wanted == float("inf"))
        if found is None:
            continue
        fitted += 1
        assert found.step_seconds == pytest.approx(wanted, rel=1e-12)
        took = [float(table[at, a, b]) for at, (a, b) in enumerate(found.ranges)]
        assert found.step_seconds == pytest.approx(sum(took) + (num_microbatches - 1) * max(took))
        ends = [b for _, b in found.ranges]
        assert [a for a, _ in found.ranges] == [0, *ends[:-1]]
        assert ends[-1] == table.shape[1] - 1
    assert 60 < fitted < 300


def test_equal_blocks_are_cut_evenly() -> None:
    found = best_cut(np.repeat(sums_between([1.0] * 48)[None], 8, axis=0), 32)
    assert found is not None
    assert [b - a for a, b in found.ranges] == [6] * 8
    assert found.step_seconds == 48 + 31 * 6


def test_more_stages_than_blocks_have_no_cut() -> None:
    assert best_cut(np.repeat(sums_between([1.0] * 2)[None], 3, axis=0), 4) is None
