"""The lower bound of a step: below every plan, and equal to computing where nothing has to wait."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num_examples import num_examples

from gemini.memstats.trace import LINKS, LinkSpeed
from gemini.placement.bound import lower_bound
from gemini.placement.policies import Hints, make_hints
from gemini.placement.problem import Iteration, Machine, PlanProblem, find_intervals
from gemini.placement.simulator import Simulator

_CHUNKS, _UNIT = 5, 100


def links(read: float, write: float) -> tuple[LinkSpeed, ...]:
    """Return links that carry so many units per second."""
    return tuple(
        LinkSpeed(name, _UNIT * (write if name in ("d2h", "disk_write") else read), 0.0) for name in LINKS
    )


@st.composite
def iterations(draw: st.DrawFn) -> Iteration:
    """Steps of up to 10 moments, each with one or two of five chunks, some of which die and come again."""
    moments = draw(st.integers(2, 10))
    chunk = st.integers(0, _CHUNKS - 1)
    accesses = [sorted(draw(st.sets(chunk, min_size=1, max_size=2))) for _ in range(moments)]
    modes = ["".join(draw(st.sampled_from("rrm")) for _ in chunks) for chunks in accesses]
    frees: list[list[int]] = [[] for _ in range(moments)]
    for dies in draw(st.sets(chunk, max_size=2)):
        uses = [moment for moment, chunks in enumerate(accesses) if dies in chunks]
        if uses:
            slot = accesses[uses[0]].index(dies)
            modes[uses[0]] = modes[uses[0]][:slot] + "w" + modes[uses[0]][slot + 1 :]
            frees[uses[-1]].append(dies)
    seconds = draw(st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=moments, max_size=moments))
    return Iteration(
        chunk_bytes=tuple(_UNIT * draw(st.integers(1, 2)) for _ in range(_CHUNKS)),
        accesses=tuple(map(tuple, accesses)),
        modes=tuple(modes),
        frees=tuple(tuple(sorted(chunks)) for chunks in frees),
        seconds=tuple(seconds),
        reserve_bytes=(0,) * moments,
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Room for two to five chunks of two units, and either tier below."""
    speeds = links(draw(st.sampled_from((1.0, 2.0))), draw(st.sampled_from((0.5, 1.0))))
    device = _UNIT * draw(st.integers(4, 2 * _CHUNKS))
    below = 4 * _UNIT * _CHUNKS
    host, disk = draw(st.sampled_from(((below, 0), (0, below))))
    return Machine(device, host, disk, speeds, disk_shared=draw(st.booleans()))


def long_run(iteration: Iteration, machine: Machine, hints: Hints | None) -> float:
    """Return the mean seconds of so many steps that those of a plan with a long period are among them."""
    return Simulator(iteration, machine).seconds(hints, after=12, steps=24)


@settings(max_examples=num_examples(200), derandomize=True)
@given(iterations(), machines(), st.randoms(use_true_random=False))
def test_no_plan_is_faster_than_the_bound(iteration, machine, chance):
    them = find_intervals(iteration)
    problem = PlanProblem.of(iteration, machine)
    keep = them.nbytes < 0
    for i in chance.sample(range(len(them)), len(them)):
        keep[i] = chance.random() < 0.7
        keep[i] = keep[i] and problem.fits(keep)
    hints = make_hints(them, keep, problem.flushed_at(0.0))
    bound = lower_bound(iteration, machine)
    for plan in (None, hints):
        assert long_run(iteration, machine, plan) >= bound - 1e-6


@settings(max_examples=num_examples(60), derandomize=True)
@given(iterations())
def test_where_everything_fits_the_bound_is_computing(iteration):
    machine = Machine(2 * _UNIT * _CHUNKS, 4 * _UNIT * _CHUNKS, 0, links(0.1, 0.1))
    assert lower_bound(iteration, machine) == sum(iteration.seconds)


@settings(max_examples=num_examples(60), derandomize=True)
@given(iterations(), machines())
def test_the_bound_does_not_fall_with_faster_links(iteration, machine):
    faster = Machine(*machine.budgets, links(8.0, 8.0), machine.disk_shared)
    compute = sum(iteration.seconds)
    bounds = [lower_bound(iteration, given) for given in (machine, faster)]
    assert bounds[0] >= bounds[1] - 1e-9
    assert bounds[1] >= compute - 1e-9


def test_without_room_beside_the_operands_every_use_is_a_fetch():
    iteration = Iteration((_UNIT,) * 3, ((0,), (1,), (2,)), ("r",) * 3, ((),) * 3, (0.0,) * 3, (0,) * 3)
    machine = Machine(_UNIT, 3 * _UNIT, 0, links(1.0, 1.0))
    assert lower_bound(iteration, machine) == pytest.approx(3.0)
    assert long_run(iteration, machine, None) == pytest.approx(3.0)


@pytest.mark.parametrize(("shared", "seconds"), [(True, 6.0), (False, 4.0)])
def test_reads_and_writes_of_a_shared_disk_add_up(shared, seconds):
    iteration = Iteration((_UNIT,) * 2, ((0,), (1,)), ("m",) * 2, ((),) * 2, (0.0,) * 2, (0,) * 2)
    machine = Machine(_UNIT, 0, 2 * _UNIT, links(1.0, 0.5), disk_shared=shared)
    assert lower_bound(iteration, machine) == pytest.approx(seconds)


def test_what_is_read_early_takes_room_until_its_use():
    # While the first operator runs there is room for one chunk more, though time for all three.
    accesses = ((0,), (1,), (2,), (3,))
    iteration = Iteration((_UNIT,) * 4, accesses, ("r",) * 4, ((),) * 4, (4.0, 0.0, 0.0, 0.0), (0,) * 4)
    machine = Machine(2 * _UNIT, 8 * _UNIT, 0, links(1.0, 1.0))
    assert lower_bound(iteration, machine) == pytest.approx(6.0)
    assert long_run(iteration, machine, None) >= 6.0


def test_what_leaves_takes_room_until_it_is_written():
    # Three chunks are modified in no time, beside one that the long last operator reads.
    accesses = ((0,), (1,), (2,), (3,))
    iteration = Iteration(
        (_UNIT,) * 4, accesses, ("m", "m", "m", "r"), ((),) * 4, (0.0, 0.0, 0.0, 4.0), (0,) * 4
    )
    machine = Machine(2 * _UNIT, 8 * _UNIT, 0, links(4.0, 1.0))
    assert lower_bound(iteration, machine) == pytest.approx(6.0)
