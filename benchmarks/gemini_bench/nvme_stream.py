"""Cases ``stream`` and ``memory``: the optimizer's step alone, its states in a file."""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.optim import HybridAdam
from gemini.system.device import free_memory_bytes
from gemini_bench.nvme_bare import SETTLE_SECONDS, BareDisk
from gemini_bench.nvme_blocks import held_bytes
from gemini_bench.nvme_plain import DISK, KINDS, MEMORY, in_order, require_disk
from gemini_bench.nvme_settings import STATE_BYTES, Settings
from gemini_bench.paired import Spread, filled, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

TIME_RATIO = 1.10
RING_BYTES = 64 * 2**20
# Two processes that do the same differ by this much: what libraries keep for their threads, and pages.
EQUAL_BYTES = 4 * 2**20
SIZES = (1, 4)  # times ``memory_numel`` parameters
_TENSOR_NUMEL = 2**25
_PARAM_AND_GRAD_BYTES = 8
_SPARE_MEMORY_BYTES = 2_000_000_000
_SPARE_DISK_BYTES = 500_000_000
_FRACTIONS = {MEMORY: 0.0, DISK: 1.0}


def make_optimizer(numel: int, kind: str, directory: str) -> HybridAdam:
    """Return an optimizer of ``numel`` parameters with gradients, in tensors of the size of large layers."""
    params = []
    for number, start in enumerate(range(0, numel, _TENSOR_NUMEL)):
        size = min(_TENSOR_NUMEL, numel - start)
        param = torch.nn.Parameter(filled(size, torch.float32, scale=0.02, seed=2 * number))
        param.grad = filled(size, torch.float32, scale=1e-3, seed=2 * number + 1)
        params.append(param)
    return HybridAdam(params, lr=1e-4, nvme_offload_fraction=_FRACTIONS[kind], nvme_offload_dir=directory)


# -- stream --------------------------------------------------------------------------------------


