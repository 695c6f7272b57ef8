"""The integer program that chooses the strategy of each operator: least seconds within a budget of bytes.

Every node has one choice (binary columns). A value flows from a layout of its source to a layout of each
target (continuous columns), at the cost of the conversion. Targets in one group share conversions. Memory
rows limit the bytes at a moment. The program begins without memory rows and adds those of moments at which
its solution holds too much.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from gemini.errors import OutOfBudgetError, StateError
from gemini.system.config import format_bytes, format_enough

_MOST_ROUNDS = 40  # rounds of adding memory rows
_MOST_MOMENTS = 8  # memory rows that a round adds
_SCALE = 1000.0  # objective and budgets are scaled to this: the solver's tolerances are absolute
_OPTIMAL, _INFEASIBLE = 0, 2
_SMALL, _GAP, _LARGE_GAP, _LEAST_GAP = 500, 1e-6, 1e-3, 1e-6


@dataclass(frozen=True, eq=False)
class Group:
    """The shared conversions of one value.

    Attributes:
        source: the node that makes the value.
        states: the state (layout number) of the value for each choice of ``source``.
        targets: (node, the state that it needs for each of its choices).
        seconds: ``seconds[a, b]`` is the cost of converting state a to b; infinite if impossible.
    """

    source: int
    states: tuple[int, ...]
    targets: tuple[tuple[int, tuple[int, ...]], ...]
    seconds: np.ndarray


@dataclass(frozen=True, eq=False)
class Hold:
    """Memory that is held from moment ``begin`` to ``end``, inclusive. ``nbytes`` is indexed by the choice of
    ``node``, or by the (source, target) states of the converted values of ``group``."""

    nbytes: np.ndarray
    begin: int
    end: int
    node: int = -1
    group: int = -1


@dataclass(frozen=True, eq=False)
class IntegerProgram:
    """The costs and memory of all choices.

    Attributes:
        seconds: of each node by choice.
        holds: memory over time, in addition to ``constant_bytes``.
        num_moments: number of moments.
        alike: class number of each node; nodes of one class get the same choice.
        likely: moments that probably have the most bytes.
    """

    seconds: tuple[np.ndarray, ...]
    groups: tuple[Group, ...]
    holds: tuple[Hold, ...] = ()
    num_moments: int = 1
    constant_bytes: float = 0.0
    alike: tuple[int, ...] = ()
    likely: tuple[int, ...] = (0,)

    @property
    def num_choices(self) -> int:
        """Total number of choices of all classes."""
        counts = {number: len(each) for number, each in zip(self.alike, self.seconds, strict=True)}
        return sum(counts.values())


@dataclass(frozen=True)
class Solution:
    """The choice of each node, with the total seconds and the peak bytes and its moment. ``bound``: proven
    lower bound of the seconds."""

    choices: tuple[int, ...]
    seconds: float
    peak_bytes: float
    peak_moment: int
    bound: float


class MisfitError(OutOfBudgetError):
    """No choice fits the budget. ``least_bytes`` is a budget that is enough."""

    def __init__(self, budget: int, least_bytes: int) -> None:
        super().__init__(
            f"no plan of the operators fits in {format_bytes(budget)} on each rank: the smallest needs "
            f"{format_enough(least_bytes)}; raise the budget to that, lower the batch, or add ranks"
        )
        self.least_bytes = least_bytes


def solve(
    program: IntegerProgram,
    budget: int | None = None,
    *,
    limit_seconds: float = 30.0,
    gap: float | None = None,
) -> Solution:
    """Return the fastest choices that never hold more than ``budget`` bytes (None: no limit).

    ``gap``: accepted relative distance from the bound; None: 1e-6 for small programs, 1e-3 for others.

    Raises:
        MisfitError: no choices fit.
        StateError: no choices were found within ``limit_seconds``.
    """
    columns, clock = _Columns(program), time.monotonic
    end = clock() + limit_seconds
    if gap is None:
        gap = _GAP if columns.num_binary <= _SMALL else _LARGE_GAP
    solution = columns.solution(columns.run((), None, limit_seconds, gap))
    if budget is None or solution.peak_bytes <= budget:
        return solution
    moments, slack = sorted({*program.likely, solution.peak_moment}), 0.0
    for _ in range(_MOST_ROUNDS):
        found = columns.run(moments, budget - slack, max(end - clock(), 1.0), gap)
        if found is None:
            raise MisfitError(budget, least_bytes(program))
        solution = columns.solution(found)
        if solution.peak_bytes <= budget:
            return solution
        if solution.peak_moment in moments:  # exceeded by the solver's tolerance: tighten the budget
            slack += solution.peak_bytes - budget + 1
        moments += _worst(program, solution.choices, budget, moments)
    raise StateError(
        f"no plan within {format_bytes(budget)} was found in {_MOST_ROUNDS} rounds: raise the budget"
    )


def least_bytes(program: IntegerProgram, *, limit_seconds: float = 30.0) -> int:
    """Return the smallest budget that is enough. Raises StateError if the time runs out."""
    columns, moments = _Columns(program), sorted({*program.likely})
    peak = math.inf
    for _ in range(_MOST_ROUNDS):
        found = columns.run(moments, None, limit_seconds, _LEAST_GAP, least=True)
        solution = columns.solution(found)
        peak = min(peak, solution.peak_bytes)
        proven = max(evaluate_moments(program, solution.choices)[moment] for moment in moments)
        more = _worst(program, solution.choices, proven, moments)
        if not more or peak <= proven * (1 + _LEAST_GAP):
            break
        moments += more
    return math.ceil(peak)


def nearest(
    program: IntegerProgram,
    budget: int,
    price: float,
    moments: list[int],
    *,
    limit_seconds: float,
    gap: float,
) -> Solution:
    """Return fast choices if each byte above the budget costs ``price`` seconds; a solution always exists.

    Moments with too many bytes are appended to ``moments``. Raises StateError if the time was too short.
    """
    columns, end = _Columns(program), time.monotonic() + limit_seconds
    best, least = None, math.inf
    for _ in range(_MOST_ROUNDS):
        left = end - time.monotonic()
        if best is not None and left <= 0:
            break
        solution = columns.solution(columns.run(moments, budget, max(left, 1.0), gap, price=price))
        cost = solution.seconds + price * max(solution.peak_bytes - budget, 0.0)
        if cost < least:
            best, least = solution, cost
        known = evaluate_moments(program, solution.choices)[moments] if moments else [0.0]
        more = _worst(program, solution.choices, max(budget, *known), moments)
        moments += more
        if not more:
            break
    assert best is not None
    return best


def lower_bound(
    program: IntegerProgram, budget: int | None, moments: Sequence[int], *, limit_seconds: float
) -> float:
    """Return a lower bound of the seconds within the budget: the optimum of the linear program with memory
    rows for these moments. If time runs out, the sum of each node's fastest choice."""
    columns = _Columns(program)
    try:
        found = columns.run(moments if budget is not None else (), budget, limit_seconds, 0.0, relaxed=True)
    except StateError:
        found = None
    if found is None or found.status != _OPTIMAL:
        return sum(float(each.min()) for each in program.seconds)
    return columns.seconds(found)


