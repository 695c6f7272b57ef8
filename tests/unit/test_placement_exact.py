"""Exhaustive search over tiny steps, and that no plan, nor the bound, contradicts it."""

from __future__ import annotations

import pytest

from gemini.placement.bound import lower_bound
from gemini.placement.planner import choose_plan
from gemini.placement.simulator import Simulator
from gemini_bench.placement_exact import Tiny, random_tiny, shortest_step


def reads(*chunks: int) -> tuple[tuple[int, bool], ...]:
    """Return uses that only read."""
    return tuple((chunk, False) for chunk in chunks)


@pytest.mark.parametrize(
    ("tiny", "ticks"),
    [
        (Tiny(reads(0, 1, 2), room=3, read_ticks=2, write_ticks=1), 3),  # all fits
        (Tiny(reads(0, 1, 2), room=1, read_ticks=1, write_ticks=1), 6),  # each is fetched alone
        (Tiny(reads(0, 1, 2), room=2, read_ticks=1, write_ticks=1), 3),  # the next one while one is used
        (Tiny(reads(0, 1, 2), room=2, read_ticks=2, write_ticks=1), 6),  # three fetches, without a pause
        (Tiny(((0, True), (1, True)), room=1, read_ticks=1, write_ticks=2), 8),  # write, fetch, use, twice
    ],
)
def test_the_shortest_step_of_hand_made_instances(tiny, ticks):
    assert shortest_step(tiny) == ticks


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_is_shorter_than_the_shortest_step_nor_the_bound_longer(seed):
    tiny = random_tiny(seed)
    iteration, machine = tiny.iteration(), tiny.machine()
    plan = choose_plan(iteration, machine)
    shortest = shortest_step(tiny)
    assert Simulator(iteration, machine).seconds(plan.hints, after=20, steps=60) >= shortest - 1e-6
    assert lower_bound(iteration, machine) <= shortest + 1e-6
