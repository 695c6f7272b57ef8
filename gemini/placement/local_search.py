"""Local search: changes a plan step by step, within an effort limit. A change is kept if the step
does not become slower, or if its transfers save at least as much computing time as the step loses.

A change is not simulated from the start: the steady state of the current plan continues with the changed one
for two steps. Most changes are rejected during the first step.
"""

from __future__ import annotations

import random

import numpy as np

from gemini.errors import OutOfBudgetError
from gemini.placement.policies import Hints, make_hints
from gemini.placement.problem import Flags, PlanProblem
from gemini.placement.simulator import Simulator

_STEPS_TO_SETTLE = 3
# The first step may be this much slower if a chunk is to stay from one step to the next, because it is not
# there yet. Of some 150 such changes that were no slower in the end, all but one were within 1 %.
_FIRST_STEP_MAY_TAKE = 1.02
_REACH = 24  # number of moments before a wait in which transfers may delay it
_MOST_GIVEN_UP = 4  # intervals that one move may drop for another
_PLAIN = 0.3  # share of random moves, without regard to waits
# In units of about 0.03 us: less than a second for a thousand chunks and moments.
_MOST = 25_000_000
_UNITS_PER_SECOND = 30_000_000
_STEPS_WORTH = 120  # planning may take as long as the waits of this many unplanned steps


class LocalSearch:
    """The best plan found so far: ``hints`` and its step time ``seconds``."""

    def __init__(self, problem: PlanProblem, simulator: Simulator, keep: Flags, lag: float) -> None:
        """Begin with a plan that fits. ``lag``: as in :meth:`PlanProblem.flushed_at`. Raises OutOfBudgetError
        if the step does not fit the machine in the simulator."""
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
        """Whether the plan is better than the initial one."""
        return self.seconds + self._taken < self._begun

    def improve(self, effort: Effort, enough: float) -> None:
        """Try changes until the effort is used up, or until the step takes no more than ``enough`` seconds
        and its transfers take nothing from computing."""
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
        """Return the seconds that a plan's transfers take from computing."""
        share = self._problem.machine.transfers_take
        return share * self._problem.moving_seconds(keep) if share else 0.0

    def _hints(self, keep: Flags) -> Hints:
        return make_hints(self._problem.intervals, keep, self._flushed_at)

    def _try(self, keep: Flags) -> float:
        """Adopt another plan if it is no slower, including the time that its transfers take from computing.
        Returns the number of simulated steps."""
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


def move_near_a_wait(
    problem: PlanProblem, keep: Flags, waits: list[float], chance: random.Random
) -> Flags | None:
    """Return a changed plan that fits: one more interval is kept, usually one with transfers before a wait,
    and some that overlap it are dropped. None: no such change was found."""
    them = problem.intervals
    moved: Flags = keep.copy()
    if sum(waits) <= 0.0 or chance.random() < _PLAIN:
        for _ in range(chance.randint(1, 3)):
            i = chance.randrange(len(keep))
            moved[i] = not moved[i]
        return moved if problem.fits(moved) else None
    (wait,) = chance.choices(range(len(waits)), weights=waits)
    back = chance.randint(1, _REACH)
    moments = problem.num_moments
    near = ((wait - them.end) % moments < back) | ((wait - them.begin) % moments < back)
    wanted = np.nonzero(near & ~keep)[0]
    if not len(wanted):
        return None
    one = int(wanted[chance.randrange(len(wanted))])
    moved[one] = True
    for _ in range(_MOST_GIVEN_UP + 1):
        over = np.nonzero(them.kept_bytes(moved) > problem.limit_bytes)[0]
        if not len(over):
            return moved
        at = int(over[chance.randrange(len(over))])
        around = (them.begin < at) & (at < them.end) | (them.begin < at + moments) & (at + moments < them.end)
        given = np.nonzero(around & moved)[0]
        given = given[given != one]
        if not len(given):
            return None
        moved[int(given[chance.randrange(len(given))])] = False
    return None


class Effort:
    """The remaining effort, and the costs of operations: ``run``, a simulation of three steps from an empty
    DEVICE; ``step``, one more simulated step; ``change``, making a changed plan; ``solve``, a linear
    program."""

    def __init__(self, problem: PlanProblem, waiting_seconds: float) -> None:
        """``waiting_seconds``: how long a step waits for transfers without a plan."""
        chunks, moments = len(problem.iteration.chunk_bytes), problem.num_moments
        rows = len(problem.intervals) + moments
        self.run = 2_000 + moments * (chunks * 7 // 20 + 110)
        self.step = self.run // 5
        self.change = 3_000 + 6 * rows
        self.solve = rows * (150 + rows // 3)
        self.left = min(_MOST, int(_STEPS_WORTH * waiting_seconds * _UNITS_PER_SECOND))

    def spend(self, cost: int) -> None:
        """Subtract ``cost``, even beyond the rest; a negative cost adds."""
        self.left -= cost

    def afford(self, cost: int) -> bool:
        """Subtract ``cost`` if that much is left; say whether it was."""
        if self.left < cost:
            return False
        self.left -= cost
        return True
