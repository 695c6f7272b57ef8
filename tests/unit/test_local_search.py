"""The search that changes a plan a little at a time: what it keeps is no slower, fits, and repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemini.memstats import Trace
from gemini.memstats.trace import LINKS, LinkSpeed
from gemini.placement.local_search import Effort, LocalSearch
from gemini.placement.planner import by_density, choose_plan
from gemini.placement.problem import Iteration, Machine, PlanProblem
from gemini.placement.simulator import Simulation, Simulator
from gemini_bench.placement_search import transformer
from gemini_bench.placement_traces import TRACES, dram_nvme

_LAYERS = 12


def problem(share: float) -> PlanProblem:
    iteration: Iteration = transformer(_LAYERS)
    device = int(share * iteration.total_bytes)
    speeds = tuple(LinkSpeed(name, 25e9, 10e-6) for name in LINKS)
    return PlanProblem.of(iteration, Machine(device, 2 * iteration.total_bytes, 0, speeds))


def searched(it: PlanProblem) -> tuple[LocalSearch, float, Effort]:
    """Return a search that has ended, the seconds that it began with, and the effort left."""
    simulator = Simulator(it.iteration, it.machine)
    search = LocalSearch(it, simulator, by_density(it), 0.0)
    begun = search.seconds
    effort = Effort(it, waiting_seconds=1.0)
    search.improve(effort, enough=0.0)
    return search, begun, effort


@pytest.mark.parametrize("share", [0.25, 0.4])
def test_what_is_kept_is_faster_and_stays_so(share: float) -> None:
    it = problem(share)
    search, begun, effort = searched(it)
    assert search.seconds < begun
    assert 0 <= effort.left < 3 * effort.run
    simulator = Simulator(it.iteration, it.machine)
    settled = simulator.seconds(search.hints, after=20, steps=10)
    assert settled <= 1.005 * search.seconds
    assert settled < simulator.seconds(None, after=20, steps=10)


def test_equal_problems_give_equal_plans() -> None:
    found = [searched(problem(0.3))[0] for _ in range(2)]
    assert found[0].hints == found[1].hints
    assert found[0].seconds == found[1].seconds


def test_a_search_ends_where_nothing_is_left_to_gain() -> None:
    it = problem(0.3)
    search = LocalSearch(it, Simulator(it.iteration, it.machine), by_density(it), 0.0)
    effort = Effort(it, waiting_seconds=1.0)
    before = effort.left
    search.improve(effort, enough=search.seconds)
    assert effort.left == before


def test_short_waits_are_worth_little_effort() -> None:
    it = problem(0.3)
    assert Effort(it, waiting_seconds=1e-6).left < Effort(it, waiting_seconds=1e-3).left
    assert Effort(it, waiting_seconds=1.0).left == Effort(it, waiting_seconds=2.0).left


def on_disk(trace: str, slower: float) -> tuple[Iteration, Machine]:
    """Return a recorded step whose operators take ``slower`` times as long, half of it on DEVICE."""
    recorded = Trace.load(TRACES / f"{trace}.json")
    iteration = Iteration.of_trace(recorded, overlap=True)
    seconds = tuple(slower * one for one in iteration.seconds)
    iteration = replace(iteration, seconds=seconds, reserve_bytes=(0,) * iteration.num_moments)
    return iteration, dram_nvme(iteration, 0.5, recorded.links)


def moved(simulation: Simulation) -> int:
    return sum(simulation.link_bytes.values())


def cost(simulation: Simulation, machine: Machine) -> float:
    return simulation.step_seconds + machine.transfers_take * sum(simulation.link_seconds.values())


def test_of_plans_behind_computing_the_one_that_moves_least_is_followed() -> None:
    iteration, machine = on_disk("gpt2-checkpointed", slower=4.0)
    opt = Simulator(iteration, machine).run(None)
    assert opt.step_seconds == pytest.approx(sum(iteration.seconds))
    plan = choose_plan(iteration, machine).simulation
    assert plan.step_seconds == pytest.approx(opt.step_seconds)
    assert moved(plan) < 0.8 * moved(opt)


def test_what_transfers_take_from_computing_is_weighed() -> None:
    iteration, machine = on_disk("gpt2-accumulated", slower=1.0)
    taking = replace(machine, transfers_take=0.2)
    free, weighed = (choose_plan(iteration, one).simulation for one in (machine, taking))
    assert moved(weighed) < 0.95 * moved(free)
    assert cost(weighed, taking) < cost(free, taking)
    assert cost(weighed, taking) < cost(Simulator(iteration, machine).run(None), taking)
