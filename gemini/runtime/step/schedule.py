"""From what an iteration did to what the next ones follow: the moments of a step in the order of the program,
and Planned, the plan for them with its promise, kept true to what steps take.
"""

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
    """Return the modes of the next iteration, of one whose chunks were used for the first time.

    A chunk that nothing frees is allocated once: the next time it has content and is modified.
    """
    freed = {chunk for chunks in frees for chunk in chunks}

    @cache
    def steady(moment: str, chunks: tuple[int, ...]) -> str:
        letters = zip(moment, chunks, strict=True)
        return "".join("m" if mode == "w" and chunk not in freed else mode for mode, chunk in letters)

    return tuple(map(steady, modes, accesses))


def typical_seconds(iterations: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the times of periods, of those of some iterations.

    They add up to the iteration in the middle. Each period has the share that its middle time gives it: what
    interrupts a single one does not make it look long forever.
    """
    middle = [median(periods) for periods in zip(*iterations, strict=True)]
    total = sum(middle)
    scale = median(sum(seconds) for seconds in iterations) / total if total > 0 else 0.0
    return tuple(scale * seconds for seconds in middle)


def program_order(trace: Trace, recorded: Recorded) -> list[int] | None:
    """Return, per moment of ``trace``, which moment of ``recorded`` was it; None where one did not occur.

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
    """Return ``trace`` with modes, frees and times of an iteration that followed it; None where parts of it
    did not occur."""
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

    What was not measured is taken from the moment of ``trace`` that accessed the same chunks in the same
    phase, or guessed: an average time, a modification. ``keep_reserve``: forward and backward are those of
    ``trace``, so their periods need the memory they needed; otherwise every period is given the most.
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
        """Return ``step`` with the promise in force, made again if its last steps had another pace."""
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
