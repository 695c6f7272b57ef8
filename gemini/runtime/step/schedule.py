"""Makes schedules and plans from a recorded iteration: its moments in program order, the plan, and the
promise, which follows the pace of the last steps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from threading import Lock
from typing import NamedTuple

from gemini import _C
from gemini.errors import ConfigError, OutOfBudgetError
from gemini.memstats import Trace
from gemini.memstats.trace import OPTIMIZER
from gemini.placement import PlacementPlan, TierCapacity
from gemini.placement.planner import choose_plan
from gemini.placement.policies import make_schedule
from gemini.placement.problem import Iteration, Machine
from gemini.placement.promise import Pace, promise_at
from gemini.placement.report import PlannedStep
from gemini.runtime.step.recorder import Accesses, Recorded, StepMeter

logger = logging.getLogger(__name__)


def steady_modes(modes: Sequence[str], accesses: Accesses, frees: Accesses) -> tuple[str, ...]:
    """Return the modes of the next iteration, given those of one that used its chunks for the first time.

    A chunk that is never freed is allocated once: the next time it has content and is modified.
    """
    freed = {chunk for chunks in frees for chunk in chunks}

    @cache
    def steady(moment: str, chunks: tuple[int, ...]) -> str:
        letters = zip(moment, chunks, strict=True)
        return "".join("m" if mode == "w" and chunk not in freed else mode for mode, chunk in letters)

    return tuple(map(steady, modes, accesses))


def typical_seconds(iterations: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return typical seconds per period, from several iterations.

    They add up to the median iteration. Each period gets the share of its median time, so an interruption of
    a single period does not count.
    """
    middle = [median(periods) for periods in zip(*iterations, strict=True)]
    total = sum(middle)
    scale = median(sum(seconds) for seconds in iterations) / total if total > 0 else 0.0
    return tuple(scale * seconds for seconds in middle)


def program_order(trace: Trace, recorded: Recorded) -> list[int] | None:
    """Return, for each moment of ``trace``, the index of the same moment in ``recorded``; None if a moment
    did not occur.

    ``recorded`` has the moments of forward and backward in the order of the trace, and updates anywhere.
    """
    updates: dict[tuple[int, ...], list[int]] = {}
    core = []
    for index, (chunks, phase) in enumerate(zip(recorded.accesses, recorded.phases, strict=True)):
        if phase == OPTIMIZER:
            updates.setdefault(chunks, []).append(index)
        else:
            core.append(index)
    rest, used = iter(core), Counter[tuple[int, ...]]()
    order = []
    for chunks, phase in zip(trace.accesses, trace.phases, strict=True):
        if phase == OPTIMIZER:
            same = updates.get(chunks, [])
            found = same[used[chunks]] if used[chunks] < len(same) else None
            used[chunks] += 1
        else:
            found = next(rest, None)
        if found is None:
            return None
        order.append(found)
    return order


def completed(trace: Trace, recorded: Recorded) -> Trace | None:
    """Return ``trace`` with modes, frees and times of an iteration that followed it; None if a moment did not
    occur."""
    order = program_order(trace, recorded)
    if order is None:
        return None
    found = recorded.moments(order)
    return replace(
        trace,
        modes=steady_modes(found.modes, found.accesses, found.frees),
        frees=found.frees,
        seconds=found.seconds,
    )


def reordered(trace: Trace, recorded: Recorded, *, keep_reserve: bool) -> Trace:
    """Return the trace of an iteration that left ``trace``.

    Missing measurements come from the moment of ``trace`` that accessed the same chunks in the same phase;
    without one, the time is the average. ``keep_reserve``: forward and backward are those of ``trace``, so
    their periods keep their reserves; otherwise every period gets the largest.
    """
    known = {key: index for index, key in enumerate(zip(trace.phases, trace.accesses, strict=True))}
    likes = [known.get(key) for key in zip(recorded.phases, recorded.accesses, strict=True)]
    average = sum(trace.seconds) / max(1, len(trace.seconds))
    return replace(
        trace,
        accesses=recorded.accesses,
        modes=steady_modes(recorded.modes, recorded.accesses, recorded.frees),
        frees=recorded.frees,
        phases=recorded.phases,
        seconds=tuple(average if like is None else trace.seconds[like] for like in likes),
        non_model_bytes=_reserve(trace, recorded.phases, keep=keep_reserve),
    )