def _worst(program: IntegerProgram, choices: Sequence[int], limit: float, known: Sequence[int]) -> list[int]:
    """Return moments with more than ``limit`` bytes, worst first. Only a few local maxima that are not in
    ``known``."""
    nbytes = evaluate_moments(program, choices)
    padded = np.concatenate([[-1.0], nbytes, [-1.0]])
    is_top = (nbytes >= padded[:-2]) & (nbytes > padded[2:]) & (nbytes > limit)
    found = [int(each) for each in np.flatnonzero(is_top) if int(each) not in known]
    return sorted(found, key=lambda each: -nbytes[each])[:_MOST_MOMENTS]


def evaluate(program: IntegerProgram, choices: Sequence[int]) -> tuple[float, float, int]:
    """Return the seconds of these choices, the peak bytes, and the moment of the peak."""
    seconds = sum(float(each[choice]) for each, choice in zip(program.seconds, choices, strict=True))
    for group in program.groups:
        state = group.states[choices[group.source]]
        pairs = {(state, states[choices[target]]) for target, states in group.targets}
        seconds += sum(float(group.seconds[pair]) for pair in pairs)
    at_moments = evaluate_moments(program, choices)
    peak = int(np.argmax(at_moments))
    return seconds, float(at_moments[peak]), peak


