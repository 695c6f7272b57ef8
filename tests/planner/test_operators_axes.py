"""Solved axis by axis, a program has choices within the budget, and a bound that no choices are below."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from operator_models import Language, language_batch, language_loss, machine
from test_operators_program import every_choice, random_program

from gemini.planner.operators import axes as by_axes
from gemini.planner.operators.autoshard import make_problem
from gemini.planner.operators.axes import Axes, solve_on_mesh
from gemini.planner.operators.capture import capture
from gemini.planner.operators.program import IntegerProgram, MisfitError, evaluate, least_bytes, solve


@pytest.fixture(autouse=True)
def _small_programs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_axes, "_FEW", 0)


def axes_of(program: IntegerProgram, seed: int) -> Axes:
    """Return two axes, along each of which a choice does one of two things."""
    draw = random.Random(seed)
    kinds = []
    for each in program.seconds:
        every = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
        kinds.append(every[draw.sample(range(4), len(each))])
    return Axes((2, 2), tuple(kinds), (0,) * len(kinds))


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_within_the_budget_and_the_bound_is_below_the_best(seed: int) -> None:
    program = random_program(seed)
    every = every_choice(program)
    if not every:
        return
    peaks = sorted({peak for _, peak in every})
    for budget in (None, math.ceil(peaks[0]), math.ceil(peaks[len(peaks) // 4])):
        best = min(seconds for seconds, peak in every if budget is None or peak <= budget)
        found = solve_on_mesh(program, axes_of(program, seed), budget)
        assert found.seconds == pytest.approx(evaluate(program, found.choices)[0])
        assert budget is None or found.peak_bytes <= budget
        assert found.bound - 1e-6 <= best <= found.seconds + 1e-6
    with pytest.raises(MisfitError) as refused:
        solve_on_mesh(program, axes_of(program, seed), math.ceil(peaks[0]) - 1)
    assert refused.value.least_bytes == least_bytes(program)


@pytest.mark.dear("the step is planned whole as well, to compare with")
def test_a_step_on_two_axes_is_close_to_the_best() -> None:
    problem = make_problem(capture(Language(1), language_batch(), language_loss), (2, 2), machine())
    free = solve(problem.program)
    tight = int(free.peak_bytes * 0.97)
    for budget, best in ((None, free), (tight, solve(problem.program, tight))):
        found = solve_on_mesh(problem.program, problem.axes, budget)
        assert budget is None or found.peak_bytes <= budget
        assert found.bound <= best.seconds * (1 + 1e-6)
        assert best.bound * (1 - 1e-6) <= found.seconds <= best.seconds * 1.02
