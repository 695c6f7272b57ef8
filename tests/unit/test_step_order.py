"""Where pending updates come in a step: before the first use of their group, each once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.memstats import Trace
from gemini.runtime.step.order import place_updates


@dataclass(frozen=True)
class Waiting:
    """A pending update of a group of chunks."""

    order: int
    chunks: frozenset[int]
    accesses: tuple[tuple[int, ...], ...]
    tensors: tuple[int, ...] = ()
    gradients: frozenset[int] = frozenset()
    can_begin: bool = False
    is_begun: bool = False

    def begin(self) -> None:
        """Do nothing."""

    def settle(self) -> None:
        """Do nothing."""

    def run(self) -> None:
        """Do nothing."""


def trace(*moments: tuple[str, tuple[int, ...]]) -> Trace:
    count = len(moments)
    return Trace(
        kind="train",
        accesses=tuple(chunks for _, chunks in moments),
        modes=tuple("r" * len(chunks) for _, chunks in moments),
        frees=((),) * count,
        seconds=(0.0,) * count,
        non_model_bytes=tuple(range(len(moments))),
        phases=tuple(phase for phase, _ in moments),
        chunk_bytes=(4096,) * 20,
        chunk_kinds=("param",) * 20,
        links=(),
        param_order=(),
        chunk_signature="",
    )


F, B, U = "forward", "backward", "optimizer"
# Parameters 0 and 10, gradients 1 and 11, states 2, 3 and 12.
STEP = trace(
    (F, (0,)), (F, (10,)), (F, (0,)), (B, (11,)), (B, (1,)), (U, (0, 1, 2)), (U, (0, 1, 3)), (U, (10, 11, 12))
)
FIRST = Waiting(0, frozenset({0, 1, 2, 3}), ((0, 1, 2), (0, 1, 3)))
SECOND = Waiting(1, frozenset({10, 11, 12}), ((10, 11, 12),))


def test_an_update_comes_before_the_first_use_of_its_group_in_the_period_before_it() -> None:
    places = place_updates(STEP, [FIRST, SECOND], first=False, inside=False)
    assert places == [
        ((0, 1, 2), 7, 5),
        ((0, 1, 3), 7, 6),
        ((0,), 0, 0),
        ((10, 11, 12), 0, 7),
        ((10,), 1, 1),
        ((0,), 2, 2),
        ((11,), 3, 3),
        ((1,), 4, 4),
    ]


def test_without_pending_updates_a_step_that_ends_with_its_own_is_the_trace() -> None:
    places = place_updates(STEP, [], first=False, inside=True)
    assert places == list(zip(STEP.accesses, range(8), range(8), strict=True))


def test_all_updates_come_first_where_they_are_run_outside_a_step() -> None:
    places = place_updates(STEP, [FIRST, SECOND], first=True, inside=False)
    assert [place.chunks for place in places] == [
        *FIRST.accesses,
        *SECOND.accesses,
        *STEP.accesses[:5],
    ]


@pytest.mark.parametrize("first", [True, False])
def test_a_trace_without_moments_still_has_the_updates(first: bool) -> None:
    assert place_updates(trace(), [SECOND], first=first, inside=False) == [((10, 11, 12), -1, None)]


@given(
    moments=st.lists(st.sets(st.integers(0, 9), max_size=3), min_size=1, max_size=12),
    groups=st.integers(1, 5),
)
def test_every_update_comes_once_and_nothing_of_its_group_before_it(
    moments: list[set[int]], groups: int
) -> None:
    updates = [
        Waiting(order, frozenset(range(order, 10, groups)), ((order, 100 + order),))
        for order in range(groups)
    ]
    step = trace(*((F, tuple(sorted(chunks))) for chunks in moments))
    placed = [place.chunks for place in place_updates(step, updates, first=False, inside=False)]
    assert [chunks for chunks in placed if max(chunks, default=0) < 100] == list(step.accesses)
    for update in updates:
        position = placed.index(update.accesses[0])
        assert placed.count(update.accesses[0]) == 1
        before = {chunk for chunks in placed[:position] for chunk in chunks}
        assert not before & update.chunks


def test_what_the_cpu_begins_comes_with_updates_that_are_due() -> None:
    """Groups 0 to 3, used in this order: where the first becomes due the next two that the CPU makes are
    begun, and where the second does the last one."""
    step = trace(*((F, (group,)) for group in range(4)))
    waiting = [
        Waiting(group, frozenset({group}), ((group, 10 + group),), can_begin=group > 0) for group in range(4)
    ]
    placed = [place.chunks for place in place_updates(step, waiting, first=False, inside=False)]
    assert placed == [(0, 10), (1, 11), (2, 12), (0,), (3, 13), (1,), (2,), (3,)]
