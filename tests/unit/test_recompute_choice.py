"""Which blocks are recomputed: the derived step, and the choice that simulation makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemini.memstats import Trace
from gemini.memstats.trace import LinkSpeed
from gemini.placement.problem import Machine
from gemini.placement.recompute import (
    BlockCall,
    Judged,
    RecomputeChoice,
    RecomputeReport,
    best_count,
    choose_blocks,
    recomputed,
    spans_of,
)

_MB = 10**6
_BLOCKS = 4
_COPY = 1e12
_COMPUTE = 0.010  # seconds of a block in forward


def block_trace(*, saved_bytes: int = 8 * _MB, weight_bytes: int = _MB) -> tuple[Trace, list[BlockCall]]:
    """Return a step of four blocks: each uses its weight and stores one tensor, backward the other way."""
    moments: list[tuple[tuple[int, ...], str, tuple[int, ...], float, str]] = []
    calls = []
    for block in range(_BLOCKS):
        calls.append(BlockCall(block, 2 * block, 2 * block + 2, _MB))
        moments.append(((block,), "r", (), _COMPUTE, "forward"))
        moments.append(((_BLOCKS + block,), "w", (), 0.0, "forward"))
    for block in reversed(range(_BLOCKS)):
        moments.append(((_BLOCKS + block,), "r", (), 0.0, "backward"))
        moments.append(((block,), "r", (_BLOCKS + block,), 2 * _COMPUTE, "backward"))
    moments += [((block,), "m", (), 0.001, "optimizer") for block in range(_BLOCKS)]
    columns = list(zip(*moments, strict=True))
    trace = Trace(
        kind="train",
        accesses=columns[0],
        modes=columns[1],
        frees=columns[2],
        seconds=columns[3],
        non_model_bytes=(100,) * len(moments),
        phases=columns[4],
        chunk_bytes=(weight_bytes,) * _BLOCKS + (saved_bytes,) * _BLOCKS,
        chunk_kinds=("param",) * _BLOCKS + ("activation",) * _BLOCKS,
        links=(),
        param_order=(),
        chunk_signature="blocks",
    )
    return trace, calls


def disk(bytes_per_second: float, device_bytes: int) -> Machine:
    links = tuple(LinkSpeed(name, bytes_per_second, 0.0) for name in ("disk_read", "disk_write"))
    return Machine(device_bytes, 0, 10**9, links)


def choose(machine: Machine, trace: Trace, calls: list[BlockCall]) -> RecomputeChoice:
    return choose_blocks(trace, calls, machine, overlap=False, copy_bytes_per_second=_COPY)


def test_a_derived_step_saves_the_input_alone_and_computes_again_where_it_is_needed() -> None:
    trace, calls = block_trace()
    (span,) = spans_of(trace, [calls[1]], _COPY)
    assert (span.first_use, span.saved_bytes) == (12, 8 * _MB)
    derived = recomputed(trace, [span], _COPY)
    given = 2 * _BLOCKS  # the new chunk: what the block was given
    assert derived.chunk_bytes[given] == _MB
    used = [set(chunks) for chunks in derived.accesses]
    assert not any(_BLOCKS + 1 in chunks for chunks in used)
    backward = derived.phases.index("backward")
    assert used[2:4] == [{given}, {1}]
    again = used.index({given}, backward)
    assert used[again : again + 3] == [{given}, {1}, {1}]
    assert derived.seconds[again : again + 3] == (0.0, pytest.approx(_COMPUTE), pytest.approx(2 * _COMPUTE))
    assert derived.frees[again + 2] == (given,)
    assert derived.non_model_bytes[again + 1] == derived.non_model_bytes[again + 2] == 100 + 8 * _MB
    assert derived.non_model_bytes[again] == derived.non_model_bytes[again + 3] == 100
    assert sum(derived.seconds) == pytest.approx(sum(trace.seconds) + _COMPUTE)


def hindered_trace(hindrance: tuple[float, ...]) -> tuple[Trace, list[BlockCall]]:
    """Return a step in which storing what blocks save takes them longer, each by its own time."""
    trace, calls = block_trace()
    seconds = list(trace.seconds)
    for call, more in zip(calls, hindrance, strict=True):
        seconds[call.begin] += more
    return replace(trace, seconds=tuple(seconds)), calls


def test_of_blocks_alike_the_fastest_says_what_computing_again_takes() -> None:
    trace, calls = hindered_trace((0.0, 0.005, 0.010, 0.030))
    no_time = 1e18  # for copies
    spans = spans_of(trace, calls, no_time)
    assert [span.seconds for span in spans] == pytest.approx([_COMPUTE] * _BLOCKS)
    assert [span.hindered_seconds for span in spans] == pytest.approx([0.0, 0.005, 0.010, 0.030])
    derived = recomputed(trace, [spans[3]], no_time)
    assert sum(derived.seconds) == pytest.approx(sum(trace.seconds) + _COMPUTE - 0.030)


def test_blocks_of_other_sizes_say_nothing_of_each_other() -> None:
    trace, calls = hindered_trace((0.0, 0.005, 0.010, 0.030))
    calls = [replace(call, input_bytes=call.block + 1) for call in calls]
    assert [span.hindered_seconds for span in spans_of(trace, calls, _COPY)] == [0.0] * _BLOCKS


def test_what_hinders_blocks_that_save_counts_for_recomputing_them() -> None:
    moved = disk(2e9, 20 * _MB)  # hidden behind computing
    free, calls = block_trace()
    assert not choose(moved, free, calls).blocks
    hindered, _ = hindered_trace((0.0, 0.030, 0.030, 0.030))
    assert choose(moved, hindered, calls).blocks >= {1, 2}


def test_nothing_is_recomputed_where_nothing_is_moved() -> None:
    hindered, calls = hindered_trace((0.0, 0.030, 0.030, 0.030))  # by what else the machine did
    assert not choose(disk(2e9, 200 * _MB), hindered, calls).blocks


def test_copies_into_chunks_take_no_time_in_a_derived_step() -> None:
    trace, _ = block_trace()
    slow_copies = replace(
        trace,
        seconds=tuple(
            0.004 if modes == "w" else s for s, modes in zip(trace.seconds, trace.modes, strict=True)
        ),
    )
    derived = recomputed(slow_copies, [], 2e9)
    assert sum(derived.seconds) == pytest.approx(sum(trace.seconds))


@pytest.mark.parametrize(
    ("bytes_per_second", "device_bytes", "expected"),
    [
        (1e8, 20 * _MB, set(range(_BLOCKS - 1))),  # 80 ms to write, 80 ms to read, 10 ms to compute again
        (1e11, 20 * _MB, set()),
        (1e8, 100 * _MB, set()),  # everything stays
    ],
)
def test_blocks_are_recomputed_where_the_disk_takes_longer(
    bytes_per_second: float, device_bytes: int, expected: set[int]
) -> None:
    trace, calls = block_trace()
    choice = choose(disk(bytes_per_second, device_bytes), trace, calls)
    assert choice.blocks >= expected
    assert bool(choice.blocks) == bool(expected)
    assert choice.seconds <= choice.seconds_without
    assert choice.saved_bytes == len(choice.blocks) * 8 * _MB


def test_a_block_that_takes_longer_to_compute_than_to_move_is_moved() -> None:
    trace, calls = block_trace()
    slow = replace(trace, seconds=tuple(100 * seconds for seconds in trace.seconds))
    assert not choose(disk(1e8, 20 * _MB), slow, calls).blocks


def test_a_block_that_saves_no_more_than_it_is_given_is_not_recomputed() -> None:
    trace, calls = block_trace(saved_bytes=_MB)
    assert not choose(disk(1e7, 4 * _MB), trace, calls).blocks


def test_of_blocks_alike_those_that_save_for_longer_are_recomputed() -> None:
    trace, calls = block_trace()
    chosen = [choose(disk(speed, 28 * _MB), trace, calls).blocks for speed in (1e8, 3e8, 6e8, 9e8, 1.2e9)]
    assert any(0 < len(blocks) < _BLOCKS for blocks in chosen)
    assert all(blocks == frozenset(range(len(blocks))) for blocks in chosen)


def test_the_report_names_what_is_recomputed_and_what_cannot_be() -> None:
    choice = RecomputeChoice(frozenset({0}), 1.0, 2.0, 8 * _MB, 0.25)
    text = "\n".join(RecomputeReport(("h.0",), (("h.1", "it changes its attributes"),), 3, choice).lines())
    assert "Of 3 blocks 1" in text
    assert "(h.0)" in text
    assert "h.1 cannot be recomputed: it changes its attributes" in text
    assert "not chosen yet" in "".join(RecomputeReport((), (), 3, None).lines())


@pytest.mark.parametrize("steeper", [1, 3, 1 / 3])
@pytest.mark.parametrize("most", [*range(14), 40])
def test_the_best_number_of_blocks_is_found_wherever_it_is(most: int, steeper: float) -> None:
    for best in range(most + 1):
        asked: list[int] = []

        def judge(count: int, best: int = best, asked: list[int] = asked) -> Judged:
            asked.append(count)
            rises = 0.1 * (steeper if count > best else 1)
            return Judged(1.0 + rises * abs(count - best), float(count), moves=True)

        count, found, without = best_count(judge, most)
        assert (count, found.seconds, without.seconds) == (best, best, 0)
        assert len(asked) == len(set(asked)) <= 14


@pytest.mark.parametrize(
    ("costs", "expected"), [([1.0] * 9, 0), ([1.5, 1.019, 1.0, 1.0, 1.5], 1), ([2, 1.03, 1], 2)]
)
def test_of_numbers_nearly_as_good_it_is_the_least(costs: list[float], expected: int) -> None:
    count, _, _ = best_count(lambda count: Judged(costs[count], 0.0, moves=True), len(costs) - 1)
    assert count == expected
