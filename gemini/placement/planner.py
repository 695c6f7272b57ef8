"""The planner: makes plans in several ways, simulates each, improves the best and returns it.

The order alone (OPT with prefetch) is a candidate, so in the simulator no plan is worse than it. Among plans
of equal time, the one that moves least is best: transfers that computing hides are free in the simulator, but
they wear out a disk, and on a CPU they take processor time and memory bandwidth from computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gemini.errors import OutOfBudgetError
from gemini.placement.local_search import Effort, LocalSearch
from gemini.placement.policies import Hints, make_hints
from gemini.placement.problem import Flags, Iteration, Machine, PlanProblem
from gemini.placement.simulator import Simulation, Simulator

if TYPE_CHECKING:
    from gemini.placement.retention import Retention

OPT = "opt"

# Lead of fetches and lag of flushes in the program, and how long a chunk being flushed counts in the plan,
# each as a multiple of the transfer time. Ordered by how often each was best on the shipped traces. The
# second gives the bound.
_PROGRAMS = (
    (1.0, 1.0, 1.0),
    (0.0, 0.0, 0.0),
    (0.0, 0.0, 1.0),
    (2.0, 2.0, 1.0),
    (1.0, 1.0, 2.0),
    (4.0, 2.0, 1.0),
)
_FIRST_AND_LAST = 3  # the order alone and the chosen plan, in simulations of three steps
_GREEDY_AFTER = 4  # density and static come after this many programs
_WORTH_IT = 1e-3  # a plan must gain more than this share of the step
_MOVES_LESS = 0.95  # ... unless it is no slower and its links are busy for less than this share
_MOVING = 1e-3  # least weight of a busy link second, in seconds of the step, in comparisons
_MOVING_WORTH = 0.02  # ... in the decision how long to plan
_SAME = 1e-9  # rounding tolerance of two sums of the same times
# Steps may take long to settle: the last comparison skips six steps and averages six more, if that costs no
# more than a quarter of the effort.
_SETTLED = {"after": 6, "steps": 6}
_SETTLED_COST = 8  # of both, in simulations of three steps


@dataclass(frozen=True)
class ChosenPlan:
    """The best plan found: its name, its hints for the core (None: the order alone), and its simulation.

    ``candidates``: every plan tried, with its simulated seconds per step. ``bound_seconds``: a lower bound
    for all plans, from the computing time and the bytes that the busier link must carry.
    """

    name: str
    hints: Hints | None
    simulation: Simulation
    candidates: tuple[tuple[str, float], ...]
    bound_seconds: float


def choose_plan(iteration: Iteration, machine: Machine) -> ChosenPlan:
    """Return the plan with the shortest simulated step, including the time that transfers take from
    computing; among equals the one that moves least. Deterministic.

    Raises:
        OutOfBudgetError: the step does not fit the machine.
    """
    simulator = Simulator(iteration, machine)
    compute = sum(iteration.seconds)
    opt = simulator.run(None)
    if not iteration.num_moments or not any(opt.link_bytes.values()):
        return ChosenPlan(OPT, None, opt, ((OPT, opt.step_seconds),), compute)
    search = _Search(PlanProblem.of(iteration, machine), simulator, opt)
    search.try_all()
    search.improve()
    best = opt if search.best is None else simulator.run(search.best)
    if not search.is_worth_it(best, opt):
        return ChosenPlan(OPT, None, opt, tuple(search.tried), max(compute, search.bound))
    return ChosenPlan(search.name, search.best, best, tuple(search.tried), max(compute, search.bound))


class _Search:
    """Keeps the best plan so far, even if it is worse than the order alone, and the remaining effort."""

    def __init__(self, problem: PlanProblem, simulator: Simulator, opt: Simulation) -> None:
        self._problem = problem
        self._simulator = simulator
        self.name = OPT
        self.best: Hints | None = None
        self._cost = float("inf")
        self._keep: Flags = np.zeros(len(problem.intervals), dtype=bool)
        self._lag = 0.0
        self.tried: list[tuple[str, float]] = [(OPT, opt.step_seconds)]
        self.bound = 0.0
        self._taken = problem.machine.transfers_take
        waiting = opt.step_seconds - sum(problem.iteration.seconds)
        self._effort = Effort(problem, waiting + max(self._taken, _MOVING_WORTH) * _moving(opt))
        self._effort.spend(_FIRST_AND_LAST * self._effort.run)
        self._checks_settled = 4 * _SETTLED_COST * self._effort.run <= self._effort.left
        if self._checks_settled:
            self._effort.spend(_SETTLED_COST * self._effort.run)

    def try_all(self) -> None:
        """Try the candidates in order, as far as the effort allows."""
        for name, keep, lag in self._candidates():
            if not self._effort.afford(self._effort.run):
                return
            self.tried.append((name, self._try(name, keep, lag)))

    def is_worth_it(self, best: Simulation, opt: Simulation) -> bool:
        """Say whether the best plan is really faster than the order alone, or is no slower and moves less.
        Compares many steps if the effort allows."""
        may_wait = self._taken * (_moving(opt) - _moving(best))
        moves_less = _moving(best) < _MOVES_LESS * _moving(opt)
        may_wait += opt.step_seconds * (_SAME if moves_less else -_WORTH_IT)
        if best.step_seconds > opt.step_seconds + may_wait:
            return False
        if not self._checks_settled:
            return True
        settled = [self._simulator.seconds(hints, **_SETTLED) for hints in (self.best, None)]
        return settled[0] <= settled[1] + may_wait

    def improve(self) -> None:
        """Improve the best plan by local search as long as there is effort."""
        if self.best is None or not len(self._keep):
            return
        search = LocalSearch(self._problem, self._simulator, self._keep, self._lag)
        search.improve(self._effort, (1 + _WORTH_IT) * sum(self._problem.iteration.seconds))
        if search.has_improved:
            self.name, self.best = f"{self.name} improved", search.hints
            self.tried.append((self.name, search.seconds))

    def _candidates(self) -> Iterator[tuple[str, Flags, float]]:
        from gemini.placement.retention import round_retention  # imports scipy, which is slow

        solved: dict[tuple[float, float], Retention | None] = {}
        for number, (lead, lag, room) in enumerate(_PROGRAMS):
            if number == _GREEDY_AFTER:
                yield "density", by_density(self._problem), 0.0
                yield "static", static(self._problem), 0.0
            if (lead, lag) not in solved:
                solved[lead, lag] = self._solve(lead, lag)
            found = solved[lead, lag]
            if found is not None:
                name = f"lp lead={lead:g} lag={lag:g}" + (f" flush={room:g}" if room else "")
                yield name, round_retention(self._problem, found), room

    def _solve(self, lead: float, lag: float) -> Retention | None:
        from gemini.placement.retention import solve_retention

        if not self._effort.afford(self._effort.solve):
            return None
        found = solve_retention(self._problem, lead=lead, lag=lag)
        one_tier_below = not (self._problem.machine.host_bytes and self._problem.machine.disk_bytes)
        # With two tiers below, prices are averages.
        if found is not None and lead == lag == 0 and one_tier_below:
            self.bound = (1 - _WORTH_IT) * found.link_seconds  # minus the possible cost of the tie-break
        return found

    def _try(self, name: str, keep: Flags, lag: float) -> float:
        hints = make_hints(self._problem.intervals, keep, self._problem.flushed_at(lag))
        try:
            seconds, moving = self._simulator.seconds_moving(hints)
        except OutOfBudgetError:
            return float("inf")
        cost = seconds + max(self._taken, _MOVING) * moving
        if cost <= self._cost:
            self.name, self.best, self._cost = name, hints, cost
            self._keep, self._lag = keep, lag
        return seconds


def _moving(simulation: Simulation) -> float:
    return sum(simulation.link_seconds.values())


def by_density(problem: PlanProblem) -> Flags:
    """Keep the intervals that save the most transfer seconds per byte and second of room."""
    them = problem.intervals
    saved = problem.read_seconds + np.where(them.dirty, problem.write_seconds, 0.0)
    begin, end = them.begin + 1 + problem.num_moments, them.end + problem.num_moments
    seconds = problem.starts[end] - problem.starts[begin]
    density = saved / (np.maximum(them.nbytes, 1) * np.maximum(seconds, 1e-12))
    room = (problem.limit_bytes - them.operand_bytes).astype(np.float64)
    return problem.pack(np.argsort(-density, kind="stable"), them.begin + 1, them.end, room)


def static(problem: PlanProblem) -> Flags:
    """Keep the most used chunks for the whole step, and no others."""
    them = problem.intervals
    saved = problem.read_seconds + np.where(them.dirty, problem.write_seconds, 0.0)
    of_chunk = np.bincount(them.chunk, weights=saved)
    sizes = np.zeros_like(of_chunk)
    sizes[them.chunk] = them.nbytes
    order = np.argsort(-of_chunk / np.maximum(sizes, 1), kind="stable")
    keep = np.zeros(len(them), dtype=bool)
    for chunk in order.tolist():
        more = keep | (them.chunk == chunk)
        if problem.fits(more):
            keep = more
    return keep
