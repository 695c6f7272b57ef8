"""Measure the modes of tensor parallelism on this machine: an MLP over all ranks, in each possible mode."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from gemini.errors import ConfigError, StateError
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Mesh, counted
from gemini.parallel.tensor.nn import Linear, over


@dataclass(frozen=True)
class Benchmark:
    """The benchmark: ``layers`` times hidden -> 4 hidden -> hidden, on (batch, length, hidden), fp32."""

    ranks: int
    batch: int = 8
    length: int = 512
    hidden: int = 1024
    layers: int = 2
    warmup: int = 1
    steps: int = 3
    device: str | None = None  # None: accelerators if there are enough, else the CPU

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "length", "hidden", "layers", "steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.warmup < 0:
            raise ConfigError(f"warmup is {self.warmup}; it must be 0 or more")

    @property
    def device_type(self) -> str:
        """The device type. Raises ConfigError if there are fewer accelerators than ranks."""
        count = torch.accelerator.device_count()
        kind = torch.accelerator.current_accelerator() if count else None
        if self.device is None:
            return kind.type if kind is not None and count >= self.ranks else "cpu"
        if self.device != "cpu" and (kind is None or self.device != kind.type or count < self.ranks):
            raise ConfigError(
                f"device {self.device!r} for {self.ranks} ranks: this machine has {count} "
                f"accelerators{f' of type {kind.type!r}' if kind is not None else ''}; use fewer ranks, or "
                "'cpu'"
            )
        return self.device


def feasible_layouts(ranks: int) -> list[Layout]:
    """Return the layouts of every tensor-parallel mode that is possible over ``ranks``."""
    if ranks == 1:
        return [Layout()]
    found = [Layout(tp=ranks, mode="1d")]
    if math.isqrt(ranks) ** 2 == ranks:
        found.append(Layout(tp=ranks, mode="2d"))
    for q in range(2, math.isqrt(ranks) + 1):
        if ranks % (q * q) == 0 and ranks > q * q:
            found.append(Layout(tp=ranks, mode="2.5d", depth=ranks // (q * q)))
    if round(ranks ** (1 / 3)) ** 3 == ranks:
        found.append(Layout(tp=ranks, mode="3d"))
    return found


def run_benchmark(benchmark: Benchmark) -> dict[str, Any]:
    """Start the ranks, measure every mode, and return the results as plain data.

    Raises:
        ConfigError: there are no such devices.
        StateError: a rank failed.
    """
    device_type = benchmark.device_type
    backend = "gloo" if device_type == "cpu" else dist.get_default_backend_for_device(device_type)
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.start_processes(  # type: ignore[no-untyped-call, attr-defined]
                _measure_on_rank,
                (benchmark, device_type, backend, directory),
                benchmark.ranks,
                start_method="spawn",
            )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:  # type: ignore[attr-defined]
            last = str(error).strip().splitlines()[-1]
            raise StateError(f"rank {error.error_index} of {benchmark.ranks} failed: {last}") from error
        results = json.loads(Path(directory, "results").read_text())
    return {
        "ranks": benchmark.ranks,
        "device": device_type,
        "backend": backend,
        "input": [benchmark.batch, benchmark.length, benchmark.hidden],
        "layers": benchmark.layers,
        "steps": benchmark.steps,
        "results": results,
    }


def _measure_on_rank(rank: int, benchmark: Benchmark, device_type: str, backend: str, directory: str) -> None:
    """Measure every layout; the first rank writes the results."""
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // benchmark.ranks))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, f"file://{directory}/store", rank=rank, world_size=benchmark.ranks)
    try:
        found = [_measured(layout, benchmark, device_type) for layout in feasible_layouts(benchmark.ranks)]
        if rank == 0:
            Path(directory, "results").write_text(json.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measured(layout: Layout, benchmark: Benchmark, device_type: str) -> dict[str, Any]:
    """Return the results of a layout, or the reason why the sizes cannot be cut that way."""
    said: dict[str, Any] = {"mode": layout.mode, "depth": layout.depth}
    with Mesh(layout, device_type=device_type) as mesh:
        try:
            return said | _figures(mesh, benchmark, torch.device(device_type))
        except ConfigError as error:  # raised on all ranks, before anything was sent
            return said | {"refused": str(error)}


def _figures(mesh: Mesh, benchmark: Benchmark, device: torch.device) -> dict[str, Any]:
    hidden = benchmark.hidden
    with over(mesh) as grid:
        blocks = [
            nn.Sequential(
                Linear(hidden, 4 * hidden, device=device),
                nn.GELU(),
                Linear(4 * hidden, hidden, device=device),
            )
            for _ in range(benchmark.layers)
        ]
    model = nn.Sequential(*blocks)
    whole = torch.randn(benchmark.batch, benchmark.length, hidden, device=device, dtype=torch.float32)
    x = grid.own_part(whole).requires_grad_()
    del whole
    calls, sent = 0, 0
    with _kept_bytes(model) as kept:
        if grid.every is None:
            model(x).sum().backward()
        else:
            with counted(grid.every) as (by_call, by_bytes):
                model(x).sum().backward()
            calls, sent = by_call.total(), by_bytes.total()
    times = [_timed(model, x, device) for _ in range(benchmark.warmup + benchmark.steps)][benchmark.warmup :]
    forward, backward = (median(each) for each in zip(*times, strict=True))
    return {
        "forward_s": forward,
        "backward_s": backward,
        "sent_bytes": sent,
        "calls": calls,
        "parameter_bytes": sum(param.nbytes for param in model.parameters()),
        "kept_bytes": sum(kept.values()),
    }


def _timed(model: nn.Module, x: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass, which all ranks begin together."""
    model.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    out = model(x).sum()
    _synchronize(device)
    half = time.perf_counter()
    out.backward()
    _synchronize(device)
    return half - began, time.perf_counter() - half


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


@contextmanager
def _kept_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes kept for backward, by the address of their storage, without parameters."""
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept
