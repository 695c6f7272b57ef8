"""Planned: from the moments of a step to what the chunk table follows, with a plan where there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from gemini import _C
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.memstats import Trace
from gemini.placement import PlacementPlan, TierCapacity
from gemini.placement.hints import make_schedule
from gemini.placement.iteration import Iteration
from gemini.placement.machine import Machine
from gemini.placement.planner import ChosenPlan, choose_plan
from gemini.placement.report import PlannedStep

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

    def __init__(self, capacity: TierCapacity) -> None:
        self._capacity = capacity
        self._chosen: dict[tuple[tuple[int, int], ...], ChosenPlan | None] = {}

    def forget(self) -> None:
        """Forget all plans: the trace has changed."""
        self._chosen.clear()

    def schedule(
        self, trace: Trace, places: Sequence[Place], placement: PlacementPlan, *, final: bool
    ) -> Planned:
        """Return what the chunk table follows.

        A plan is part of it if the policy asks for one, the times of the trace are ``final`` and the step is
        a whole iteration of it.
        """
        reserve = placement.reserve_bytes
        order = [(place.moment, place.period) for place in places if place.moment is not None]
        whole = sorted(moment for moment, _ in order) == list(range(trace.num_moments))
        if not (placement.retention and final and trace.links and whole and len(order) == len(places)):
            periods = [reserve[place.period] for place in places] if reserve else []
            accesses = [place.chunks for place in places]
            return Planned(_C.Schedule(accesses, periods, len(trace.chunk_bytes)), None)
        iteration = Iteration.of_order(trace, order, reserve)
        chosen = self._choose(trace, iteration, tuple(order), placement)
        if chosen is None:
            return Planned(make_schedule(iteration, None), None)
        step = PlannedStep(iteration, chosen, trace.chunk_kinds)
        return Planned(make_schedule(iteration, chosen.hints), step)

    def _choose(
        self, trace: Trace, iteration: Iteration, order: tuple[tuple[int, int], ...], plan: PlacementPlan
    ) -> ChosenPlan | None:
        if order not in self._chosen:
            capacity = self._capacity
            begin = time.perf_counter()
            chosen: ChosenPlan | None = None
            try:
                machine = Machine(
                    min(plan.device_limit_bytes, capacity.device_bytes),
                    capacity.host_bytes,
                    capacity.disk_bytes,
                    trace.links,
                )
                chosen = choose_plan(iteration, machine)
            except (OutOfBudgetError, ConfigError) as error:
                # The model of the step leaves out that operators may pass the soft limit.
                logger.info("the step was not planned, it follows the order alone: %s", error)
            self._chosen[order] = chosen
            if chosen is not None:
                logger.info(
                    "planned a step of %d moments in %.2f s: %s, %.3g s expected",
                    len(order),
                    time.perf_counter() - begin,
                    chosen.name,
                    chosen.simulation.step_seconds,
                )
        return self._chosen[order]
