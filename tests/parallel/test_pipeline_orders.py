"""Orders of schedules, and what they cost: the published bubbles, and never a wait in a circle."""

from __future__ import annotations

import itertools

import pytest

from gemini.errors import ConfigError
from gemini.parallel.pipeline import Costs, make_order, partition_uniform, simulate
from gemini.parallel.pipeline.layers import partition_balanced
from gemini.parallel.pipeline.orders import SCHEDULES, Kind

P = 4
CHUNKS = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved": (2, 4),
    "zero_bubble": (2,),
    "zbv": (2,),
    "dualpipev": (2,),
}


def bubble(style: str, chunks: int, costs: Costs) -> float:
    """The formula of the idle time of a rank."""
    backward = costs.input + costs.weight
    if SCHEDULES[style].splits:
        return (P - 1) * (costs.forward + costs.input - costs.weight) / chunks
    return (P - 1) * (costs.forward + backward) / chunks


@pytest.mark.parametrize(("style", "chunks"), [(s, c) for s, every in CHUNKS.items() for c in every])
@pytest.mark.parametrize("count", [8, 16])
def test_the_bubble_is_that_of_the_formula(style: str, chunks: int, count: int) -> None:
    found = simulate(make_order(style, P, count, chunks))
    assert found.idle == pytest.approx([bubble(style, chunks, Costs())] * P)


def test_a_dear_forward_pass_widens_the_bubble_of_1f1b_by_the_formula() -> None:
    costs = Costs(forward=3.0, input=2.0, weight=1.0)
    assert simulate(make_order("1f1b", P, 8), costs).idle == pytest.approx([bubble("1f1b", 1, costs)] * P)


@pytest.mark.parametrize(
    ("style", "chunks", "wanted"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved", 2, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved", 4, [4.75, 4.25, 3.75, 3.25]),
        ("zero_bubble", 2, [4, 4, 4, 4]),
        ("zbv", 2, [4, 4, 4, 4]),
        ("dualpipev", 2, [4.5, 4.5, 4.5, 4.5]),
    ],
)
def test_peaks_of_activations(style: str, chunks: int, wanted: list[float]) -> None:
    assert simulate(make_order(style, P, 8, chunks)).peak_activations == pytest.approx(wanted)


@pytest.mark.parametrize("style", SCHEDULES)
def test_every_order_computes_everything_once_and_never_waits_for_itself(style: str) -> None:
    for ranks, count in itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 6, 8, 12)):
        chunks = CHUNKS[style][0]
        try:
            order = make_order(style, ranks, count, chunks)
        except ConfigError:
            continue
        simulate(order)  # raises where it does
        actions = [action for each in order.by_rank for action in each]
        assert len(set(actions)) == len(actions)
        for stage, number in itertools.product(range(ranks * chunks), range(count)):
            kinds = sorted(a.kind.value for a in actions if (a.stage, a.micro_batch) == (stage, number))
            assert kinds in (["B", "F"], ["F", "I", "W"])
        for stage in range(order.num_stages):
            assert order.last_backward(stage).kind in (Kind.BACKWARD, Kind.WEIGHT)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dapple", 2, 4), "gpipe, 1f1b"),
        (("interleaved", 4, 6, 2), "multiple of 4"),
        (("dualpipev", 4, 7, 2), "8 micro-batches or more"),
        (("zbv", 4, 8, 1), "num_model_chunks=2"),
        (("1f1b", 4, 8, 2), "interleaved"),
        (("1f1b", 4, 0), "1 or more"),
    ],
)
def test_impossible_numbers_are_refused_with_possible_ones(
    arguments: tuple[str, int, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_order(*arguments)


def test_uniform_parts_have_the_published_shape() -> None:
    assert partition_uniform(16, 2, 2) == [[(0, 4), (8, 12)], [(4, 8), (12, 16)]]
    assert partition_uniform(10, 4) == [[(0, 2)], [(2, 4)], [(4, 7)], [(7, 10)]]
    with pytest.raises(ConfigError, match="fewer ranks"):
        partition_uniform(3, 4)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_parts_are_the_best_of_all(seed: int) -> None:
    costs = [float((seed * 7919 + 104729 * index * (index + seed)) % 97 + 1) for index in range(9)]
    for parts in (1, 2, 3, 4, 9):
        ranges = partition_balanced(costs, parts)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == len(costs)
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
            for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
        )
        assert max(sum(costs[start:stop]) for start, stop in ranges) == pytest.approx(best)
