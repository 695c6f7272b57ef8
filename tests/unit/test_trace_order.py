"""A trace is in the order of the program and steady, in whatever order and state the step was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.memstats import Trace
from gemini.runtime.step.recorder import Recorded
from gemini.runtime.step.schedule import completed, program_order, reordered, steady_modes, typical_seconds

F, B, U = "forward", "backward", "optimizer"
# Parameters 0 and 4, gradients 1 and 5, states 2, 3 and 6.
ACCESSES = ((0,), (4,), (5,), (1,), (0, 1, 2), (0, 1, 3), (4, 5, 6))
PHASES = (F, F, B, B, U, U, U)
TRACE = Trace(
    kind="train",
    accesses=ACCESSES,
    modes=("r", "r", "w", "w", "mrm", "mrm", "mrm"),
    frees=((), (), (), (), (), (1,), (5,)),
    seconds=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
    non_model_bytes=(10, 20, 30, 25, 5, 4, 3),
    phases=PHASES,
    chunk_bytes=(4096,) * 7,
    chunk_kinds=("param", "grad", "exp_avg", "exp_avg", "param", "grad", "exp_avg"),
    links=(),
    param_order=(),
    chunk_signature="",
)
STEP = Recorded(ACCESSES, TRACE.modes, TRACE.frees, PHASES, TRACE.seconds, TRACE.non_model_bytes)


def test_a_state_allocated_in_warmup_is_modified_in_every_other_step() -> None:
    warmup = ("r", "r", "w", "w", "mrw", "mrw", "mrw")
    assert steady_modes(warmup, ACCESSES, TRACE.frees) == TRACE.modes


@given(st.permutations(range(4, 7)), st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_updates_come_at_the_end_of_a_trace_whenever_they_ran(updates: list[int], places: list[int]) -> None:
    order = list(range(4))
    for update, place in zip(updates, sorted(places, reverse=True), strict=True):
        order.insert(place, update)
    ran = STEP.moments(order)
    assert program_order(TRACE, ran) == [order.index(moment) for moment in range(7)]
    assert completed(replace(TRACE, seconds=(0.0,) * 7), ran) == TRACE


def test_of_a_step_without_its_updates_no_trace_is_completed() -> None:
    assert completed(TRACE, STEP.moments(range(4))) is None
    assert completed(TRACE, STEP.moments([0, 1, 2, 3, 4, 5])) is None


def test_updates_of_two_steps_count_as_that_of_the_first() -> None:
    ran = STEP.moments([4, 5, 6, *range(7)])
    assert program_order(TRACE, ran) == [3, 4, 5, 6, 0, 1, 2]


def test_a_new_order_keeps_the_times_of_what_it_has_in_common_with_the_old() -> None:
    ran = STEP.moments([1, 0, 2, 3, 4, 5, 6])
    new = reordered(
        TRACE,
        replace(ran, accesses=((4,), (0, 4), *ran.accesses[2:]), modes=("r", "rr", *ran.modes[2:])),
        keep_reserve=False,
    )
    assert new.seconds == (2.0, 4.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert new.non_model_bytes == (30,) * 7
    assert new.frees == TRACE.frees


def test_where_only_the_update_changes_forward_and_backward_keep_their_memory() -> None:
    new = reordered(TRACE, STEP.moments([0, 1, 2, 3, 6]), keep_reserve=True)
    assert new.non_model_bytes == (10, 20, 30, 25, 25)
    assert new.phases == (F, F, B, B, U)


def test_what_interrupts_a_period_of_each_iteration_changes_no_share() -> None:
    interrupted = [(5.0, 2.0, 3.0), (1.0, 6.0, 3.0), (1.0, 2.0, 7.0)]
    assert typical_seconds(interrupted) == pytest.approx((10 / 6, 20 / 6, 30 / 6))


@given(st.integers(0, 5).flatmap(lambda count: st.tuples(*[st.tuples(*[st.floats(0.01, 9)] * count)] * 3)))
def test_typical_times_add_up_to_the_iteration_in_the_middle(
    iterations: tuple[tuple[float, ...], ...],
) -> None:
    middle = sorted(sum(seconds) for seconds in iterations)[1]
    assert sum(typical_seconds(iterations)) == pytest.approx(middle)


def test_times_of_nothing_are_zeros() -> None:
    assert typical_seconds([(0.0, 0.0)] * 3) == (0.0, 0.0)
