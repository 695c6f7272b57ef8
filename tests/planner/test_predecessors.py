"""Alone, each part of a price is what the planner for it says: of one rank, and of a schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planner_models import machine, net, question, run_of

from gemini.cli.plan_layout import run_on
from gemini.cli.plan_model import ModelOptions, find_model
from gemini.forecast.forecast import Settings, look, time_step
from gemini.forecast.meter import OperationCosts
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.parallel.pipeline.orders import Costs, make_order, simulate
from gemini.planner.chunks import Capacity
from gemini.planner.figures import Figures, Speeds
from gemini.planner.price import Price, Pricer
from gemini.planner.records import CutModel, Part
from gemini.planner.search import Question, search
from gemini.planner.space import Pins
from gemini.runtime.config import GeminiConfig

_PINS = ["zero=3", "recompute=none", "microbatches=1"]


@pytest.mark.parametrize("name", ["gpt:layers=3,hidden=64,heads=4", "gpt:layers=6,hidden=32,heads=2"])
def test_one_rank_takes_what_the_planner_of_one_process_says(name: str) -> None:
    source, speeds = find_model(name, ModelOptions(32, False, seq_is_asked=True)), machine(1)
    settings = Settings(4, GeminiConfig(device_bytes=2**30), speeds, clips_norm=False)
    outlook = look(source, settings, 4)
    wanted = time_step(outlook, settings)
    asked = Question(1, 4, speeds, Capacity(2**30), Pins.parse(_PINS))
    model = source.example(1).model
    found = search(model, lambda n: run_on(source.example(1), source.example(n).inputs, source.loss), asked)
    (best,) = found.prices
    assert best.ranks[0].activation_bytes == outlook.non_model_bytes
    assert best.ranks[0].device_bytes == outlook.blueprint.context.size.total_bytes + outlook.non_model_bytes
    assert best.step_seconds == pytest.approx(wanted.seconds, rel=0.02)
    assert best.seconds["Adam"] == pytest.approx(wanted.busy_seconds["Adam"], rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble", "zbv"])
def test_ranks_are_idle_as_the_simulator_of_schedules_says(schedule: str) -> None:
    """Equal blocks, and links that take next to no time."""
    at_once = tuple(CollectiveSpeed(kind, 2, Figure(0.0), Figure(1e15)) for kind in KINDS)
    speeds = Speeds(machine(2), OperationCosts(machine(2)))
    figures = speeds.figures(CutModel(net(8, 8, 8, 8, 8, 8), Part()).record(run_of(2)))
    empty = Figures(0.0, 0.0, {}, {}, 0, 0, 0, {})
    blocks = (empty, *(figures[1],) * 8, empty)
    links = Speeds(question(machine=machine(2)).machine, speeds.costs)
    pricer = Pricer(_linked(links, at_once), Capacity(2**30), lambda _part, _samples: blocks)
    stages = 1 if schedule in ("1f1b", "gpipe") else 2
    order = make_order(schedule, 2, 4, stages)
    clock = pricer.clock(Part(), 2, "none", (schedule, 2, 4, stages), 1)
    forward, backward = (4 * each for each in (figures[1].forward, _backward(pricer, figures[1])))
    wanted = simulate(order, Costs(forward, backward / 2, backward / 2))
    assert clock.seconds == pytest.approx(wanted.seconds, rel=1e-6)
    assert clock.idle == pytest.approx(wanted.idle, rel=1e-4, abs=1e-9)


def _linked(speeds: Speeds, records: tuple[CollectiveSpeed, ...]) -> Speeds:
    return replace(speeds, machine=replace(speeds.machine, collectives=CollectiveSpeeds(records)))


def _backward(pricer: Pricer, block: Figures) -> float:
    """Return what backward of a block takes, which hands its gradients to chunks."""
    return block.backward + pricer.pass_seconds(sum(each.numel for each in block.parameters))


def test_a_price_says_where_all_seconds_of_its_busiest_rank_go() -> None:
    for each in search(net(8, 64, 8, 64), run_of, question(4, 8)).prices:
        assert isinstance(each, Price)
        assert sum(each.seconds.values()) == pytest.approx(each.step_seconds, rel=0.2)


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
