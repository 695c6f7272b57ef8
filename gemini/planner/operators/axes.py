"""Programs of meshes with several axes, solved one axis at a time.

Choices multiply with the axes: 2,200 choices of a small LLaMA along one axis are 9,700 along two, with
260,000 flows between them. So one axis after another is free while the operators keep what they do along
the others, until that gains nothing more. Bytes above the budget cost seconds, so each turn has choices,
with fewer such bytes than the turn before. A linear program of all choices then says how far from the best
this may be.
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
from gemini.system.config import format_bytes

_FEW = 4000  # a program of so many choices is solved as it is
_MOST_TURNS = 12
_ROUGH_GAP, _GAP = 2e-2, 1e-3  # of the first turn of each axis, and of others
_GAIN = 1e-4  # what a turn must gain for another one
_ABOVE = 10.0  # what as many bytes again as the budget cost, in seconds of the step without a budget
_OF_BOUND = 0.4  # of the time: for the bound, or for the whole program where turns found nothing
_OF_AXIS = 0.4  # of the time that is left: for one axis


@dataclass(frozen=True, eq=False)
class Axes:
    """What the choices of each node do along each axis of a mesh: ``kinds[node][choice, axis]`` is equal for
    choices that do the same along an axis. ``whole``: the choice of each node in which every rank has all."""

    sizes: tuple[int, ...]
    kinds: tuple[np.ndarray, ...]
    whole: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], choices: Sequence[tuple[Strategy, ...]]) -> Axes:
        """Return them of the strategies of each node."""
        every = {id(each): each for each in choices}  # nodes of one kind share them
        kinds = {number: _kinds(each, len(sizes)) for number, each in every.items()}
        whole = {number: whole_choice(each) for number, each in every.items()}
        numbers = [id(each) for each in choices]
        return cls(
            tuple(sizes), tuple(kinds[each] for each in numbers), tuple(whole[each] for each in numbers)
        )

    def free(self, chosen: Sequence[int], axis: int) -> list[np.ndarray]:
        """Return the choices of each node that do the same as the chosen one along all other axes."""
        others = [each for each in range(len(self.sizes)) if each != axis]
        return [
            np.flatnonzero((kinds[:, others] == kinds[choice, others]).all(axis=1))
            for kinds, choice in zip(self.kinds, chosen, strict=True)
        ]


def whole_choice(strategies: Sequence[Strategy]) -> int:
    """Return the choice in which every rank has all of everything."""
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
    """Return the dimension that an axis cuts; -1: none; -2: ranks along it have summands."""
    if layout is None or axis in layout.partial:
        return -2
    return next((dim for dim, axes in enumerate(layout.dims) if axis in axes), -1)


def _restricted(program: IntegerProgram, kept: Sequence[np.ndarray]) -> IntegerProgram:
    """Return the program with these choices alone."""

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
    """Return fast choices that never hold more than ``budget`` bytes, with a bound; for a program of few
    choices or one axis the fastest, as :func:`solve` does. Raises as it."""
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
    try:  # whether there are any choices is for the whole program to say
        return solve(program, budget, limit_seconds=left)
    except StateError as error:
        nearest_bytes = math.ceil(peak)
        raise StateError(
            f"no way to run the operators within {format_bytes(budget)} was found in {limit_seconds:g} s; "
            f"the nearest one takes {nearest_bytes} bytes ({format_bytes(nearest_bytes)}): raise the budget "
            "to that, or add ranks"
        ) from error


class _Turns:
    """Solves for one axis after another."""

    def __init__(self, program: IntegerProgram, axes: Axes, budget: int | None, end: float) -> None:
        self._program, self._axes, self._budget, self._end = program, axes, budget, end
        self._chosen: Sequence[int] = axes.whole
        self._moments = sorted(program.likely)
        self._price = 0.0  # seconds that a byte above the budget costs

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def run(self) -> Sequence[int]:
        """Return the choices; where no turn found any within the budget, the nearest ones."""
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
        """Choose along an axis, where something that costs less is found in time."""
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
