"""The CPU cases of ``gemini bench adam``: the contenders, and the figures computed from their times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini_bench import adam_ours as ours
from gemini_bench import adam_small, adam_steps
from gemini_bench.adam_measure import Settings, absent_rows, measure, prepared, time_rows, timed
from gemini_bench.adam_peers import (
    DEEPSPEED,
    TORCH,
    find_peers,
    fp32_contender,
    mixed_contender,
    mixed_name,
    own_bf16_contender,
    own_bf16_name,
)
from gemini_bench.paired import Contender, Timings, spread_row, unmeasured_row
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

LIMIT_SHARE = 0.95
NOISE = 1.03  # two times within 3 % of each other count as equal
BF16_RATIO = 0.95
INT8_RATIO = 0.62

SUMSQ_FP32, SUMSQ_BF16 = "ours fp32", "ours bf16"
SUMSQ_TORCH = "torch vector_norm, isfinite"
FP32_STEP = "ours fp32 through CPUAdam.step()"

_PEER_BYTES = 16
_INT8_LAYOUTS = (ours.COPY_INT8, ours.SPLIT_INT8, ours.COPY_BF16, ours.SPLIT_BF16)
# Per parameter, all contenders of the case together; sumsq with what torch's isfinite makes.
_HELD_BYTES: Mapping[str, float] = {
    "limit": 16 + 4,
    "fp32": 16 + 2 * ours.FP32.held_bytes + 2 * _PEER_BYTES,
    "bf16": 16
    + sum(layout.held_bytes for layout in (ours.COPY, ours.SPLIT, ours.ALONE))
    + 2 * (_PEER_BYTES + 4)
    + 12,
    "int8": 16 + ours.FP32.held_bytes + sum(layout.held_bytes for layout in _INT8_LAYOUTS),
    "sumsq": 4 + 4 + 2 + 10,
}


# -- what competes -------------------------------------------------------------------------------


def fp32_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time fp32 parameter, gradient and moments against every contender that does the same."""
    numel = prepared(options)
    peers, about = find_peers()
    rivals = [fp32_contender(peer, ours.start_param(numel), ours.start_grad(numel)) for peer in peers]
    through_step = ours.step_contender(FP32_STEP, ours.adam, [numel])
    same = [ours.kernel_contender(ours.FP32, numel), through_step, *rivals]
    return timed([ours.pattern_contender(numel), *same], same, options, about)


def bf16_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time a bf16 gradient and parameter with an fp32 master, and DeepSpeed's step without a master."""
    numel = prepared(options)
    peers, about = find_peers()
    bf16 = torch.bfloat16
    same = [
        ours.kernel_contender(ours.COPY, numel),
        *(
            mixed_contender(
                peer,
                ours.start_param(numel),
                ours.start_grad(numel, bf16),
                ours.start_param(numel, bf16),
            )
            for peer in peers
        ),
    ]
    others = [
        ours.pattern_contender(numel),
        ours.kernel_contender(ours.SPLIT, numel),
        ours.kernel_contender(ours.ALONE, numel),
        *(
            own_bf16_contender(peer, ours.start_param(numel, bf16), ours.start_grad(numel, bf16))
            for peer in peers
            if peer.name == DEEPSPEED
        ),
    ]
    return timed([*same, *others], same, options, about)


def int8_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time compact moments against fp32 ones."""
    numel = prepared(options)
    contenders = [ours.kernel_contender(layout, numel) for layout in (ours.FP32, *_INT8_LAYOUTS)]
    return timed([ours.pattern_contender(numel), *contenders], [], options, {"absent": {}})


def sumsq_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time the sum of squares with its finite check."""
    numel = prepared(options)
    grad = ours.start_grad(numel)

    def by_torch() -> bool:
        return bool(torch.isfinite(grad).all()) and float(torch.linalg.vector_norm(grad)) > 0

    contenders = [
        ours.read_contender(numel),
        ours.sum_squares_contender(SUMSQ_FP32, grad),
        ours.sum_squares_contender(SUMSQ_BF16, grad.bfloat16()),
        Contender(SUMSQ_TORCH, by_torch, 4 * numel),
    ]
    return timed(contenders, [], options, {"absent": {}})


# -- which figures -------------------------------------------------------------------------------


def limit_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return the rates that the machine reaches."""
    del absent
    return [
        spread_row(f"{prefix}{name.removeprefix('limit, ')}", times.rate(name), "GB/s")
        for name in (ours.PATTERN, ours.READ)
    ]


def fp32_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, our share of the limit, and our time over each peer's."""
    name, step = ours.FP32.name, FP32_STEP
    peers = [peer for peer in (TORCH, DEEPSPEED) if peer in times]
    fastest = times.fastest(peers)
    alone = f"; {DEEPSPEED} {absent[DEEPSPEED]}" if DEEPSPEED in absent else ""
    return [
        *time_rows(prefix, times, (ours.PATTERN, name, step, *peers)),
        *absent_rows(prefix, absent),
        spread_row(
            f"{prefix}share of the limit",
            times.share(name, ours.PATTERN),
            "share",
            LIMIT_SHARE,
            at_least=True,
        ),
        *(spread_row(f"{prefix}ours / {peer}", times.ratio(name, peer), "x") for peer in peers),
        spread_row(
            f"{prefix}ours / the fastest peer ({fastest}{alone}), equal within 3 %",
            times.ratio(name, fastest),
            "x",
            NOISE,
        ),
        spread_row(f"{prefix}{step} / the fastest peer ({fastest}{alone})", times.ratio(step, fastest), "x"),
        spread_row(f"{prefix}{step} / the kernel call", times.ratio(step, name), "x"),
    ]