def _reserve(trace: Trace, phases: Sequence[str], *, keep: bool) -> tuple[int, ...]:
    non_model = trace.non_model_bytes
    if not keep:
        return (max(non_model, default=0),) * len(phases)
    kept = [n for n, phase in zip(non_model, trace.phases, strict=True) if phase != OPTIMIZER]
    kept += kept[-1:] * (len(phases) - len(kept))
    return tuple(kept)


class Place(NamedTuple):
    """A moment of a step: the chunks that its operator needs; the moment of the trace at the beginning of its
    period; and its own moment in the trace (None for a part of a moment)."""

    chunks: tuple[int, ...]
    period: int
    moment: int | None


class Planned(NamedTuple):
    """The schedule for the chunk table, and its plan; None if only the order is known."""

    schedule: _C.Schedule
    step: PlannedStep | None


class StepPlanner:
    """Plans each steady order of one trace once."""

    def __init__(self, capacity: TierCapacity, *, transfers_take: float) -> None:
        """``transfers_take``: as in :class:`Machine`."""
        self._capacity = capacity
        self._transfers_take = transfers_take
        self._steps: dict[tuple[tuple[int, int], ...], PlannedStep | None] = {}

    def take(self, capacity: TierCapacity) -> None:
        """Plan for tiers with this ``capacity``."""
        self._capacity = capacity

    def forget(self) -> None:
        """Discard all plans, because the trace has changed."""
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
        """Return the schedule for the chunk table; operators of the places ``on_host`` use their chunks on
        HOST.

        It has a plan if the policy asks for one, the times of the trace are ``final``, and the step is a
        whole iteration of the trace on DEVICE: the simulator does not cover operators on HOST.
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
        """Return the DEVICE bytes that ``placement`` gives to model data, the other tiers, and the links of
        ``trace``.

        Raises:
            ConfigError: the trace lacks the speed of a link that exists.
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
            # The simulator does not know that operators may exceed the soft limit.
            logger.info("the step has no plan and follows only the recorded order: %s", error)
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
    """Measures each step that follows the plan, and updates its promise. A step is simulated only when
    somebody asks, and only if the pace has changed since the promise was made. The plan does not change."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter
        self._followed: PlannedStep | None = None  # the plan that the measured steps followed
        self._in_force: PlannedStep | None = None  # the same plan with the current promise
        self._is_new = False  # a step was measured since the last renewed()
        self._lock = Lock()  # guards the three; any thread may ask; not held while simulating

    def begin(self, step: PlannedStep | None) -> None:
        """Begin to measure a step that follows the plan of ``step``; None: it follows no plan."""
        self._meter.drop()
        if step is None:
            return
        if step is not self._followed:
            self.forget()
            with self._lock:
                self._followed = self._in_force = step
        self._meter.begin()

    def end(self, *, followed: bool) -> None:
        """End the step; it counts if it ``followed`` the plan to its end."""
        if not followed:
            self._meter.drop()
        elif self._meter.end():
            self._is_new = True

    def forget(self) -> None:
        """Discard all measurements and the promises made from them."""
        self._meter.forget()
        with self._lock:
            self._followed = self._in_force = None
            self._is_new = False

    def renewed(self, step: PlannedStep | None) -> PlannedStep | None:
        """Return ``step`` with the current promise, which is made again if the last steps had another
        pace."""
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
            if self._in_force is in_force:  # otherwise steps follow another plan by now
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
        # At another pace prefetches may conflict that did not before.
        logger.info("the promise of %.3g s stays: %s", before.simulation.step_seconds, error)
        return step
    logger.info(
        "a step of %.3g s is expected from now on, %.3g s before",
        promise.simulation.step_seconds,
        before.simulation.step_seconds,
    )
    return replace(step, promise=promise)
