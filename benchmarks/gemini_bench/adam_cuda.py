"""Case ``cuda``: FusedAdam against the copy bandwidth of its GPU, and against torch's fused AdamW there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gemini.errors import ConfigError
from gemini.optim import FusedAdam
from gemini.system import device
from gemini_bench import adam_ours as ours
from gemini_bench.adam_measure import Settings, require_memory
from gemini_bench.adam_peers import HYPER, SAMPLE_NUMEL, TORCH, fp32_contender, torch_peer
from gemini_bench.paired import Contender, Timings, require_same_job, run_paired, spread_row, wall_seconds
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

COPY_SHARE = 0.90
COPY = "device copy"
# bf16 parameter and gradient with the remainders of an exact master, by FusedAdam's state_dtype.
_SPLIT = {ours.SPLIT: "fp32", ours.SPLIT_INT8: "int8"}
NAMES = tuple(layout.name for layout in (ours.FP32, *_SPLIT))

_DEVICE = torch.device("cuda")
_HELD_BYTES = 8 + 2 * ours.FP32.held_bytes + sum(layout.held_bytes for layout in _SPLIT)
_TOLERANCE = 2e-6


def require_gpu() -> None:
    """Raise ConfigError if torch cannot use a GPU here."""
    if not device.cuda_available():
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no GPU (its CUDA: {torch.version.cuda}); "
            "run this where it does, or leave --device out"
        )


def run(session: Session, settings: Settings) -> CaseResult:
    """Time all in one process.

    Raises:
        ConfigError: there is no GPU, or too little of its memory is free.
    """
    require_gpu()
    free, _total = device.cuda_memory_bytes(_DEVICE)
    require_memory("case 'cuda'", int(_HELD_BYTES * settings.numel), free)
    session.progress(f"cuda: {settings.numel:,} parameters on {device.cuda_name(_DEVICE)}")
    options = {"numel": settings.numel, "repeats": settings.repeats}
    found = session.run("adam_cuda.fp32", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(cuda_rows(Timings(found)), dataclasses.asdict(settings), found)


def cuda_rows(times: Timings) -> list[Row]:
    """Return times, our share of the copy bandwidth, and our time over torch's and over our fp32's."""
    fp32_name = ours.FP32.name
    return [
        *(spread_row(name, times.milliseconds(name), "ms") for name in (COPY, *NAMES, TORCH)),
        *(spread_row(f"bandwidth, {name}", times.rate(name), "GB/s") for name in (COPY, *NAMES)),
        *(
            spread_row(
                f"share of copy bandwidth, {name}",
                times.share(name, COPY),
                "share",
                COPY_SHARE if name == fp32_name else None,
                at_least=True,
            )
            for name in NAMES
        ),
        spread_row(f"{fp32_name} / {TORCH}", times.ratio(fp32_name, TORCH), "x", 1.0),
        *(
            spread_row(f"{layout.name} / {fp32_name}", times.ratio(layout.name, fp32_name), "x")
            for layout in _SPLIT
        ),
    ]


def fp32(options: dict[str, Any]) -> dict[str, Any]:
    """Time steps of one tensor on the current GPU by us and by torch, and a copy of as many floats."""
    numel = options["numel"]
    same = [
        _fused_contender(ours.FP32, numel),
        fp32_contender(torch_peer(), *_start(numel, torch.float32)),
    ]
    contenders = [_copy_contender(numel), *same, *(_fused_contender(layout, numel) for layout in _SPLIT)]
    found = run_paired(contenders, options["repeats"], timed=_until_done)
    require_same_job(same, _TOLERANCE)
    return {**found, "gpu": device.cuda_name(_DEVICE), "cuda": torch.version.cuda}


def _until_done(run: Callable[[], object]) -> float:
    return wall_seconds(run, lambda: device.synchronize(_DEVICE))


def _start(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return parameter and gradient, the same for every contender, in memory of their own."""
    generator = torch.Generator(_DEVICE).manual_seed(1)
    scales = (ours.PARAM_SCALE, ours.GRAD_SCALE)
    arrays = [torch.empty(numel, dtype=dtype, device=_DEVICE) for _ in scales]
    for array, scale in zip(arrays, scales, strict=True):
        array.normal_(0.0, scale, generator=generator)
    return arrays[0], arrays[1]


def _copy_contender(numel: int) -> Contender:
    source, target = _start(numel, torch.float32)
    return Contender(COPY, lambda: target.copy_(source), 8 * numel)


def _fused_contender(layout: ours.Layout, numel: int) -> Contender:
    param, grad = _start(numel, torch.float32 if layout is ours.FP32 else torch.bfloat16)
    param.grad = grad
    optimizer = FusedAdam(
        [param],
        lr=HYPER.lr,
        betas=HYPER.betas,
        eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
        state_dtype=_SPLIT.get(layout, "fp32"),
        master_remainders=layout in _SPLIT,
    )
    return Contender(layout.name, optimizer.step, layout.step_bytes * numel, lambda: param[:SAMPLE_NUMEL])


TASKS = {"fp32": fp32}