def evaluate_moments(program: IntegerProgram, choices: Sequence[int]) -> np.ndarray:
    """Return the bytes at each moment."""
    used = [
        {(group.states[choices[group.source]], states[choices[target]]) for target, states in group.targets}
        for group in program.groups
    ]
    changes = np.zeros(program.num_moments + 1)
    for hold in program.holds:
        if hold.group < 0:
            nbytes = float(hold.nbytes[choices[hold.node]])
        else:
            nbytes = sum(float(hold.nbytes[pair]) for pair in used[hold.group])
        changes[hold.begin] += nbytes
        changes[hold.end + 1] -= nbytes
    found: np.ndarray = np.cumsum(changes)[:-1] + program.constant_bytes
    return found


class _Columns:
    """The columns and flow rows of a program. Nodes of one class share columns, and groups of such nodes
    share flows."""

    def __init__(self, program: IntegerProgram) -> None:
        self._program = program
        self._first: dict[int, int] = {}  # class of nodes -> its first column
        self._cost: list[float] = []
        self._rows: list[tuple[list[int], list[float], float, float]] = []
        for node, seconds in enumerate(program.seconds):
            number = program.alike[node]
            if number not in self._first:
                self._first[number] = len(self._cost)
                self._cost += [0.0] * len(seconds)
                columns = list(range(self._first[number], len(self._cost)))
                self._rows.append((columns, [1.0] * len(columns), 1.0, 1.0))
            for choice, value in enumerate(seconds):
                self._cost[self._first[number] + choice] += float(value)
        self.num_binary = len(self._cost)
        self._flows: list[dict[tuple[int, int], int]] = []
        known: dict[Any, dict[tuple[int, int], int]] = {}
        for group in program.groups:
            key = self._key(group)
            if key not in known:
                known[key] = self._flow(group)
            flow = known[key]
            self._flows.append(flow)
            for pair, column in flow.items():
                self._cost[column] += float(group.seconds[pair])
        self._matrix = self._assembled()

    def _key(self, group: Group) -> Any:
        alike = self._program.alike
        return (
            alike[group.source],
            group.states,
            tuple((alike[target], states) for target, states in group.targets),
            group.seconds.tobytes(),
        )

    def _flow(self, group: Group) -> dict[tuple[int, int], int]:
        """Add the columns of a group. Return the columns that carry its cost, by pair of states."""
        source = self._first[self._program.alike[group.source]]
        every: list[dict[tuple[int, int], int]] = []
        seen = set()
        for target, states in group.targets:
            if (self._program.alike[target], states) in seen:
                continue
            seen.add((self._program.alike[target], states))
            first = self._first[self._program.alike[target]]
            pairs = {
                (a, b): len(self._cost) + at
                for at, (a, b) in enumerate(
                    (a, b)
                    for a in sorted(set(group.states))
                    for b in sorted(set(states))
                    if math.isfinite(group.seconds[a, b])
                )
            }
            self._cost += [0.0] * len(pairs)
            self._balance(pairs, 0, source, group.states)
            self._balance(pairs, 1, first, states)
            every.append(pairs)
        if len(every) == 1:
            return every[0]
        shared: dict[tuple[int, int], int] = {}
        for pairs in every:
            for pair, column in pairs.items():
                if pair[0] == pair[1] and not group.seconds[pair]:
                    continue
                if sum(pair in each for each in every) == 1:
                    shared[pair] = column
                    continue
                if pair not in shared:
                    shared[pair] = len(self._cost)
                    self._cost.append(0.0)
                self._rows.append(([shared[pair], column], [1.0, -1.0], 0.0, math.inf))
        return shared

    def _balance(
        self, pairs: dict[tuple[int, int], int], side: int, first: int, states: Sequence[int]
    ) -> None:
        """Add rows that equate the flow out of (side 0) or into (side 1) each state with its chosen
        columns."""
        for state in sorted(set(states)):
            flows = [column for pair, column in pairs.items() if pair[side] == state]
            chosen = [first + choice for choice, each in enumerate(states) if each == state]
            values = [1.0] * len(flows) + [-1.0] * len(chosen)
            self._rows.append((flows + chosen, values, 0.0, 0.0))

    def _assembled(self) -> LinearConstraint:
        counts = [len(columns) for columns, _, _, _ in self._rows]
        columns = np.concatenate([np.asarray(each[0], dtype=np.int64) for each in self._rows])
        values = np.concatenate([np.asarray(each[1]) for each in self._rows])
        starts = np.concatenate([[0], np.cumsum(counts)])
        shape = (len(self._rows), len(self._cost))
        matrix = csr_matrix((values, columns, starts), shape=shape)
        return LinearConstraint(
            matrix, np.array([each[2] for each in self._rows]), np.array([each[3] for each in self._rows])
        )

    def _row(self, moment: int) -> np.ndarray:
        """Return the bytes of each column at a moment."""
        row = np.zeros(len(self._cost))
        for hold in self._program.holds:
            if not hold.begin <= moment <= hold.end:
                continue
            if hold.group < 0:
                first = self._first[self._program.alike[hold.node]]
                row[first : first + len(hold.nbytes)] += hold.nbytes
                continue
            for pair, column in self._flows[hold.group].items():
                row[column] += hold.nbytes[pair]
        return row

    def run(
        self,
        moments: Sequence[int],
        budget: float | None,
        limit_seconds: float,
        gap: float,
        *,
        least: bool = False,
        price: float | None = None,
        relaxed: bool = False,
    ) -> Any:
        """Return the solver's result with memory rows for these moments; None if nothing fits.

        Args:
            least: minimize the bytes at the worst moment instead of the seconds.
            price: cost of a byte above the budget in seconds; exceeding the budget is then allowed.
            relaxed: choices may be fractional.

        Raises:
            StateError: no solution was found in ``limit_seconds``.
        """
        cost = np.array(self._cost)
        cost *= _SCALE / (unit_cost := max(float(cost.max()), 1e-30))
        limits, integral = np.ones(len(cost)), np.zeros(len(cost))
        integral[: self.num_binary] = 0 if relaxed else 1
        constraints = [self._matrix]
        if moments:
            matrix = np.array([self._row(number) for number in moments])
            room = 0.0 if least else (budget or 0.0) - self._program.constant_bytes
            if room < 0 and price is None:
                return None
            unit = _SCALE / max(float(matrix.max(initial=1.0)) if least else room, 1.0)
            if least or price is not None:  # one more column: the bytes above the room at the worst of these
                wider = csr_matrix(self._matrix.A, copy=True)
                wider.resize(wider.shape[0], len(cost) + 1)
                constraints = [LinearConstraint(wider, self._matrix.lb, self._matrix.ub)]
                matrix = np.concatenate([matrix, np.full((len(matrix), 1), -1 / unit)], axis=1)
                above = 1.0 if price is None else price / unit * _SCALE / unit_cost
                cost = np.append(np.zeros(len(cost)) if least else cost, above)
                limits, integral = np.append(limits, math.inf), np.append(integral, 0)
            constraints.append(LinearConstraint(csr_matrix(matrix * unit), -math.inf, room * unit))
        found = milp(
            cost,
            integrality=integral,
            bounds=Bounds(0, limits),
            constraints=constraints,
            options={"time_limit": limit_seconds, "mip_rel_gap": gap},
        )
        if found.status == _INFEASIBLE:
            return None
        if found.x is None:
            raise StateError(
                f"the program of {self.num_binary} choices was not solved in {limit_seconds:g} seconds "
                f"({found.message}): allow more time, or a larger budget"
            )
        return found

    def seconds(self, found: Any) -> float:
        """Return the seconds of a solver result."""
        return float(np.array(self._cost) @ found.x)

    def solution(self, found: Any) -> Solution:
        """Return a solver result as choices."""
        program = self._program
        choices = []
        for node, seconds in enumerate(program.seconds):
            first = self._first[program.alike[node]]
            choices.append(int(np.argmax(found.x[first : first + len(seconds)])))
        total, peak, at = evaluate(program, choices)
        gap = found.mip_gap if getattr(found, "mip_gap", None) is not None else 0.0
        return Solution(tuple(choices), total, peak, at, total * (1 - min(max(gap, 0.0), 1.0)))
