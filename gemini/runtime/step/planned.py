"""Planned: from the moments of a step to what the chunk table follows, with a plan where there is one; and
the plan's promise, kept true to what its steps take."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from gemini import _C
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.memstats import Trace
from gemini.placement import PlacementPlan, TierCapacity
from gemini.placement.planner import choose_plan
from gemini.placement.policies import make_schedule
from gemini.placement.problem import Iteration, Machine
from gemini.placement.promise import Pace, promise_at
from gemini.placement.report import PlannedStep
from gemini.runtime.step.meters import StepMeter

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """A moment of a step: the chunks that its operator needs, the moment of the trace whose period it lies
    in, and the moment of the trace that it is, None for part of one."""

    chunks: tuple[int, ...]
    period: int
    moment: int | None


class Planned(NamedTuple):
    """What the chunk table follows, and the plan behind it; None for the order alone, unplanned."""

    schedule: _C.Schedule
    step: PlannedStep | None


class StepPlanner:
    """Plans each steady order of one trace once."""

    def __init__(self, capacity: TierCapacity, *, transfers_take: float) -> None:
        """``transfers_take``: as :class:`Machine` has it."""
        self._capacity = capacity
        self._transfers_take = transfers_take
        self._steps: dict[tuple[tuple[int, int], ...], PlannedStep | None] = {}

    def take(self, capacity: TierCapacity) -> None:
        """Plan for tiers of this ``capacity``."""
        self._capacity = capacity

    def forget(self) -> None:
        """Forget all plans: the trace has changed."""
        self._steps.clear()

    def schedule(
        self,
        trace: Trace,
        places: Sequence[Place],
        placement: PlacementPlan,
        *,
        final: bool,
        on_host: Sequence[int] = (),
    ) -> Planned:
        """Return what the chunk table follows; operators of the places ``on_host`` use their chunks there.

        A plan is part of it if the policy asks for one, the times of the trace are ``final`` and the step is
        a whole iteration of it, all of it on DEVICE: operators on HOST are beyond the simulator.
        """
        reserve = placement.reserve_bytes
        order = [(place.moment, place.period) for place in places if place.moment is not None]
        whole = sorted(moment for moment, _ in order) == list(range(trace.num_moments))
        whole = whole and len(order) == len(places) and not on_host
        wanted = placement.retention and placement.device_limit_bytes > 0
        if not (wanted and final and trace.links and whole):
            periods = [reserve[place.period] for place in places] if reserve else []
            accesses = [place.chunks for place in places]
            return Planned(_C.Schedule(accesses, periods, len(trace.chunk_bytes), on_host), None)
        iteration = Iteration.of_order(trace, order, reserve)
        key = tuple(order)
        if key not in self._steps:
            self._steps[key] = self._plan(trace, iteration, placement)
        step = self._steps[key]
        return Planned(make_schedule(iteration, step.chosen.hints if step is not None else None), step)

    def machine(self, trace: Trace, placement: PlacementPlan) -> Machine:
        """Return the tiers as far as ``placement`` gives them to model data, and the links of ``trace``.

        Raises:
            ConfigError: the trace does not know the speed of a link that is there.
        """
        capacity = self._capacity
        return Machine(
            min(placement.device_limit_bytes, capacity.device_bytes),
            capacity.host_bytes,
            capacity.disk_bytes,
            trace.links,
            transfers_take=self._transfers_take,
        )

    def _plan(self, trace: Trace, iteration: Iteration, placement: PlacementPlan) -> PlannedStep | None:
        begin = time.perf_counter()
        try:
            machine = self.machine(trace, placement)
            chosen = choose_plan(iteration, machine)
        except (OutOfBudgetError, ConfigError) as error:
            # The model of the step leaves out that operators may pass the soft limit.
            logger.info("the step was not planned, it follows the order alone: %s", error)
            return None
        logger.info(
            "planned a step of %d moments in %.2f s: %s, %.3g s expected",
            iteration.num_moments,
            time.perf_counter() - begin,
            chosen.name,
            chosen.simulation.step_seconds,
        )
        return PlannedStep.of_plan(iteration, machine, chosen, trace.chunk_kinds)


class PromisedStep:
    """Measures each step that follows the plan. Simulates one only when somebody asks, and only if the pace
    has changed since the promise in force was made. The plan stays as it is.
    """

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter
        self._followed: PlannedStep | None = None  # which steps the meter has measured
        self._in_force: PlannedStep | None = None  # the same with the promise in force
        self._is_new = False  # whether a step was measured since somebody asked
        self._lock = Lock()  # guards the three: any thread may ask, and simulates outside of it

    def begin(self, step: PlannedStep | None) -> None:
        """Note that a step begins which follows ``step``, or no plan."""
        self._meter.drop()
        if step is None:
            return
        if step is not self._followed:
            self.forget()
            with self._lock:
                self._followed = self._in_force = step
        self._meter.begin()

    def end(self, *, followed: bool) -> None:
        """Note that the step has ended; it counts if it ``followed`` the plan to its end."""
        if not followed:
            self._meter.drop()
        elif self._meter.end():
            self._is_new = True

    def forget(self) -> None:
        """Forget what was measured, and all promises made of it."""
        self._meter.forget()
        with self._lock:
            self._followed = self._in_force = None
            self._is_new = False

    def renewed(self, step: PlannedStep | None) -> PlannedStep | None:
        """Return ``step`` with the promise in force, made anew if its last steps had another pace."""
        with self._lock:
            in_force, is_new = self._in_force, self._is_new
            if step is None or step is not self._followed or in_force is None:
                return step
            measured = self._meter.pace() if is_new else None
            self._is_new = False
        if measured is None:
            return in_force
        renewed = _at_pace(in_force, measured)
        with self._lock:
            if self._in_force is in_force:  # else steps follow another plan by now
                self._in_force = renewed
        return renewed


def _at_pace(step: PlannedStep, measured: Pace) -> PlannedStep:
    before = step.promise
    pace = before.pace.updated(measured)
    if not pace.differs(before.pace):
        return step
    try:
        promise = promise_at(pace, step.iteration, step.machine, step.chosen.hints)
    except OutOfBudgetError as error:
        # At another pace prefetches are in each other's way where they were not before.
        logger.info("the promise of %.3g s stays: %s", before.simulation.step_seconds, error)
        return step
    logger.info(
        "a step of %.3g s is expected from now on, %.3g s before",
        promise.simulation.step_seconds,
        before.simulation.step_seconds,
    )
    return replace(step, promise=promise)
