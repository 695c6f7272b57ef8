"""The integer program against brute force, and what budgets do to it."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from gemini.planner.operators.program import (
    Group,
    Hold,
    IntegerProgram,
    MisfitError,
    evaluate,
    least_bytes,
    solve,
)


def random_program(seed: int, num_nodes: int = 7) -> IntegerProgram:
    draw = random.Random(seed)
    counts = [draw.choice((1, 2, 3)) for _ in range(num_nodes)]
    seconds = tuple(np.array([draw.uniform(0, 1) for _ in range(count)]) for count in counts)
    groups, holds = [], []
    for source in range(num_nodes - 1):
        rest = range(source + 1, num_nodes)
        chosen = draw.sample(rest, min(len(rest), draw.choice((1, 1, 2))))
        states = tuple(draw.randrange(3) for _ in range(counts[source]))
        targets = tuple((node, tuple(draw.randrange(3) for _ in range(counts[node]))) for node in chosen)
        cost = np.array([[draw.uniform(0, 1) if a != b else 0.0 for b in range(3)] for a in range(3)])
        if draw.random() < 0.3:
            cost[draw.randrange(3), draw.randrange(3)] += math.inf
            np.fill_diagonal(cost, 0.0)
        groups.append(Group(source, states, targets, cost))
        converted = np.array([[draw.randrange(0, 500) if a != b else 0 for b in range(3)] for a in range(3)])
        holds.append(Hold(converted.astype(float), chosen[0], max(chosen), group=source))
    for node, count in enumerate(counts):
        nbytes = np.array([float(draw.randrange(100, 1000)) for _ in range(count)])
        holds.append(Hold(nbytes, node, min(node + draw.randrange(4), num_nodes - 1), node))
    return IntegerProgram(
        seconds, tuple(groups), tuple(holds), num_nodes, 50.0, tuple(range(num_nodes)), (num_nodes // 2,)
    )


def every_choice(program: IntegerProgram) -> list[tuple[float, float]]:
    found = []
    for choices in itertools.product(*(range(len(each)) for each in program.seconds)):
        seconds, peak, _ = evaluate(program, choices)
        if math.isfinite(seconds):
            found.append((seconds, peak))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_choices_are_those_of_brute_force_at_every_budget(seed: int) -> None:
    program = random_program(seed)
    every = every_choice(program)
    if not every:
        return
    peaks = sorted({peak for _, peak in every})
    for budget in [None, *(math.ceil(peaks[len(peaks) * part // 4]) for part in range(4))]:
        best = min(seconds for seconds, peak in every if budget is None or peak <= budget)
        found = solve(program, budget)
        assert found.seconds == pytest.approx(best, abs=1e-6)
        assert budget is None or found.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(8))
def test_the_least_bytes_do_and_one_less_does_not(seed: int) -> None:
    program = random_program(seed)
    every = every_choice(program)
    if not every:
        return
    least = math.ceil(min(peak for _, peak in every))
    assert least_bytes(program) == least
    assert solve(program, least).peak_bytes <= least
    with pytest.raises(MisfitError) as refused:
        solve(program, least - 1)
    assert refused.value.least_bytes == least


@pytest.mark.parametrize("seed", range(4))
def test_more_bytes_and_faster_links_are_never_slower(seed: int) -> None:
    program = random_program(40 + seed)
    if not every_choice(program):
        return
    least = least_bytes(program)
    by_bytes = [solve(program, least + more).seconds for more in (0, 200, 800, 3000)]
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(by_bytes))
    faster = replace(
        program, groups=tuple(replace(each, seconds=each.seconds * 0.5) for each in program.groups)
    )
    assert solve(faster, least + 200).seconds <= by_bytes[1] + 1e-9


def test_targets_share_a_conversion() -> None:
    cost = np.array([[0.0, 1.0], [1.0, 0.0]])
    two = Group(0, (0,), ((1, (1,)), (2, (1,))), cost)
    nothing = np.zeros(1)
    program = IntegerProgram((nothing,) * 3, (two,), alike=(0, 1, 2))
    assert solve(program).seconds == pytest.approx(1.0)


def test_nodes_that_run_alike_choose_alike() -> None:
    cost = np.array([[0.0, 5.0], [5.0, 0.0]])
    nodes = (np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.array([0.0, 0.7]))
    groups = (Group(0, (0, 1), ((1, (0, 1)),), cost),)
    apart = solve(IntegerProgram(nodes, groups, alike=(0, 1, 2)))
    alike = solve(IntegerProgram(nodes, groups, alike=(0, 0, 2)))
    assert alike.choices[0] == alike.choices[1]
    assert alike.seconds >= apart.seconds - 1e-9
