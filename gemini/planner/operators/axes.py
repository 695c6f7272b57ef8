"""Solves integer programs for meshes with several axes, one axis at a time.

The number of choices multiplies with the axes: 2,200 choices of a small LLaMA along one axis are 9,700 along
two, with 260,000 flows between them. Therefore one axis after another is free, while the layouts along the
other axes stay fixed, until no axis gains anything. Bytes above the budget cost seconds, so every turn has a
solution, and each turn reduces these bytes. Finally a linear program over all choices gives a lower bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gemini.errors import StateError
from gemini.planner.operators.conversions import OperatorLayout
from gemini.planner.operators.program import (
    Group,
    IntegerProgram,
    Solution,
    evaluate,
    lower_bound,
    nearest,
    solve,
)
from gemini.planner.operators.rules import Strategy
from gemini.system.config import format_bytes, format_enough

_FEW = 4000  # programs up to this number of choices are solved whole
_MOST_TURNS = 12
_ROUGH_GAP, _GAP = 2e-2, 1e-3  # solver gap in the first turn of each axis, and in later turns
_GAIN = 1e-4  # relative gain below which an axis counts as idle
_ABOVE = 10.0  # cost of exceeding the budget by 100 %, in steps without a budget
_OF_BOUND = 0.4  # share of the time for the bound, or for the whole program if no turn found a solution
_OF_AXIS = 0.4  # share of the remaining time for one axis


@dataclass(frozen=True, eq=False)
class Axes:
    """The effect of each node's choices along each axis of a mesh.

    Attributes:
        kinds: ``kinds[node][choice, axis]`` is equal for choices that have the same layouts along an axis.
        whole: the choice of each node in which every rank has all of every tensor.
    """

    sizes: tuple[int, ...]
    kinds: tuple[np.ndarray, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], choices: Sequence[tuple[Strategy, ...]]) -> Axes:
        """Return the axes for the strategies of each node."""
        every = {id(each): each for each in choices}  # nodes of one kind share a tuple
        kinds = {number: _kinds(each, len(sizes)) for number, each in every.items()}
        whole = {number: whole_choice(each) for number, each in every.items()}
        numbers = [id(each) for each in choices]
        return cls(
            tuple(sizes), tuple(kinds[each] for each in numbers), tuple(whole[each] for each in numbers)
        )

    def free(self, chosen: Sequence[int], axis: int) -> list[np.ndarray]:
        """Return the choices of each node that have the layouts of the chosen one along all other axes."""
        others = [each for each in range(len(self.sizes)) if each != axis]
        return [
            np.flatnonzero((kinds[:, others] == kinds[choice, others]).all(axis=1))
            for kinds, choice in zip(self.kinds, chosen, strict=True)
        ]


def whole_choice(strategies: Sequence[Strategy]) -> int:
    """Return the choice in which every rank has all of every tensor."""
    for number, each in enumerate(strategies):
        layouts = [layout for layout in (*each.outputs, *each.inputs) if layout is not None]
        if not any(layout.cut or layout.partial for layout in layouts):
            return number
    raise AssertionError("every node may run whole")


def _kinds(strategies: Sequence[Strategy], num_axes: int) -> np.ndarray:
    known: dict[tuple[int, ...], int] = {}
    return np.array(
        [
            [
                known.setdefault(
                    tuple(_along(layout, axis) for layout in (*each.outputs, *each.inputs)), len(known)
                )
                for axis in range(num_axes)
            ]
            for each in strategies
        ]
    )


def _along(layout: OperatorLayout | None, axis: int) -> int:
    """Return the dimension that an axis cuts; -1: none; -2: no tensor, or partial sums along the axis."""
    if layout is None or axis in layout.partial:
        return -2
    return next((dim for dim, axes in enumerate(layout.dims) if axis in axes), -1)


def _restricted(program: IntegerProgram, kept: Sequence[np.ndarray]) -> IntegerProgram:
    """Return the program with only the choices in ``kept``."""

    def states(node: int, every: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(every[choice] for choice in kept[node])

    return replace(
        program,
        seconds=tuple(each[few] for each, few in zip(program.seconds, kept, strict=True)),
        groups=tuple(
            Group(
                each.source,
                states(each.source, each.states),
                tuple((node, states(node, every)) for node, every in each.targets),
                each.seconds,
            )
            for each in program.groups
        ),
        holds=tuple(
            each if each.group >= 0 else replace(each, nbytes=each.nbytes[kept[each.node]])
            for each in program.holds
        ),
    )


def solve_on_mesh(
    program: IntegerProgram, axes: Axes, budget: int | None = None, *, limit_seconds: float = 30.0
) -> Solution:
    """Return fast choices that never hold more than ``budget`` bytes, with a lower bound of the seconds.

    Programs of few choices or one axis are solved exactly, with :func:`solve`. Raises the errors of
    :func:`solve`.
    """
    if len(axes.sizes) == 1 or program.num_choices <= _FEW:
        return solve(program, budget, limit_seconds=limit_seconds)
    end = time.monotonic() + limit_seconds
    found = _Turns(program, axes, budget, end - _OF_BOUND * limit_seconds).run()
    seconds, peak, moment = evaluate(program, found)
    left = max(end - time.monotonic(), _OF_BOUND * limit_seconds)
    if budget is None or peak <= budget:
        moments = sorted({*program.likely, moment})
        bound = lower_bound(program, budget, moments, limit_seconds=left)
        return Solution(tuple(found), seconds, peak, moment, min(bound, seconds))
    try:  # only the whole program can prove that nothing fits
        return solve(program, budget, limit_seconds=left)
    except StateError as error:
        nearest_bytes = math.ceil(peak)
        raise StateError(
            f"no plan of the operators within {format_bytes(budget)} was found in {limit_seconds:g} s; "
            f"the smallest found needs {format_enough(nearest_bytes)}: raise the budget to that, or add ranks"
        ) from error


class _Turns:
    """Solves for one axis after another."""

    def __init__(self, program: IntegerProgram, axes: Axes, budget: int | None, end: float) -> None:
        self._program, self._axes, self._budget, self._end = program, axes, budget, end
        self._chosen: Sequence[int] = axes.whole
        self._moments = sorted(program.likely)
        self._price = 0.0  # cost of a byte above the budget, in seconds

    def left(self) -> float:
        """Return the remaining seconds."""
        return self._end - time.monotonic()

    def run(self) -> Sequence[int]:
        """Return the choices of the best turn. If no turn is within the budget, they are the nearest ones."""
        count = len(self._axes.sizes)
        for axis in range(count):
            self._turn(axis, None, gap=_ROUGH_GAP)
        seconds, peak, _ = evaluate(self._program, self._chosen)
        if self._budget is not None and peak > self._budget:
            self._price = _ABOVE * seconds / self._budget
            self._until_idle(self._budget)
        else:
            self._until_idle(None)
        return self._chosen

    def _until_idle(self, budget: int | None) -> None:
        """Take turns until no axis gains anything."""
        count, idle, cost = len(self._axes.sizes), 0, self._cost(budget)
        for turn in range(_MOST_TURNS):
            self._turn(turn % count, budget, gap=_GAP)
            now = self._cost(budget)
            idle = 0 if now < cost * (1 - _GAIN) else idle + 1
            cost = now
            if idle >= count or self.left() <= 0:
                break

    def _cost(self, budget: int | None, choices: Sequence[int] | None = None) -> float:
        seconds, peak, _ = evaluate(self._program, self._chosen if choices is None else choices)
        return seconds if budget is None else seconds + self._price * max(peak - budget, 0.0)

    def _turn(self, axis: int, budget: int | None, *, gap: float) -> None:
        """Optimize along one axis; keep the result if it costs less and was found in time."""
        kept = self._axes.free(self._chosen, axis)
        program = _restricted(self._program, kept)
        limit = max(self.left() * _OF_AXIS, 1.0)
        try:
            if budget is None:
                found = solve(program, limit_seconds=limit, gap=gap)
            else:
                found = nearest(program, budget, self._price, self._moments, limit_seconds=limit, gap=gap)
        except StateError:
            return
        made = [int(few[choice]) for few, choice in zip(kept, found.choices, strict=True)]
        if self._cost(budget, made) < self._cost(budget):
            self._chosen = made
