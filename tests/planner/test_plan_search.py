"""The search finds what exhaustive pricing finds; more room, faster links and fewer pins are never slower."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from pairs import first
from planner_models import GIB, Net, machine, net, question, run_of

from gemini import ConfigError
from gemini.forecast.meter import OperationCosts
from gemini.parallel.layout import Layout
from gemini.planner import price as pricing
from gemini.planner import search as search_module
from gemini.planner.chunks import ChunkSizes, StageCapacity, chunk_sizes
from gemini.planner.price import Pricer
from gemini.planner.prices import Misfit, Price
from gemini.planner.records import CutModel, Part
from gemini.planner.search import Found, Question, search, search_each
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.planner.space import Combination, Pins, below, combinations, layouts, offloading

pytestmark = pytest.mark.usefixtures("kept_records")


def drawn(seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    kinds = [draw.choice((4, 16, 64)) for _ in range(2)]
    return tuple(draw.choice(kinds) for _ in range(draw.randint(2, 6)))


def exhaustive(inner: tuple[int, ...], asked: Question) -> list[Price]:
    """Price every combination, each from a record of its own micro-batch size."""
    speeds = Speeds(asked.machine, OperationCosts(asked.machine))

    def figures(part: Part, samples: int) -> tuple[SegmentCosts, ...]:
        return speeds.segment_costs(CutModel(net(*inner), part).record(run_of(samples)))

    def chunks(part: Part, names: frozenset[str], copies: int) -> ChunkSizes:
        return chunk_sizes(CutModel(net(*inner), part).model, names, copies, asked.capacity)

    pricer, found = Pricer(speeds, asked.capacity, figures, chunks), []
    for layout in layouts(asked.num_ranks, asked.pins):
        if layout.tp > 1 or asked.batch % layout.dp or layout.pp > len(inner):
            continue  # the net has no plan for tp
        for choice in combinations(layout, asked.batch, asked.pins, blocks=len(inner)):
            prices = [pricer.price(choice)]
            lower = below(choice, asked.pins)
            if isinstance(prices[0], Misfit) and lower is not None and asked.capacity.lower_bytes:
                both = offloading(lower, asked.pins)
                prices = [pricer.price(each) for each in (lower, both) if each is not None]
            found += [each for each in prices if isinstance(each, Price)]
    return found


def best(inner: tuple[int, ...], asked: Question) -> Price | None:
    found = search(net(*inner), run_of, asked)
    return found.prices[0] if found.prices else None


@pytest.mark.dear("every combination of a model and a machine is priced")
@pytest.mark.parametrize("seed", first((11, 9, 8, 0, 2, 1, 3, 4, 5, 6, 7, 10), 5))
def test_it_finds_what_exhaustive_pricing_finds(seed: int) -> None:
    inner, draw = drawn(seed), random.Random(seed)
    capacity = StageCapacity(
        draw.choice((2**14, 2**16, 2**20)), draw.choice((0, 2**20)), draw.choice((0, 2**20))
    )
    asked = question(4, 8, seed, capacity=capacity)
    wanted = exhaustive(inner, asked)
    found = best(inner, asked)
    if not wanted:
        assert found is None
        return
    assert found is not None
    assert found.step_seconds == pytest.approx(min(each.step_seconds for each in wanted), rel=1e-12)


@pytest.mark.dear("each seed is searched with several machines and pins")
@pytest.mark.parametrize("seed", first((1, 2, 0, 3, 4), 3))
def test_more_room_and_faster_links_are_never_slower(seed: int) -> None:
    inner = drawn(seed)
    times = []
    for device_bytes in (2**15, 2**16, 2**18, 2**22):
        found = best(inner, question(4, 8, seed, capacity=StageCapacity(device_bytes, 0, 2**24)))
        times.append(found.step_seconds if found is not None else float("inf"))
    assert times == sorted(times, reverse=True)
    rates = [
        best(inner, question(4, 8, seed, machine=machine(seed, faster=factor))) for factor in (1.0, 3.0, 10.0)
    ]
    seconds = [each.step_seconds for each in rates if each is not None]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_pin_is_kept_and_one_less_is_never_slower(seed: int) -> None:
    inner, asked = drawn(seed), question(4, 8, seed)
    texts = ("dp=2", "pp=2", "zero=3", "recompute=all", "microbatches=2", "schedule=gpipe")
    pins = [Pins({}), *(Pins.parse([text]) for text in texts)]
    found = search_each(net(*inner), run_of, asked, pins)
    assert all(each.prices for each in found)
    free, *every = (each.prices[0] for each in found)
    for text, pinned in zip(texts, every, strict=True):
        assert pinned.step_seconds >= free.step_seconds
        choice, (name, _, value) = pinned.combination, text.partition("=")
        said = {
            "dp": choice.layout.dp,
            "pp": choice.layout.pp,
            "zero": choice.zero_stage,
            "recompute": choice.recompute,
            "microbatches": choice.num_microbatches,
            "schedule": choice.schedule,
        }
        assert str(said[name]) == value


def priced(pins: str, capacity: StageCapacity) -> Price | None:
    asked = question(4, 16, capacity=capacity, pins=Pins.parse(pins.split()))
    found = search(net(*(64,) * 8), run_of, asked)
    return found.prices[0] if found.prices else None


def test_activations_go_below_device_where_they_do_not_fit() -> None:
    def found(pins: str, capacity: StageCapacity) -> Found:
        pinned = Pins.parse(f"tp=1 pp=1 dp=4 zero=3 microbatches=1 {pins}".split())
        return search(net(*(64,) * 8), run_of, question(4, 1024, capacity=capacity, pins=pinned))

    enough = found("recompute=none activations=device", StageCapacity(2**14, 0, 2**26)).enough
    assert enough is not None
    capacity = replace(enough, device_bytes=enough.device_bytes // 2)
    best = found("recompute=none", capacity).prices[0]
    assert best.combination.offloads
    assert "for activations too" in str(best.combination)
    assert best.ranks[0].device_bytes <= capacity.device_bytes
    assert not found("recompute=none activations=device", capacity).prices
    assert found("", capacity).prices[0].step_seconds <= best.step_seconds


def test_as_few_blocks_recompute_as_memory_asks_for_and_more_on_early_stages() -> None:
    layout = "pp=4 schedule=1f1b microbatches=8 zero=0 recompute="
    none, every = (priced(layout + name, StageCapacity(GIB)) for name in ("none", "all"))
    assert none is not None
    assert every is not None
    most, least = (max(rank.device_bytes for rank in each.ranks) for each in (none, every))
    assert most > least
    recomputed: list[int] = []
    for budget in range(least, most + 1, (most - least) // 6):
        found = priced(layout + "fit", StageCapacity(budget))
        assert found is not None
        assert all(rank.device_bytes <= budget for rank in found.ranks)
        assert none.step_seconds <= found.step_seconds <= every.step_seconds * (1 + 1e-12)
        recomputed.append(len(found.recompute))
        by_stage = [sum(first <= at < first + 2 for at in found.recompute) for first in range(0, 8, 2)]
        assert by_stage == sorted(by_stage, reverse=True)
    assert recomputed == sorted(recomputed, reverse=True)
    assert len(set(recomputed)) > 2


def test_fewer_blocks_recompute_where_that_is_left_open() -> None:
    layout = "pp=4 schedule=1f1b microbatches=8 zero=0"
    every = priced(f"{layout} recompute=all", StageCapacity(GIB))
    none = priced(f"{layout} recompute=none", StageCapacity(GIB))
    assert every is not None
    assert none is not None
    budget = StageCapacity(max(rank.device_bytes for rank in none.ranks) - 1)
    free = priced(layout, budget)
    assert free is not None
    assert 0 < len(free.recompute) < 8
    assert free.step_seconds < every.step_seconds


def test_stages_are_cut_for_their_memory_where_equal_ones_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first stage of 1F1B holds most micro-batches: it gets fewer blocks, the last one more.
    pins = Pins.parse(["pp=4", "schedule=1f1b", "microbatches=8", "zero=0", "recompute=none"])

    def found(capacity: StageCapacity) -> list[Price]:
        return search(net(*(64,) * 12), run_of, question(4, 16, capacity=capacity, pins=pins)).prices

    even = found(StageCapacity(GIB))[0]
    assert even.begins == (3, 6, 9)
    less = StageCapacity(max(rank.device_bytes for rank in even.ranks) - 1)
    cut = found(less)[0]
    assert cut.begins[0] < 3
    assert cut.begins[2] < 9
    assert all(rank.device_bytes <= less.device_bytes for rank in cut.ranks)
    monkeypatch.setattr(pricing._Pricing, "_may_be_cut", lambda *_: False)
    assert not found(less)


def test_stages_that_are_cut_for_their_memory_are_faster_than_equal_ones_that_recompute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Five blocks on two stages: the first has three of them, as the head is behind the others.
    slow = replace(machine(), matmul_flops={"fp32": 1e9}, memory_bytes_per_second=1e9)

    def found(recompute: str, capacity: StageCapacity) -> Price:
        pins = Pins.parse(f"pp=2 schedule=1f1b microbatches=8 zero=0 recompute={recompute}".split())
        asked = question(2, 16, machine=slow, capacity=capacity, pins=pins)
        return search(net(*(256,) * 5), run_of, asked).prices[0]

    even = found("none", StageCapacity(GIB))
    assert even.begins == (3,)
    less = StageCapacity(max(rank.device_bytes for rank in even.ranks) - 1)
    cut = found("fit", less)
    assert cut.begins == (2,)
    monkeypatch.setattr(pricing._Pricing, "_may_be_cut", lambda *_: False)
    assert found("fit", less).recompute
    assert cut.step_seconds < 0.98 * found("fit", less).step_seconds


def test_groups_fit_where_single_blocks_do_not_and_are_never_slower() -> None:
    # Eight micro-batches are under way on the first rank: one input for two blocks instead of two.
    layout = "pp=2 schedule=gpipe microbatches=8 zero=0 recompute="

    def found(recompute: str, budget: int) -> Price | None:
        pins = Pins.parse((layout + recompute).split())
        asked = question(2, 16, capacity=StageCapacity(budget), pins=pins)
        prices = search(net(*(32,) * 8), run_of, asked).prices
        return prices[0] if prices else None

    every, none = found("all", GIB), found("none", GIB)
    assert every is not None
    assert none is not None
    most, least = (max(rank.device_bytes for rank in each.ranks) for each in (none, every))
    tight = found("rotor", least - 2**10)
    assert found("fit", least - 2**11) is None
    assert tight is not None
    assert tight.groups
    assert all(rank.device_bytes <= least - 2**10 for rank in tight.ranks)
    for budget in range(least, most, (most - least) // 3):
        grouped, fitted = found("rotor", budget), found("fit", budget)
        assert grouped is not None
        assert fitted is not None
        assert grouped.step_seconds <= fitted.step_seconds * (1 + 1e-12)


def test_equal_questions_have_equal_answers() -> None:
    first, second = (search(net(8, 64, 8), run_of, question()) for _ in range(2))
    assert [str(each.combination) for each in first.prices] == [
        str(each.combination) for each in second.prices
    ]
    assert first.prices == second.prices


def test_what_is_left_out_says_why() -> None:
    found = search(net(8, 8), run_of, question(4, 6))
    assert found.left_out["dp 4"] == "6 samples do not divide among 4 ranks"
    assert "blocks" in found.left_out["pp 4"]
    assert "there is no plan for Net" in found.left_out["tp 2"]


def test_of_what_does_not_fit_the_nearest_miss_is_told_and_so_much_more_does() -> None:
    asked = question(2, 4, capacity=StageCapacity(2**12))
    found = search(net(8, 8), run_of, asked)
    assert not found.prices
    assert found.misfits
    assert found.enough is not None
    assert search(net(8, 8), run_of, replace(asked, capacity=found.enough)).prices
    less = StageCapacity(found.enough.device_bytes - 1)
    assert not search(net(8, 8), run_of, replace(asked, capacity=less)).prices


def test_most_combinations_are_bounded_away() -> None:
    found = search(net(*(64,) * 8), run_of, question(8, 32))
    assert len(found.prices) == search_module._RUNNERS_UP
    assert found.num_priced < found.num_combinations


def test_pins_that_no_layout_has_are_named() -> None:
    with pytest.raises(ConfigError, match="no layout of 4 ranks has what is pinned: tp=3"):
        search(net(8, 8), run_of, question(pins=Pins.parse(["tp=3"])))


def test_pins_that_leave_nothing_together_are_named_with_the_one_to_leave_out() -> None:
    pins = ["dp=1", "tp=1", "sp=1", "pp=2", "zero=1", "schedule=gpipe"]
    with pytest.raises(ConfigError, match="schedule=gpipe; without zero=1 there are some"):
        search(net(8, 8), run_of, question(2, pins=Pins.parse(pins)))
    assert search(net(8, 8), run_of, question(2, pins=Pins.parse([p for p in pins if p != "zero=1"]))).prices


@pytest.mark.parametrize(
    "text",
    ["tp", "tp=0", "tp=x", "zero=4", "schedule=best", "width=2", "tp=2000000", "tp=-1", "=2", "tp=\u0662"],
)
def test_pins_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^pin "):
        Pins.parse([text])


def test_a_pin_is_given_once() -> None:
    with pytest.raises(ConfigError, match="already"):
        Pins.parse(["tp=2", "tp=4"])


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 1), (2, 4), (4, 10), (8, 20), (6, 16)])
def test_all_ordered_factorizations_are_in_the_space(num_ranks: int, count: int) -> None:
    found = list(layouts(num_ranks, Pins({})))
    assert len(set(found)) == len(found) == count
    assert all(each.world_size == num_ranks for each in found)


def test_the_pair_of_the_documents_is_in_the_space() -> None:
    found = list(layouts(4, Pins({})))
    assert Layout(tp=2, pp=2) in found
    assert Layout(pp=2, dp=2) in found


def test_every_combination_trains_the_whole_batch() -> None:
    every: list[Combination] = []
    for layout in layouts(8, Pins({})):
        every += combinations(layout, 16, Pins({}), blocks=8)
    assert all(each.layout.dp * each.num_microbatches * each.microbatch_size == 16 for each in every)
    assert len(set(every)) == len(every)


def test_searching_with_several_pins_finds_what_each_alone_finds() -> None:
    inner, asked = (4, 16, 4, 16), question()
    pins = [Pins.parse([text]) for text in ("dp=4", "tp=4", "pp=4", "tp=2")]
    for pin, found in zip(pins, search_each(net(*inner), run_of, asked, pins), strict=True):
        alone = search(net(*inner), run_of, replace(asked, pins=pin))
        assert found.prices == alone.prices
        assert found.left_out == alone.left_out
        assert bool(found.prices) == ("tp" not in pin.values)  # the net has no plan for tp


def test_a_model_that_refuses_one_sample_is_planned_with_more() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__((8, 8))
            self.norm = torch.nn.BatchNorm1d(16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = super().forward(ids)
            return out + self.norm(self.embed(ids).mean(1)).mean()

    with torch.device("meta"):
        model = Normed().train()
    found = search(model, run_of, question(2, 8, pins=Pins.parse(["sp=1"])))
    assert found.prices
    assert all(each.combination.microbatch_size > 1 for each in found.prices)
    assert "more than 1 value" in found.left_out["micro-batches of one sample"]


def test_a_machine_with_host_memory_alone_is_told_how_much_of_it_would_do() -> None:
    only = replace(machine(), links=tuple(each for each in machine().links if each.name in ("h2d", "d2h")))
    asked = question(1, 4, machine=only, capacity=StageCapacity(2**14, 2**10))
    found = search(net(16, 16, 16, 16, 16, 16), run_of, asked)
    assert not found.prices
    assert found.enough is not None
    assert found.enough.disk_bytes == 0
    assert search(net(16, 16, 16, 16, 16, 16), run_of, replace(asked, capacity=found.enough)).prices
