"""Case ``small``: many small tensors against one of the same total size, through the optimizers' ``step``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini_bench import adam_ours as ours
from gemini_bench.adam_measure import absent_rows, prepared, time_rows, timed
from gemini_bench.adam_peers import DEEPSPEED, TORCH, find_peers
from gemini_bench.paired import Timings, spread_row
from gemini_bench.record import Row

RATIO = 1.10
NUM_TENSORS = 10_000
SHORT_NUMEL = 1024  # so few that what a tensor costs besides its elements shows

ONE, MANY, KERNEL = "ours, one tensor", "ours, many tensors", "ours, many tensors, the kernel call alone"
SHORT_ONE, SHORT_MANY = "ours, short tensors in one", "ours, short tensors"

_PEERS = (TORCH, DEEPSPEED)
_PEER_BYTES = 16


def task(options: dict[str, Any]) -> dict[str, Any]:
    """Time one tensor, many tensors of the same total size for every contender, and as many of 1,024 elements
    for ours.
    """
    numel = prepared(options)
    many, short = sizes(numel), [SHORT_NUMEL] * NUM_TENSORS
    peers, about = find_peers()
    same = [
        ours.step_contender(MANY, ours.adam, many),
        ours.many_rows_contender(KERNEL, many),
        *(ours.step_contender(peer.name, peer.optimizer, many) for peer in peers),
    ]
    contenders = [
        ours.step_contender(ONE, ours.adam, [sum(many)]),
        *same,
        ours.step_contender(SHORT_ONE, ours.adam, [sum(short)]),
        ours.step_contender(SHORT_MANY, ours.adam, short),
    ]
    return timed(contenders, same, options, {**about, "num_tensors": len(many), "total_numel": sum(many)})


def sizes(numel: int) -> list[int]:
    """Return the sizes of 10,000 tensors of about ``numel`` elements together.

    They are the biases and norms of GPT blocks, eight per block: 13 times the hidden size in each.
    """
    blocks = NUM_TENSORS // 8
    hidden = max(1, round(numel / (13 * blocks)))
    return [hidden * times for times in (1, 1, 3, 1, 1, 1, 4, 1)] * blocks


def held_bytes(numel: int) -> float:
    """Return the bytes that all contenders hold, and those that the largest copies during construction."""
    held = ours.FP32.held_bytes
    return (3 * held + 2 * _PEER_BYTES + 8) * sum(sizes(numel)) + 2 * held * SHORT_NUMEL * NUM_TENSORS


def rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and the time of many tensors over that of one."""
    peers = [peer for peer in _PEERS if peer in times]
    count = f"{NUM_TENSORS:,} tensors"
    short = f"{count} of {SHORT_NUMEL:,} elements"
    per_tensor = times.nbytes(MANY) / ours.FP32.step_bytes / NUM_TENSORS
    return [
        Row(f"{prefix}elements per tensor, mean", per_tensor, "elements"),
        *time_rows(prefix, times, (ONE,)),
        spread_row(f"{prefix}ours, {count}", times.milliseconds(MANY), "ms"),
        spread_row(f"{prefix}ours, {count}, the kernel call alone", times.milliseconds(KERNEL), "ms"),
        *(spread_row(f"{prefix}{peer}, {count}", times.milliseconds(peer), "ms") for peer in peers),
        *absent_rows(prefix, absent),
        spread_row(f"{prefix}{count} / one, through step()", times.ratio(MANY, ONE), "x", RATIO),
        spread_row(
            f"{prefix}{count}: time per tensor beyond that of one",
            times.excess(MANY, ONE, NUM_TENSORS),
            "us",
        ),
        spread_row(f"{prefix}{count} / one, the kernel call alone", times.ratio(KERNEL, ONE), "x"),
        spread_row(f"{prefix}{short} / one, through step()", times.ratio(SHORT_MANY, SHORT_ONE), "x"),
        spread_row(
            f"{prefix}{short}: time per tensor beyond that of one",
            times.excess(SHORT_MANY, SHORT_ONE, NUM_TENSORS),
            "us",
        ),
        *(spread_row(f"{prefix}{count}, ours / {peer}", times.ratio(MANY, peer), "x") for peer in peers),
    ]
