"""Local search: a plan is changed a little at a time. A change is kept that makes the step no slower, or
slower by no more than its transfers take less from computing.

A change is not simulated from the start: the steady state of the plan so far goes on with the changed one,
for two steps. Most changes are given up during the first.
"""

from __future__ import annotations

import random

import numpy as np

from gemini.errors import OutOfBudgetError
from gemini.placement.effort import Effort
from gemini.placement.hints import Hints, make_hints
from gemini.placement.intervals import Flags
from gemini.placement.moves import move_near_a_wait
from gemini.placement.problem import PlanProblem
from gemini.placement.simulator import Simulator

_STEPS_TO_SETTLE = 3
# How much slower the first step may be where a chunk is to stay from one step to the next: it is not there
# yet. Of some 150 such changes that were no slower in the end, all but one were within 1 %.
_FIRST_STEP_MAY_TAKE = 1.02


class LocalSearch:
    """The best plan so far: ``hints`` and its step ``seconds``."""

    def __init__(self, problem: PlanProblem, simulator: Simulator, keep: Flags, lag: float) -> None:
        """Begin with a plan that fits. ``lag`` as in :meth:`PlanProblem.flushed_at`; raises OutOfBudgetError
        where the step does not fit the machine after all."""
        self._problem = problem
        self._simulator = simulator
        self._flushed_at = problem.flushed_at(lag)
        self._keep = keep
        self._taken = self._taken_by(keep)
        self.hints = self._hints(keep)
        self._run = simulator.begin(self.hints)
        for _ in range(_STEPS_TO_SETTLE):
            self.seconds, self._waits, _ = self._run.step()
        self._begun = self.seconds + self._taken

    @property
    def has_improved(self) -> bool:
        """Whether the plan is better than the one that the search began with."""
        return self.seconds + self._taken < self._begun

    def improve(self, effort: Effort, enough: float) -> None:
        """Try changes until there is no effort left, or the step takes no more than ``enough`` seconds, and
        its transfers nothing from computing."""
        chance = random.Random(0)
        while (self._taken or self.seconds > enough) and effort.afford(effort.change):
            keep = move_near_a_wait(self._problem, self._keep, self._waits, chance)
            if keep is None:
                continue
            if not effort.afford(2 * effort.step):
                return
            steps = self._try(keep)
            effort.spend(-int((2 - steps) * effort.step))

    def _taken_by(self, keep: Flags) -> float:
        """Return what a plan's transfers take from computing."""
        share = self._problem.machine.transfers_take
        return share * self._problem.moving_seconds(keep) if share else 0.0

    def _hints(self, keep: Flags) -> Hints:
        return make_hints(self._problem.intervals, keep, self._flushed_at)

    def _try(self, keep: Flags) -> float:
        """Take another plan if it is no slower, with what its transfers take from computing; return how many
        steps that took to see."""
        moments = self._problem.num_moments
        from_step_to_step = np.any(self._problem.intervals.end[keep != self._keep] >= moments)
        hints = self._hints(keep)
        taken = self._taken_by(keep)
        most = self.seconds + self._taken - taken
        run = self._run.branch(self._simulator.schedule(hints))
        try:
            _, _, first = run.step(most * (_FIRST_STEP_MAY_TAKE if from_step_to_step else 1.0))
            if first < moments:
                return first / moments
            seconds, waits, second = run.step(most)
        except OutOfBudgetError:
            return 2.0
        if second == moments:
            self._keep, self._run, self._waits = keep, run, waits
            self.hints, self.seconds, self._taken = hints, seconds, taken
        return 1.0 + second / moments
