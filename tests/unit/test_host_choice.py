"""Which states the CPU updates on HOST: what ``gpu_margin_mem_ratio`` says, and what ``"auto"`` finds."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from gemini.memstats.trace import LinkSpeed
from gemini.runtime.storage.host_choice import GroupStates, HostUpdates

PARAMS = 1000  # bytes that all parameters take


def group(index: int, numel: int) -> GroupStates:
    """Return a group of 16-bit parameters with fp32 masters and moments."""
    return GroupStates(frozenset((index,)), 12 * numel, 2 * numel, 2 * numel, numel)


def updates(
    numels: list[int], ratio: float | Literal["auto"] = "auto", elements_per_second: float = 1.0
) -> HostUpdates:
    """Return the choice among groups of so many elements."""
    groups = tuple(group(index, numel) for index, numel in enumerate(numels))
    return HostUpdates(groups, PARAMS, ratio, elements_per_second)


def links(h2d: float, d2h: float) -> tuple[LinkSpeed, ...]:
    """Return links of such speeds."""
    return LinkSpeed("h2d", h2d, 0.0), LinkSpeed("d2h", d2h, 0.0)


def test_a_number_fills_its_share_of_the_room_with_the_first_groups() -> None:
    room = PARAMS + 240
    assert updates([10, 10, 10], 0.0).on_host(room, ()) == {0, 1, 2}
    assert updates([10, 10, 10], 0.5).on_host(room, ()) == {1, 2}
    assert updates([10, 10, 10], 1.0).on_host(room, ()) == {2}
    assert updates([10, 10, 10], 1.0).on_host(None, ()) == {0, 1, 2}
    assert updates([10, 10, 10], 1.0).on_host(PARAMS - 1, ()) == {0, 1, 2}


def test_auto_moves_states_where_the_cpu_is_slow_and_updates_where_links_are() -> None:
    room = PARAMS + 140  # the states of one group of four stay, beside its gradients
    slow_cpu = updates([10] * 4, elements_per_second=1e-3)
    assert slow_cpu.on_host(room, links(1e3, 1e3)) == frozenset()
    fast_cpu = updates([10] * 4, elements_per_second=1e9)
    assert fast_cpu.on_host(room, links(1e3, 1e3)) == {1, 2, 3}


def test_auto_has_all_on_device_that_fits_and_while_it_knows_too_little() -> None:
    fast_cpu = updates([10] * 4, elements_per_second=1e9)
    assert fast_cpu.on_host(PARAMS + 4 * 140, links(1e3, 1e3)) == frozenset()
    assert fast_cpu.on_host(None, ()) == frozenset()
    assert fast_cpu.on_host(PARAMS, ()) == frozenset()
    assert fast_cpu.on_host(PARAMS, links(1e3, 1e3)[:1]) == frozenset()


@given(
    st.lists(st.integers(1, 1000), max_size=8),
    st.integers(0, 50_000),
    st.floats(1.0, 1e6),
    st.floats(1.0, 1e6),
    st.floats(1.0, 1e6),
)
def test_auto_is_the_split_that_ends_first(
    numels: list[int], room: int, h2d: float, d2h: float, rate: float
) -> None:
    def seconds(count: int) -> float:
        on_device = sum(12 * numel for numel in numels[:count])
        moved = max(0, on_device - max(0, room - PARAMS - sum(2 * numel for numel in numels[:count])))
        grads = sum(2 * numel for numel in numels[count:])
        return max((moved + grads) / h2d, (moved + grads) / d2h, sum(numels[count:]) / rate)

    chosen = updates(numels, elements_per_second=rate).on_host(room, links(h2d, d2h))
    best = min(seconds(count) for count in range(len(numels) + 1))
    assert chosen == set(range(len(numels) - len(chosen), len(numels)))
    assert seconds(len(numels) - len(chosen)) <= best * (1 + 1e-9)
