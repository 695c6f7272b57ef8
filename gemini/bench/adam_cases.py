"""The CPU cases of ``gemini bench adam``: what competes, and which figures come of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.bench import adam_ours as ours
from gemini.bench.adam_measure import Settings, measure, use_threads
from gemini.bench.adam_peers import (
    DEEPSPEED,
    HYPER,
    SAMPLE_NUMEL,
    TORCH,
    find_peers,
    fp32_contender,
    mixed_contender,
    mixed_name,
    own_bf16_contender,
    own_bf16_name,
)
from gemini.bench.paired import (
    AbsentRow,
    Contender,
    Timings,
    require_same_job,
    run_paired,
    spread_row,
)
from gemini.bench.record import Row
from gemini.bench.session import CaseResult, Session
from gemini.optim import CPUAdam

LIMIT_SHARE = 0.95
NOISE = 1.03  # two times within 3 % of each other count as equal
BF16_RATIO = 0.95
INT8_RATIO = 0.62
SMALL_RATIO = 1.10
SMALL_TENSORS = 10_000

# Results of different optimizers after the same steps: rounding apart, far below one step of 1e-4.
_TOLERANCE = 2e-6

SUMSQ_FP32, SUMSQ_BF16 = "ours fp32", "ours bf16"
SUMSQ_TORCH = "torch vector_norm, isfinite"
SMALL_ONE, SMALL_MANY = "ours, one tensor", f"ours, {SMALL_TENSORS:,} tensors"

_PEER_BYTES = 16
_INT8_LAYOUTS = (ours.COPY_INT8, ours.SPLIT_INT8, ours.COPY_BF16, ours.SPLIT_BF16)
# Per parameter, all contenders of the case together; sumsq with what torch's isfinite makes.
_HELD_BYTES: Mapping[str, float] = {
    "limit": 16 + 4,
    "fp32": 16 + ours.FP32.held_bytes + 2 * _PEER_BYTES,
    "bf16": 16
    + sum(layout.held_bytes for layout in (ours.COPY, ours.SPLIT, ours.ALONE))
    + 2 * (_PEER_BYTES + 4)
    + 12,
    "int8": 16 + ours.FP32.held_bytes + sum(layout.held_bytes for layout in _INT8_LAYOUTS),
    "sumsq": 4 + 4 + 2 + 10,
    "small": 2 * ours.FP32.held_bytes + 2 * _PEER_BYTES,
}


# -- what competes -------------------------------------------------------------------------------


def limit_contenders(numel: int) -> list[Contender]:
    """Return the pure streams."""
    return [ours.pattern_contender(numel), ours.read_contender(numel)]


def fp32_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time fp32 parameter, gradient and moments against everyone who does the same."""
    numel = _prepared(options)
    peers, about = find_peers()
    rivals = [fp32_contender(peer, ours.start_param(numel), ours.start_grad(numel)) for peer in peers]
    same = [ours.kernel_contender(ours.FP32, numel), *rivals]
    return _timed([ours.pattern_contender(numel), *same], same, options, about)


def bf16_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time a bf16 gradient and parameter with an fp32 master, and DeepSpeed's step that has none."""
    numel = _prepared(options)
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
    return _timed([*same, *others], same, options, about)


def int8_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time compact moments against fp32 ones."""
    numel = _prepared(options)
    contenders = [ours.kernel_contender(layout, numel) for layout in (ours.FP32, *_INT8_LAYOUTS)]
    return _timed([ours.pattern_contender(numel), *contenders], [], options, {"absent": {}})


def sumsq_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time the sum of squares with its finite check."""
    numel = _prepared(options)
    grad = ours.start_grad(numel)

    def by_torch() -> bool:
        return bool(torch.isfinite(grad).all()) and float(torch.linalg.vector_norm(grad)) > 0

    contenders = [
        ours.read_contender(numel),
        ours.sum_squares_contender(SUMSQ_FP32, grad),
        ours.sum_squares_contender(SUMSQ_BF16, grad.bfloat16()),
        Contender(SUMSQ_TORCH, by_torch, 4 * numel),
    ]
    return _timed(contenders, [], options, {"absent": {}})


def small_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time many small tensors against one of the same total size, through the optimizers' ``step``."""
    numel = _prepared(options)
    sizes = small_sizes(numel)
    peers, about = find_peers()
    many = [
        _optimizer_contender(SMALL_MANY, _our_adam, sizes),
        *(_optimizer_contender(peer.name, peer.optimizer, sizes) for peer in peers),
    ]
    contenders = [_optimizer_contender(SMALL_ONE, _our_adam, [sum(sizes)]), *many]
    about = {**about, "num_tensors": len(sizes), "total_numel": sum(sizes)}
    return _timed(contenders, many, options, about)


def small_sizes(numel: int) -> list[int]:
    """Return the sizes of 10,000 tensors of about ``numel`` elements together.

    They are the biases and norms of GPT blocks, eight per block: 13 times the hidden size in each.
    """
    blocks = SMALL_TENSORS // 8
    hidden = max(1, round(numel / (13 * blocks)))
    return [hidden * times for times in (1, 1, 3, 1, 1, 1, 4, 1)] * blocks


def _our_adam(params: Sequence[Tensor]) -> CPUAdam:
    return CPUAdam(params, lr=HYPER.lr, betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay)


