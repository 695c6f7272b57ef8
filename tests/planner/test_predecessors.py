"""Alone, each part of a price is what the planner for it says: of one rank, and of a schedule."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from planner_models import machine, net, question, run_of

from gemini.cli.plan_layout import run_on
from gemini.cli.plan_model import ModelOptions, find_model
from gemini.forecast.forecast import Settings, forecast_batch, time_step
from gemini.forecast.meter import OperationCosts
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.memstats.trace import LinkSpeed
from gemini.parallel.pipeline.orders import Costs, make_order, simulate
from gemini.parallel.zero.optimizer import LowLevelZeroOptimizer
from gemini.planner.chunks import StageCapacity
from gemini.planner.exchanges import BUCKET_NUMEL, Gathers, buckets_of, exchange_seconds
from gemini.planner.price import Pricer
from gemini.planner.prices import Price
from gemini.planner.records import CutModel, ParameterSize, Part
from gemini.planner.search import Question, search
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.planner.space import Pins
from gemini.runtime.config import GeminiConfig

_PINS = ["zero=3", "recompute=none", "microbatches=1"]


@pytest.mark.parametrize("name", ["gpt:layers=3,hidden=64,heads=4", "gpt:layers=6,hidden=32,heads=2"])
def test_one_rank_takes_what_the_planner_of_one_process_says(name: str) -> None:
    source, speeds = find_model(name, ModelOptions(32, False, seq_is_asked=True)), machine(1)
    settings = Settings(4, GeminiConfig(device_bytes=2**30), speeds, clips_norm=False)
    forecast = forecast_batch(source, settings, 4)
    wanted = time_step(forecast, settings)
    asked = Question(1, 4, speeds, StageCapacity(2**30), Pins.parse(_PINS))
    model = source.example(1).model
    found = search(model, lambda n: run_on(source.example(1), source.example(n).inputs, source.loss), asked)
    (best,) = found.prices
    assert best.ranks[0].activation_bytes == forecast.non_model_bytes
    assert (
        best.ranks[0].device_bytes == forecast.blueprint.context.size.total_bytes + forecast.non_model_bytes
    )
    assert best.step_seconds == pytest.approx(wanted.seconds, rel=0.02)
    assert best.seconds["Adam"] == pytest.approx(wanted.busy_seconds["Adam"], rel=0.02)


@pytest.mark.parametrize(("share", "accumulation"), [(0.25, 1), (0.15, 2), (0.1, 4)])
def test_one_rank_below_device_waits_as_the_planner_of_one_process_says(
    share: float, accumulation: int
) -> None:
    source = find_model("gpt:layers=4,hidden=64,heads=4", ModelOptions(32, False, seq_is_asked=True))
    speeds = replace(machine(1), links=_slow_links())
    samples = 4 * accumulation
    pins = Pins.parse(["zero=3", "recompute=none", f"microbatches={accumulation}"])
    model = source.example(1).model

    def planned(capacity: StageCapacity) -> Price:
        asked = Question(1, samples, speeds, capacity, pins)
        found = search(
            model, lambda n: run_on(source.example(1), source.example(n).inputs, source.loss), asked
        )
        return found.prices[0]

    whole = planned(StageCapacity(2**30)).ranks[0]
    chunks = whole.device_bytes - whole.activation_bytes
    budget = int(whole.activation_bytes + share * chunks)
    config = GeminiConfig(device_bytes=budget, disk_dir="DIR", disk_bytes=2**30)
    settings = Settings(4, config, speeds, accumulation=accumulation, clips_norm=False)
    forecast = forecast_batch(source, settings, 4)
    assert not forecast.obstacles
    wanted, best = time_step(forecast, settings), planned(StageCapacity(budget, 0, 2**30))
    assert best.combination.uses_lower
    assert best.seconds["transfers"] > 0.1 * best.step_seconds
    assert best.step_seconds == pytest.approx(wanted.seconds, rel=0.08)


def _slow_links() -> tuple[LinkSpeed, ...]:
    return tuple(LinkSpeed(name, 3e7, 1e-4) for name in ("disk_read", "disk_write"))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"])
def test_ranks_are_idle_as_the_simulator_of_schedules_says(schedule: str) -> None:
    """Equal blocks, and links that take next to no time."""
    at_once = tuple(CollectiveSpeed(kind, 2, Figure(0.0), Figure(1e15)) for kind in KINDS)
    speeds = Speeds(machine(2), OperationCosts(machine(2)))
    figures = speeds.segment_costs(CutModel(net(8, 8, 8, 8, 8, 8), Part()).record(run_of(2)))
    empty = SegmentCosts(0.0, 0.0, {}, {}, 0, 0, 0, {})
    blocks = (empty, *(figures[1],) * 8, empty)
    links = Speeds(question(machine=machine(2)).machine, speeds.costs)
    pricer = Pricer(_linked(links, at_once), StageCapacity(2**30), lambda _part, _samples: blocks)
    stages = 1 if schedule in ("1f1b", "gpipe") else 2
    order = make_order(schedule, 2, 4, stages)
    ranges = pricer.ranges(Part(), 2, frozenset(), 2 * stages)
    clock = pricer.clock(Part(), 2, ranges, frozenset(), (schedule, 2, 4, stages), Gathers(1))
    forward, backward = (4 * each for each in _of_a_block(pricer, figures[1]))
    wanted = simulate(order, Costs(forward, backward / 2, backward / 2))
    assert clock.seconds == pytest.approx(wanted.seconds, rel=1e-6)
    assert clock.idle == pytest.approx(wanted.idle, rel=1e-4, abs=1e-9)


def _linked(speeds: Speeds, records: tuple[CollectiveSpeed, ...]) -> Speeds:
    return replace(speeds, machine=replace(speeds.machine, collectives=CollectiveSpeeds(records)))


def _of_a_block(pricer: Pricer, block: SegmentCosts) -> tuple[float, float]:
    """Return what forward and backward of a block take that looks at chunks and gives them its gradients."""
    looks = pricer.look_seconds([block])
    copied = pricer.pass_seconds(sum(each.numel for each in block.parameters))
    return block.forward + looks[0], block.backward + looks[1] + copied


def test_a_price_says_where_all_seconds_of_its_busiest_rank_go() -> None:
    for each in search(net(8, 64, 8, 64), run_of, question(4, 8)).prices:
        assert isinstance(each, Price)
        assert sum(each.seconds.values()) == pytest.approx(each.step_seconds, rel=0.2)


def test_gradients_go_in_the_buckets_of_the_optimizer_and_the_last_one_beside_nothing() -> None:
    assert inspect.signature(LowLevelZeroOptimizer).parameters["reduce_bucket_size"].default == BUCKET_NUMEL
    speeds = _linked(Speeds(machine(2), OperationCosts(machine(2))), _half_beside())
    sizes = [BUCKET_NUMEL // 2, BUCKET_NUMEL // 4, BUCKET_NUMEL // 2, BUCKET_NUMEL * 3]
    buckets = buckets_of([ParameterSize(str(at), numel, 4, True) for at, numel in enumerate(sizes)])
    assert [each.wide_bytes for each in buckets] == [12 * BUCKET_NUMEL, 3 * BUCKET_NUMEL, 2 * BUCKET_NUMEL]
    first, second, last = (speeds.collective("all_to_all", 2, each.wide_bytes) for each in buckets)
    assert exchange_seconds(buckets, 2, 3, speeds) == pytest.approx(first / 2 + second / 2 + last)
    weights = sum(speeds.collective("all_gather", 2, each.own_bytes / 2) for each in buckets)
    assert exchange_seconds(buckets, 2, 2, speeds) == pytest.approx(first / 2 + second / 2 + last + weights)
    assert exchange_seconds(buckets, 1, 2, speeds) == 0


def test_what_stays_whole_is_gathered_once_a_step_and_the_rest_in_every_pass() -> None:
    speeds = _linked(Speeds(machine(2), OperationCosts(machine(2))), _half_beside())
    sizes = (((2**20, 2**18)),)
    none, half, every = (Gathers(2, sizes, share).seconds(0, 4, speeds) for share in (0.0, 0.5, 1.0))
    assert every == pytest.approx(none / 8)
    assert half == pytest.approx((none + every) / 2)
    beside = sum(speeds.beside_computing("all_gather", 2, each / 2) for each in sizes[0])
    assert none == pytest.approx(beside + 2 * speeds.collective("all_gather", 2, 64))
    assert Gathers(1).seconds(0, 4, speeds) == 0


def _half_beside() -> tuple[CollectiveSpeed, ...]:
    return tuple(replace(each, computing_share=Figure(0.5)) for each in machine(2).collectives.records)


def test_a_collective_beside_computing_costs_its_share_of_the_time() -> None:
    records = tuple(
        replace(each, computing_share=Figure(0.25)) if each.kind == "all_to_all" else each
        for each in machine(2).collectives.records
    )
    speeds = _linked(Speeds(machine(2), OperationCosts(machine(2))), records)
    whole = speeds.collective("all_to_all", 2, 1e6)
    assert speeds.beside_computing("all_to_all", 2, 1e6) == pytest.approx(whole / 4)
    assert speeds.beside_computing("all_gather", 2, 1e6) == speeds.collective("all_gather", 2, 1e6)
    assert speeds.beside_computing("all_to_all", 1, 1e6) == 0
