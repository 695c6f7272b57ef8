"""A promise follows the pace of the last steps: on a clock that the test sets, with the real simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemini.errors import OutOfBudgetError
from gemini.memstats.trace import LINKS, LinkSpeed
from gemini.placement.planner import choose_plan
from gemini.placement.problem import Iteration, Machine
from gemini.placement.promise import Pace, promise_at
from gemini.placement.report import PlannedStep
from gemini.runtime.step import schedule as schedule_module
from gemini.runtime.step.recorder import STEPS, StepMeter
from gemini.runtime.step.schedule import PromisedStep

MIB, GIB = 2**20, 2**30

DISK = (LinkSpeed("disk_read", GIB, 0.0), LinkSpeed("disk_write", GIB, 0.0))
# Two chunks of 512 MiB take turns in room for one: a second of transfers per moment at 1 GiB/s.
TURNS = Iteration((512 * MIB,) * 2, ((0,), (1,)) * 2, ("m",) * 4, ((),) * 4, (0.1, 0.2, 0.3, 0.4), (0,) * 4)
TIGHT, ROOMY = (Machine(room * MIB, 0, 2048 * MIB, DISK) for room in (512, 2048))


class Steps:
    """A chunk manager's counters and a clock; :meth:`run` lets a step pass on them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stall_seconds = 0.0
        self._links = {name: dict.fromkeys(("bytes", "seconds", "shared_seconds"), 0.0) for name in LINKS}
        self.meter = StepMeter(self, lambda: self.now)  # type: ignore[arg-type]

    def link_stats(self) -> dict[str, dict[str, float]]:
        return {name: dict(stats) for name, stats in self._links.items()}

    def run(self, computing: float, *, stalled: float = 0.0, **moved: tuple[float, float, float]) -> None:
        """Compute, wait, and move (bytes, seconds, of these shared) over links."""
        self.now += computing + stalled
        self.stall_seconds += stalled
        for name, (nbytes, seconds, shared) in moved.items():
            stats = self._links[name]
            stats["bytes"] += nbytes
            stats["seconds"] += seconds
            stats["shared_seconds"] += shared

    def measure(self, *computing: float, **rest: Any) -> Pace | None:
        for seconds in computing:
            self.meter.begin()
            self.run(seconds, **rest)
            self.meter.end()
            self.run(7.0, disk_read=(GIB, 1.0, 0.0))  # between steps
        return self.meter.pace()


def planned(machine: Machine = TIGHT, iteration: Iteration = TURNS) -> PlannedStep:
    return PlannedStep.of_plan(iteration, machine, choose_plan(iteration, machine), ("param",) * 2)


# -- the pace --------------------------------------------------------------------------------------


def test_computing_is_what_a_step_takes_and_does_not_wait() -> None:
    assert Steps().measure(2.0, 2.0, 2.0, stalled=5.0) == Pace(2.0, (), 3)


def test_nothing_is_said_of_two_steps() -> None:
    assert Steps().measure(2.0, 2.0) is None


def test_one_slow_step_in_five_changes_nothing() -> None:
    pace = Steps().measure(2.0, 2.0, 90.0, 2.0, 2.0)
    assert pace is not None
    assert pace.computing_seconds == pytest.approx(2.0)


def test_a_lasting_change_counts_once_most_of_the_last_five_steps_have_it() -> None:
    steps = Steps()
    seconds = []
    for computing in (*(1.0,) * 9, *(2.0,) * 4):
        pace = steps.measure(computing)
        seconds.append(pace and round(pace.computing_seconds, 9))
    assert seconds == [None, None, *(1.0,) * 9, 2.0, 2.0]
    assert steps.meter.pace() == replace(Pace(0.0, (), STEPS), computing_seconds=pytest.approx(2.0))


def test_a_link_is_as_fast_as_it_is_alone_in_the_middle_one_of_the_steps() -> None:
    steps = Steps()
    for seconds, shared in ((1.0, 0.0), (1.5, 1.0), (30.0, 0.0)):
        pace = steps.measure(1.0, disk_write=(GIB, seconds, shared))
    assert pace is not None
    assert pace.links == (LinkSpeed("disk_write", GIB, 0.0),)


def test_a_link_that_moved_little_is_left_out() -> None:
    pace = Steps().measure(1.0, 1.0, 1.0, d2h=(21 * MIB, 1.0, 0.0), h2d=(22 * MIB, 1.0, 0.0))
    assert pace is not None
    assert [link.name for link in pace.links] == ["h2d"]


def test_a_step_that_is_dropped_does_not_count() -> None:
    steps = Steps()
    steps.meter.begin()
    steps.run(50.0)
    steps.meter.drop()
    assert not steps.meter.end()
    assert steps.measure(1.0, 1.0) is None


@pytest.mark.parametrize(("share", "differs"), [(0.97, True), (0.985, False), (1.015, False), (1.03, True)])
def test_a_pace_differs_by_more_than_two_percent_of_computing_or_of_a_link(
    share: float, differs: bool
) -> None:
    before = Pace(1.0, DISK)
    assert Pace(share, DISK).differs(before) is differs
    link = LinkSpeed("disk_read", share * GIB, 0.0)
    assert Pace(1.0, (link, DISK[1]), 5).differs(before) is differs