def _optimizer_contender(
    name: str, make: Callable[[Sequence[Tensor]], torch.optim.Optimizer], sizes: Sequence[int]
) -> Contender:
    """Return ``step`` of an optimizer; every tensor is an allocation of its own, as in a model."""
    numel = sum(sizes)
    ends = itertools.accumulate(sizes)
    params, grads = ours.start_param(numel), ours.start_grad(numel)
    parts = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    own = [params] if len(sizes) == 1 else [params[start:end].clone() for start, end in parts]
    for param, (start, end) in zip(own, parts, strict=True):
        param.grad = grads if len(sizes) == 1 else grads[start:end].clone()
    return Contender(name, make(own).step, ours.FP32.step_bytes * numel, lambda: own[0][:SAMPLE_NUMEL])


def _prepared(options: Mapping[str, Any]) -> int:
    use_threads(options["threads"])
    return int(options["numel"])


def _timed(
    contenders: Sequence[Contender],
    same_job: Sequence[Contender],
    options: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    found = run_paired(contenders, options["repeats"])
    if same_job:
        require_same_job(same_job, _TOLERANCE)
    return {**found, **about}


# -- which figures -------------------------------------------------------------------------------


def limit_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return what the machine can do."""
    del absent
    return [
        spread_row(f"{prefix}{name.removeprefix('limit, ')}", times.rate(name), "GB/s")
        for name in (ours.PATTERN, ours.READ)
    ]


def fp32_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, our share of the limit, and our time over each peer's."""
    name = ours.FP32.name
    peers = [peer for peer in (TORCH, DEEPSPEED) if peer in times]
    fastest = times.fastest(peers)
    alone = f"; {DEEPSPEED} {absent[DEEPSPEED]}" if DEEPSPEED in absent else ""
    return [
        *_time_rows(prefix, times, (ours.PATTERN, name, *peers)),
        *_absent_rows(prefix, absent),
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
    ]


def bf16_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and our time over DeepSpeed's: for the same job, and for its own that keeps less."""
    layouts = (ours.COPY, ours.SPLIT, ours.ALONE)
    same_job = [mixed_name(peer) for peer in (TORCH, DEEPSPEED) if mixed_name(peer) in times]
    own = own_bf16_name(DEEPSPEED)
    names = (ours.PATTERN, *(layout.name for layout in layouts), *same_job, *([own] if own in times else ()))
    copy, split, alone = (layout.name for layout in layouts)
    rows = [
        *_time_rows(prefix, times, names),
        *_absent_rows(prefix, absent),
        *(
            spread_row(f"{prefix}share of the limit, {name}", times.share(name, ours.PATTERN), "share")
            for name in (copy, split, alone)
        ),
    ]
    judge = mixed_name(DEEPSPEED if own in times else TORCH)
    for name in same_job:
        target = BF16_RATIO if name == judge else None
        rows.append(
            spread_row(
                f"{prefix}ours with master / {name} (the same job)", times.ratio(copy, name), "x", target
            )
        )
    if own in times:
        rows += [
            spread_row(
                f"{prefix}ours with master, 28 B / {own}, 22 B", times.ratio(copy, own), "x", BF16_RATIO
            ),
            spread_row(f"{prefix}ours split, 26 B / {own}, 22 B", times.ratio(split, own), "x"),
            spread_row(f"{prefix}ours without master, 22 B / {own}, 22 B", times.ratio(alone, own), "x"),
        ]
    return rows


def int8_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and those of compact moments over the fp32 case."""
    del absent
    base = ours.FP32.name
    return [
        *_time_rows(prefix, times, (ours.PATTERN, base, *(layout.name for layout in _INT8_LAYOUTS))),
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
        *_time_rows(prefix, times, (ours.READ, SUMSQ_FP32, SUMSQ_BF16, SUMSQ_TORCH)),
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


def small_rows(prefix: str, times: Timings, absent: Mapping[str, str]) -> list[Row]:
    """Return times, and those of many tensors over that of one."""
    peers = [peer for peer in (TORCH, DEEPSPEED) if peer in times]
    many = f"{SMALL_TENSORS:,} tensors"
    return [
        *_time_rows(prefix, times, (SMALL_ONE, SMALL_MANY)),
        *(spread_row(f"{prefix}{peer}, {many}", times.milliseconds(peer), "ms") for peer in peers),
        *_absent_rows(prefix, absent),
        spread_row(f"{prefix}{many} / one", times.ratio(SMALL_MANY, SMALL_ONE), "x", SMALL_RATIO),
        *(spread_row(f"{prefix}{many}, ours / {peer}", times.ratio(SMALL_MANY, peer), "x") for peer in peers),
    ]


def _time_rows(prefix: str, times: Timings, names: Sequence[str]) -> list[Row]:
    return [spread_row(f"{prefix}{name}", times.milliseconds(name), "ms") for name in names]


def _absent_rows(prefix: str, absent: Mapping[str, str]) -> list[Row]:
    return [AbsentRow(f"{prefix}{name} {reason}") for name, reason in absent.items()]


# -- the cases -----------------------------------------------------------------------------------


def limit_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time the pure streams."""
    numel = _prepared(options)
    return _timed([ours.pattern_contender(numel), ours.read_contender(numel)], [], options, {"absent": {}})


TASKS = {
    "limit": limit_task,
    "fp32": fp32_task,
    "bf16": bf16_task,
    "int8": int8_task,
    "sumsq": sumsq_task,
    "small": small_task,
}
ROWS = {
    "limit": limit_rows,
    "fp32": fp32_rows,
    "bf16": bf16_rows,
    "int8": int8_rows,
    "sumsq": sumsq_rows,
    "small": small_rows,
}


def run(case: str, session: Session, settings: Settings) -> CaseResult:
    """Measure one case with every number of threads, in a process for each."""
    return measure(session, settings, case, _HELD_BYTES[case], ROWS[case])
