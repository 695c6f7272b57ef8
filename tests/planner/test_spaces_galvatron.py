"""Galvatron's decision trees, its dynamic program over layers, and its own optima on its own profile."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.errors import ConfigError
from gemini.planner.spaces.costs import LayerCosts, cheapest, cheapest_each
from gemini.planner.spaces.galvatron_profile import (
    OutsideMemory,
    Profile,
    Task,
    linear,
    optimum,
    quadratic,
    seconds_of_1f1b,
    strategies,
)
from gemini.planner.spaces.tree import candidates, counts

# Ranks: candidates, and those without dp and sdp at once. Galvatron publishes 34 and 22.
COUNTS = {1: (1, 1), 2: (4, 4), 4: (13, 11), 8: (34, 22), 16: (73, 37), 32: (136, 56), 64: (229, 79)}


@pytest.mark.parametrize(("ranks", "expected"), [*COUNTS.items(), (128, (358, 106))])
def test_trees_have_as_many_candidates_as_published(ranks: int, expected: tuple[int, int]) -> None:
    every, pruned = candidates(ranks, pruned=False), candidates(ranks)
    assert (len(every), len(pruned)) == expected
    assert set(pruned) < set(every) or ranks < 4
    assert len(set(every)) == len(every)


def test_each_pipeline_degree_has_a_tree_of_its_own() -> None:
    assert counts(8, pruned=False) == {1: 21, 2: 9, 4: 3, 8: 1}
    assert counts(8) == {1: 11, 2: 7, 4: 3, 8: 1}
    assert len(candidates(8, recompute=True)) == 44


def test_a_candidate_takes_all_ranks_and_no_method_twice() -> None:
    for each in candidates(32, pruned=False):
        methods = [method for method, _ in each.levels]
        assert len(set(methods)) == len(methods)
        assert each.pp * each.degree("dp") * each.degree("sdp") * each.degree("tp") == 32
        assert all(degree >= 2 and degree & (degree - 1) == 0 for _, degree in each.levels)


@pytest.mark.parametrize("ranks", [0, -8, 3, 6, 2**20])
def test_other_numbers_of_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ConfigError, match="powers of two"):
        candidates(ranks)


def by_brute_force(costs: LayerCosts, limit: int) -> float | None:
    layers, count = costs.seconds.shape
    found = [
        sum(costs.seconds[at, each] for at, each in enumerate(choice))
        + sum(costs.transitions[at, choice[at - 1], choice[at]] for at in range(1, layers))
        for choice in product(range(count), repeat=layers)
        if sum(costs.units[at, each] for at, each in enumerate(choice)) <= limit
    ]
    return min(found, default=None)


@st.composite
def layer_costs(draw: st.DrawFn) -> LayerCosts:
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    seed, largest = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 4))
    numbers = np.random.default_rng(seed)
    return LayerCosts(
        numbers.integers(0, 30, (layers, count)).astype(float),
        numbers.integers(0, largest + 1, (layers, count)),  # many layers of no units at all
        numbers.integers(0, 10, (layers, count, count)).astype(float),
    )


@settings(max_examples=250, deadline=None, derandomize=True)
@given(layer_costs(), st.integers(-1, 12))
def test_the_dynamic_program_finds_what_brute_force_finds(costs: LayerCosts, limit: int) -> None:
    best = cheapest(costs, limit)
    expected = by_brute_force(costs, limit) if limit >= 0 else None
    assert (None if best is None else best.seconds) == expected
    if best is not None:
        chosen = list(enumerate(best.choice))
        between = sum(costs.transitions[at, best.choice[at - 1], each] for at, each in chosen[1:])
        assert sum(costs.seconds[at, each] for at, each in chosen) + between == best.seconds
        assert sum(costs.units[at, each] for at, each in chosen) == best.units <= limit


@settings(max_examples=30, deadline=None, derandomize=True)
@given(layer_costs())
def test_more_memory_never_makes_layers_slower(costs: LayerCosts) -> None:
    found = cheapest_each(costs, range(25))
    assert found == [cheapest(costs, limit) for limit in range(25)]
    seconds = [float("inf") if each is None else each.seconds for each in found]
    assert seconds == sorted(seconds, reverse=True)


def test_costs_of_other_shapes_and_no_numbers_are_refused() -> None:
    fine = {"seconds": np.ones((2, 2)), "units": np.ones((2, 2), dtype=int), "transitions": np.zeros((2, 2))}
    wrong = [
        {"seconds": np.full((2, 2), np.nan)},
        {"seconds": -np.ones((2, 2))},
        {"units": np.ones((2, 2))},
        {"units": -np.ones((2, 2), dtype=int)},
        {"transitions": np.zeros((3, 3))},
        {"seconds": np.ones((0, 2)), "units": np.ones((0, 2), dtype=int)},
    ]
    for each in wrong:
        with pytest.raises(ConfigError):
            LayerCosts(**{**fine, **each})
    large = LayerCosts(np.ones((64, 2)), np.full((64, 2), 2**40), np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="larger units"):
        cheapest(large, 2**45)


# -- Galvatron's own profile -----------------------------------------------------------------------------

SEQUENCES = [4096 * each for each in range(1, 9)]
LAYER_MS = [
    12.4057201385498, 28.454231262207003, 39.43479309082031, 52.60663909912111,
    70.75289154052746, 82.6971145629883, 106.13850097656245, 123.1998901367187,
]  # fmt: skip
OUTSIDE_MS = [
    31.97360305786134, 56.27244796752933, 86.6235107421875, 121.2523483276367,
    141.90354614257797, 177.68662719726558, 197.4156311035157, 225.79444885253918,
]  # fmt: skip
ALL_REDUCE_MS = {
    8: [0.07895, 0.1094, 0.1333, 0.1827, 0.2941, 0.4157, 0.6519, 1.2826, 2.3584, 4.6768, 8.1409],
    4: [0.07981, 0.09109, 0.1091, 0.1581, 0.2183, 0.3205, 0.5848, 1.0725, 2.0709, 3.7352, 7.1874],
    2: [0.0703, 0.07932, 0.09008, 0.1084, 0.1434, 0.2281, 0.3924, 0.7417, 1.3887, 2.6886, 5.1594],
}
ALL_TO_ALL_MS = {
    8: [0.1124, 0.1135, 0.1109, 0.1502, 0.2003, 0.243, 0.3997, 0.7135, 1.2981, 2.4822, 4.8151],
    4: [0.05244, 0.07992, 0.1065, 0.1255, 0.1514, 0.2237, 0.3654, 0.6439, 1.1567, 2.1003, 4.0389],
    2: [0.0709, 0.09942, 0.1101, 0.1047, 0.1203, 0.1788, 0.2928, 0.4756, 0.8806, 1.7752, 3.4954],
}


def by_size(times: dict[int, list[float]]) -> dict[int, dict[int, float]]:
    return {ranks: {2**at: each for at, each in enumerate(own)} for ranks, own in times.items()}


def shared(whole: float) -> dict[int, float]:
    return {degree: whole / degree for degree in (1, 2, 4, 8)}


# A LLaMA of 28 layers with 8192 tokens on eight A100, as the tests of Galvatron have it.
PROFILE = Profile(
    layers=28,
    hidden=4096,
    sequence=8192,
    forward_ms=quadratic(dict(zip(SEQUENCES, LAYER_MS, strict=True)), 8192),
    outside_ms=linear(dict(zip(SEQUENCES, OUTSIDE_MS, strict=True)), 8192),
    parameter_mib=973.771484375,
    activations=shared(2088.28955078125),
    recomputed=56.0,
    outside=(
        OutsideMemory(shared(16768.54296875), shared(5487.8828125)),
        OutsideMemory(shared(8351.5009765625), shared(787.1483154296875)),
        OutsideMemory(shared(8351.5556640625), shared(5073.4478759765625)),
    ),
    all_reduce={(8, True): 160.445, (4, True): 164.272, (4, False): 165.493, (2, True): 155.647,
                (2, False): 153.933},
    send={2: 147.32, 4: 133.469, 8: 108.616},
    all_reduce_ms=by_size(ALL_REDUCE_MS),
    all_to_all_ms=by_size(ALL_TO_ALL_MS),
    overlap=1.1534195950157762,
)  # fmt: skip


def test_galvatron_has_fifty_strategies_for_eight_ranks_in_its_own_order() -> None:
    text = ", ".join(map(str, strategies(8)))
    assert len(strategies(8)) == 50
    assert text.startswith(
        "1-1-8, 1-1-8-c, 1-1-8f, 1-1-8f-c, 1-2*-4-sp, 1-2*-4-c-sp, 1-2*-4f-sp, 1-2*-4f-c-sp"
    )
    assert text.endswith("4-2*-1-sp, 4-2*-1-c-sp, 4-2*-1, 4-2*-1-c, 8-1-1, 8-1-1-c")


def test_the_first_optimum_of_galvatrons_own_tests_comes_out() -> None:
    best = optimum(PROFILE, Task(ranks=8, batch=64, chunks=32, memory_gib=36))
    assert best is not None
    assert best.samples_per_second == pytest.approx(2.6485091403918064, abs=1e-6)
    runs = [(name, len(list(each))) for name, each in groupby(map(str, best.strategies))]
    assert runs == [("1-4*-2f-c", 14), ("1-4*-2f", 12), ("1-4*-2", 2)]
    assert (best.outside.tp, best.division) == (8, (28,))


def test_the_second_optimum_of_galvatrons_own_tests_comes_out() -> None:
    task = Task(ranks=8, batch=64, chunks=8, memory_gib=36, uniform=True)
    best = optimum(PROFILE, task)
    assert best is not None
    assert best.samples_per_second == pytest.approx(2.5246283459057333, abs=1e-6)
    assert set(map(str, best.strategies)) == {"1-1-8f-c"}
    assert optimum(PROFILE, replace(task, memory_gib=8)) is None


def test_galvatrons_model_is_no_slower_with_more_memory() -> None:
    task = Task(ranks=8, batch=64, chunks=8, memory_gib=20, uniform=True)
    found = [optimum(PROFILE, replace(task, memory_gib=each)) for each in (30, 36, 48, 80)]
    speeds = [0.0 if each is None else each.samples_per_second for each in found]
    assert speeds == sorted(speeds)
    assert speeds[-1] > speeds[0]


def test_a_pipeline_of_equal_stages_takes_its_stages_and_the_other_chunks() -> None:
    assert seconds_of_1f1b([1.0] * 4, [1.0] * 4, 8) == pytest.approx(4 + 7)
    assert seconds_of_1f1b([2.0], [5.0], 3) == pytest.approx(6 + 3)  # behind it the exchange that is left


def test_tasks_that_galvatron_has_no_plan_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="powers of two"):
        optimum(PROFILE, Task(ranks=6, batch=64, chunks=8, memory_gib=36))
    with pytest.raises(ConfigError, match="the profile has no figure"):
        optimum(PROFILE, Task(ranks=16, batch=64, chunks=4, memory_gib=36, uniform=True))
    with pytest.raises(ConfigError, match="do not divide"):
        optimum(PROFILE, Task(ranks=8, batch=64, chunks=3, memory_gib=36))