def test_what_was_not_measured_of_the_links_stays() -> None:
    slow = LinkSpeed("disk_write", MIB, 0.0)
    assert Pace(1.0, DISK).updated(Pace(2.0, (slow,), 4)) == Pace(2.0, (DISK[0], slow), 4)


# -- the promise -----------------------------------------------------------------------------------


def test_at_the_pace_of_planning_the_promise_is_that_of_planning() -> None:
    step = planned()
    again = promise_at(step.promise.pace, step.iteration, step.machine, step.chosen.hints)
    assert again.simulation == step.chosen.simulation == step.promise.simulation


def test_where_nothing_is_moved_a_step_takes_what_it_computes() -> None:
    promise = promise_at(Pace(3.0, DISK), TURNS, ROOMY, None)
    assert promise.simulation.step_seconds == pytest.approx(3.0)


def test_a_slower_link_makes_a_step_longer_by_what_its_transfers_take() -> None:
    slow = tuple(LinkSpeed(link.name, GIB / 2, 0.0) for link in DISK)
    seconds = [
        promise_at(Pace(1.0, links), TURNS, TIGHT, None).simulation.step_seconds for links in (DISK, slow)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(4.0)  # four reads and four writes of half a second


def test_a_trace_without_times_gives_every_period_the_same() -> None:
    untimed = replace(TURNS, seconds=(0.0,) * 4)
    promise = promise_at(Pace(2.0, DISK), untimed, ROOMY, None)
    assert promise.simulation.compute_seconds == pytest.approx(2.0)


# -- in force --------------------------------------------------------------------------------------


def follow(keeper: PromisedStep, steps: Steps, step: PlannedStep | None, *computing: float) -> None:
    for seconds in computing:
        keeper.begin(step)
        steps.run(seconds)
        keeper.end(followed=True)


def test_a_promise_follows_the_pace_and_the_plan_stays() -> None:
    steps, step = Steps(), planned()
    keeper = PromisedStep(steps.meter)
    follow(keeper, steps, step, 1.5, 1.5, 1.5)
    now = keeper.renewed(step)
    assert now is not None
    assert now.promise.pace == replace(step.promise.pace, computing_seconds=pytest.approx(1.5), num_steps=3)
    assert now.promise.simulation.step_seconds == pytest.approx(step.promise.simulation.step_seconds + 0.5)
    assert replace(now, promise=step.promise) == step


@pytest.mark.parametrize("computing", [(1.5, 1.5), (1.01, 1.01, 1.01)])
def test_a_promise_stays_for_few_steps_and_for_small_changes(computing: tuple[float, ...]) -> None:
    steps, step = Steps(), planned()
    keeper = PromisedStep(steps.meter)
    follow(keeper, steps, step, *computing)
    assert keeper.renewed(step) is step


def test_nothing_is_simulated_until_somebody_asks_and_then_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = Steps(), planned()
    asked: list[Pace] = []

    def counted(pace: Pace, *rest: Any) -> Any:
        asked.append(pace)
        return promise_at(pace, *rest)

    monkeypatch.setattr(schedule_module, "promise_at", counted)
    keeper = PromisedStep(steps.meter)
    follow(keeper, steps, step, *range(2, 20))
    assert not asked
    assert keeper.renewed(step) is keeper.renewed(step)
    assert len(asked) == 1


def test_small_changes_add_up_to_one_that_counts() -> None:
    steps, step = Steps(), planned()
    keeper = PromisedStep(steps.meter)
    for computing in (1.01, 1.015, 1.03):
        follow(keeper, steps, step, *(computing,) * STEPS)
        now = keeper.renewed(step)
    assert now is not None
    assert now.promise.pace.computing_seconds == pytest.approx(1.03)


def test_steps_of_another_plan_or_of_none_say_nothing_of_this_one() -> None:
    steps, step, other = Steps(), planned(), planned(ROOMY)
    keeper = PromisedStep(steps.meter)
    follow(keeper, steps, step, 9.0, 9.0)
    follow(keeper, steps, None, 9.0)
    assert keeper.renewed(step) is step
    follow(keeper, steps, other, 1.0, 1.0, 1.0)
    assert keeper.renewed(step) is step
    assert keeper.renewed(None) is None


def test_a_step_that_left_the_plan_does_not_count() -> None:
    steps, step = Steps(), planned()
    keeper = PromisedStep(steps.meter)
    follow(keeper, steps, step, 9.0, 9.0)
    keeper.begin(step)
    steps.run(9.0)
    keeper.end(followed=False)
    assert keeper.renewed(step) is step


def test_a_pace_at_which_the_step_does_not_fit_leaves_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> Any:
        raise OutOfBudgetError("too little")

    monkeypatch.setattr(schedule_module, "promise_at", refuse)
    steps, step = Steps(), planned()
    keeper = PromisedStep(steps.meter)
    follow(keeper, steps, step, 9.0, 9.0, 9.0)
    assert keeper.renewed(step) is step