def bf16_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and our time over DeepSpeed's: for the same job, and for its own step, which keeps less
    state.
    """
    layouts = (ours.COPY, ours.SPLIT, ours.ALONE)
    same_job = [mixed_name(peer) for peer in (TORCH, DEEPSPEED) if mixed_name(peer) in times]
    own = own_bf16_name(DEEPSPEED)
    names = (ours.PATTERN, *(layout.name for layout in layouts), *same_job, *([own] if own in times else ()))
    copy, split, alone = (layout.name for layout in layouts)
    rows = [
        *time_rows(prefix, times, names),
        *absent_rows(prefix, absent),
        *(
            spread_row(f"{prefix}share of the limit, {name}", times.share(name, ours.PATTERN), "share")
            for name in (copy, split, alone)
        ),
    ]
    for name in same_job:
        target = BF16_RATIO if name == mixed_name(DEEPSPEED) else None
        what = f"{prefix}ours with master / {name} (the same job)"
        rows.append(spread_row(what, times.ratio(copy, name), "x", target))
    against_own = f"{prefix}ours with master, 28 B / {own}, 22 B"
    if own in times:
        rows += [
            spread_row(against_own, times.ratio(copy, own), "x", BF16_RATIO),
            spread_row(f"{prefix}ours split, 26 B / {own}, 22 B", times.ratio(split, own), "x"),
            spread_row(f"{prefix}ours without master, 22 B / {own}, 22 B", times.ratio(alone, own), "x"),
        ]
    else:  # the targets are DeepSpeed's times: torch's would be easier to beat
        against_same = f"{prefix}ours with master / {mixed_name(DEEPSPEED)} (the same job)"
        reason = f"{DEEPSPEED} {absent[DEEPSPEED]}"
        rows += [unmeasured_row(what, "x", BF16_RATIO, reason) for what in (against_same, against_own)]
    return rows


def int8_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and the times of compact moments over those of the fp32 case."""
    del absent
    base = ours.FP32.name
    return [
        *time_rows(prefix, times, (ours.PATTERN, base, *(layout.name for layout in _INT8_LAYOUTS))),
        *(
            spread_row(
                f"{prefix}{layout.name} ({layout.step_bytes:.3g} B) / fp32 (28 B)",
                times.ratio(layout.name, base),
                "x",
                INT8_RATIO if layout is ours.COPY_INT8 else None,
            )
            for layout in _INT8_LAYOUTS
        ),
        *(
            spread_row(
                f"{prefix}share of the limit, {layout.name}", times.share(layout.name, ours.PATTERN), "share"
            )
            for layout in _INT8_LAYOUTS
        ),
    ]


def sumsq_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and the share of read bandwidth."""
    del absent
    return [
        *time_rows(prefix, times, (ours.READ, SUMSQ_FP32, SUMSQ_BF16, SUMSQ_TORCH)),
        spread_row(
            f"{prefix}share of read bandwidth, fp32",
            times.share(SUMSQ_FP32, ours.READ),
            "share",
            LIMIT_SHARE,
            at_least=True,
        ),
        spread_row(f"{prefix}share of read bandwidth, bf16", times.share(SUMSQ_BF16, ours.READ), "share"),
        spread_row(f"{prefix}ours / {SUMSQ_TORCH}", times.ratio(SUMSQ_FP32, SUMSQ_TORCH), "x"),
    ]


# -- the cases -----------------------------------------------------------------------------------


def limit_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time the pure streams."""
    numel = prepared(options)
    return timed([ours.pattern_contender(numel), ours.read_contender(numel)], [], options, {"absent": {}})


TASKS = {
    "limit": limit_task,
    "fp32": fp32_task,
    "bf16": bf16_task,
    "int8": int8_task,
    "sumsq": sumsq_task,
    "small": adam_small.task,
    "steps": adam_steps.task,
}
ROWS = {
    "limit": limit_rows,
    "fp32": fp32_rows,
    "bf16": bf16_rows,
    "int8": int8_rows,
    "sumsq": sumsq_rows,
    "small": adam_small.rows,
    "steps": adam_steps.rows,
}


def run(case: str, session: Session, settings: Settings) -> CaseResult:
    """Measure one case with every number of threads, in a process for each."""
    several = {"small": adam_small.held_bytes, "steps": adam_steps.held_bytes}
    held = several[case](settings.numel) if case in several else _HELD_BYTES[case] * settings.numel
    return measure(session, settings, case, int(held), ROWS[case])
