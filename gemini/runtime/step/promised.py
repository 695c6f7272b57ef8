"""PromisedStep: the promise of the planned step that is followed, kept true to what its steps take."""

from __future__ import annotations

import logging
from dataclasses import replace
from threading import Lock

from gemini.errors import OutOfBudgetError
from gemini.placement.promise import Pace, promise_at
from gemini.placement.report import PlannedStep
from gemini.runtime.step.step_meter import StepMeter

logger = logging.getLogger(__name__)


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
