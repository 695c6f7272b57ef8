"""How fast this machine is: a few seconds of the operators that training consists of."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from gemini.forecast.machine import DTYPE_NAMES, MachineSpeeds
from gemini.memstats import LinkSpeed
from gemini.model.ddp import GeminiDDP
from gemini.optim import CPUAdam, GeminiOptimizer
from gemini.optim.kernels import AdamHyper, adam_update
from gemini.placement.problem import CPU_TRANSFERS_TAKE
from gemini.system.threads import usable_processors

_MATMUL_SIZE = 768
_STREAM_NUMEL = 1 << 23
_REPEATS = 5
_TINY_LAYERS = 24
_KIB = 1024


def measure_machine(dtype: torch.dtype | None, links: tuple[LinkSpeed, ...]) -> MachineSpeeds:
    """Measure this machine for models that compute in ``dtype``, in a second or two and 200 MB of memory."""
    return MachineSpeeds(
        name=f"{platform.node() or 'this machine'}, {len(usable_processors())} cores",
        matmul_flops={
            DTYPE_NAMES[kind]: _matmul_flops(kind) for kind in {torch.float32, dtype or torch.float32}
        },
        memory_bytes_per_second=_memory_rate(),
        adam_bytes_per_second=_adam_rate(),
        moment_seconds=_moment_seconds(),
        transfers_take=CPU_TRANSFERS_TAKE,
        links=links,
        host_bytes=0,
        device_bytes=None,
        disk_bytes=None,
    )


def seconds_of(call: Callable[[], object], *, repeats: int = _REPEATS, limit_seconds: float = 1.0) -> float:
    """Return the median time of ``call`` after one that does not count; fewer repeats past the limit."""
    call()
    begin = time.perf_counter()
    times: list[float] = []
    while len(times) < repeats and (not times or time.perf_counter() - begin < limit_seconds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def _matmul_flops(dtype: torch.dtype) -> float:
    left = torch.full((_MATMUL_SIZE, _MATMUL_SIZE), 0.5, dtype=dtype, device="cpu")
    return 2.0 * _MATMUL_SIZE**3 / seconds_of(lambda: left @ left, limit_seconds=0.5)


def _memory_rate() -> float:
    left, right = (torch.ones(_STREAM_NUMEL, dtype=torch.float32, device="cpu") for _ in range(2))
    return 3.0 * left.nbytes / seconds_of(lambda: left + right)


def _adam_rate() -> float:
    param, grad, exp_avg, exp_avg_sq = (
        torch.zeros(_STREAM_NUMEL, dtype=torch.float32, device="cpu") for _ in range(4)
    )
    seconds = seconds_of(lambda: adam_update(param, grad, exp_avg, exp_avg_sq, AdamHyper(), 1))
    return 7.0 * param.nbytes / seconds


def _moment_seconds() -> float:
    """Time a managed model that has next to nothing to compute, and all of it in moments."""
    model = nn.Sequential(
        *(nn.Linear(16, 16, device="cpu", dtype=torch.float32) for _ in range(_TINY_LAYERS))
    )
    total = 4 * 4 * _TINY_LAYERS * 4 * _KIB
    with GeminiDDP(
        model,
        device_bytes=total // 2,
        host_bytes=total,
        non_model_bytes=0,
        min_chunk_size_mb=4 * _KIB / 2**20,
        search_range_mb=0,
    ) as managed:
        optimizer = GeminiOptimizer(CPUAdam(managed.parameters()), managed)
        inputs = torch.ones(1, 16, dtype=torch.float32, device="cpu")

        def step() -> None:
            optimizer.backward(managed(inputs).sum())
            optimizer.step()

        seconds = seconds_of(step)
        return seconds / max(len(managed.timeline()), 1)