def stream_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time steps and the bare disk in turn."""
    settings, directory = Settings.from_options(options), options["directory"]
    optimizer = make_optimizer(settings.stream_numel, DISK, directory)
    for _ in range(2):  # the first makes the states, the second is the first to read them
        optimizer.step()
    bare = BareDisk.of_states(optimizer, settings.ring_bytes)
    seconds: dict[str, list[float]] = {"step": [], "bare": []}
    try:
        for number in range(settings.stream_repeats):
            for name in in_order(("step", "bare"), number):
                seconds[name].append(bare.settled_run() if name == "bare" else _settled_step(optimizer))
    finally:
        bare.close()
    return {"seconds": seconds, "bare_bytes": 2 * bare.nbytes}


def _settled_step(optimizer: HybridAdam) -> float:
    time.sleep(SETTLE_SECONDS)
    begin = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begin


def fitting_numel(wanted: int, free_memory: int, free_disk: int) -> int:
    """Return how many of the ``wanted`` parameters memory and disk have room for.

    Raises:
        ConfigError: not even a million.
    """
    by_memory = (free_memory - _SPARE_MEMORY_BYTES) // _PARAM_AND_GRAD_BYTES
    by_disk = (free_disk - _SPARE_DISK_BYTES) // STATE_BYTES
    numel = min(wanted, by_memory, by_disk)
    if numel < min(wanted, 1_000_000):
        raise ConfigError(
            f"case 'stream' does not fit: {free_memory / 1e9:.1f} GB of memory and {free_disk / 1e9:.1f} GB "
            "of disk are free; pass another --dir or leave the case out with --only"
        )
    return numel


def stream(session: Session, settings: Settings) -> CaseResult:
    """Time the step of as many of the wanted parameters as there is room for."""
    settings = settings.quick() if session.quick else settings
    wanted = settings.stream_numel
    free_disk = shutil.disk_usage(session.disk_dir).free
    numel = fitting_numel(wanted, free_memory_bytes(), free_disk)
    settings = dataclasses.replace(settings, stream_numel=numel)
    note = "" if numel == wanted else f" of the {wanted:,} wanted: there is no room for more"
    session.progress(f"stream: {numel:,} parameters{note}")
    options = settings.to_options(directory=os.fspath(session.disk_dir))
    found = session.run("nvme_stream.stream", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    return CaseResult(stream_rows(found, numel, note), settings.to_options()["settings"], found)


def stream_rows(found: Mapping[str, Any], numel: int, note: str) -> list[Row]:
    """Return times, and the step's over the bare disk's of the same turn."""
    step, bare = found["seconds"]["step"], found["seconds"]["bare"]
    ratios = [mine / theirs for mine, theirs in zip(step, bare, strict=True)]
    rates = [found["bare_bytes"] / seconds / 1e9 for seconds in bare]
    return [
        Row(f"parameters{note}", numel, "parameters"),
        spread_row("step", Spread.of(step), "s"),
        spread_row("bare disk: the same bytes read and written", Spread.of(bare), "s"),
        spread_row("bare disk", Spread.of(rates), "GB/s"),
        spread_row("step / bare disk", Spread.of(ratios), "x", TIME_RATIO),
    ]


# -- memory --------------------------------------------------------------------------------------


def memory_task(options: dict[str, Any]) -> dict[str, Any]:
    """Take steps with states in memory or in a file; return resident bytes at the end."""
    optimizer = make_optimizer(options["numel"], options["kind"], options["directory"])
    held_bytes()  # what making them left in the heap is of no interest, and would count in the peak
    for _ in range(3):
        optimizer.step()
    return {"rss_bytes": held_bytes()}


def memory(session: Session, settings: Settings) -> CaseResult:
    """Measure what states in a file cost in memory: beyond the same process without any states."""
    settings = settings.quick() if session.quick else settings
    numels = [size * settings.memory_numel for size in SIZES]
    require_disk("memory", session, STATE_BYTES * numels[-1])
    require_memory(numels[-1], free_memory_bytes())
    found: dict[str, list[dict[str, dict[str, int]]]] = {}
    for numel in numels:
        session.progress(f"memory: {numel:,} parameters, states in memory and in a file")
        found[str(numel)] = [
            {kind: _memory_of(session, numel, kind) for kind in KINDS} for _ in range(settings.memory_repeats)
        ]
    return CaseResult(memory_rows(found), settings.to_options()["settings"], {"found": found})


def require_memory(numel: int, free_memory: int) -> None:
    """Raise ConfigError with the numbers if the larger model does not fit with its states in memory."""
    need = (_PARAM_AND_GRAD_BYTES + STATE_BYTES) * numel + _SPARE_MEMORY_BYTES
    if need > free_memory:
        raise ConfigError(
            f"case 'memory' needs {need / 1e9:.1f} GB of memory at once and {free_memory / 1e9:.1f} GB are "
            "free; leave the case out with --only"
        )


def _memory_of(session: Session, numel: int, kind: str) -> dict[str, int]:
    options = {"numel": numel, "kind": kind, "directory": os.fspath(session.disk_dir)}
    worker = session.run("nvme_stream.memory", options)
    return {"after": worker.data()["rss_bytes"], "peak": worker.peak_rss_bytes}


def memory_rows(found: Mapping[str, Sequence[Mapping[str, Mapping[str, int]]]]) -> list[Row]:
    """Return the bytes added for each size, and how much the sizes differ."""
    rows: list[Row] = []
    for when, what in (("after", "after steps"), ("peak", "peak")):
        added = {}
        for numel, pairs in found.items():
            states = STATE_BYTES * int(numel)
            readings = [pair[DISK][when] - (pair[MEMORY][when] - states) for pair in pairs]
            added[numel] = statistics.median(readings)
            label = f"{int(numel):,} parameters: memory added, {what}"
            rows.append(spread_row(label, Spread.of(readings), "bytes", RING_BYTES))
        low, high = min(added.values()), max(added.values())
        rows.append(Row(f"memory added, {what}: difference between sizes", high - low, "bytes", EQUAL_BYTES))
    return rows


TASKS = {"stream": stream_task, "memory": memory_task}
