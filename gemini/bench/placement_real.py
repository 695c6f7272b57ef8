"""Case ``predicted``: real steps on the CPU with a DISK tier against what the plan in force promised."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from gemini.bench.record import Row
from gemini.bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini.bench.trainee import GPT2_124M, ManagedTrainee, make_batches, model_data_bytes, timed_step
from gemini.errors import StateError
from gemini.train.model import GPTConfig

TIME_ERROR = 0.10
PEAK_ERROR = 0.02

DEEP = GPTConfig(vocab=16384, layers=24, hidden=512, heads=8, seq=512)
WIDE = GPTConfig(vocab=8192, layers=6, hidden=1280, heads=16, seq=512)
TINY = GPTConfig(layers=4, hidden=128, heads=2)


@dataclass(frozen=True)
class Settings:
    """One run. The first five steps record and time the order; from then on a plan is in force."""

    model: GPTConfig
    share: float
    batch: int = 4
    seq: int = 128
    warmup_steps: int = 6
    measured_steps: int = 5
    keywords: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "GPT-2 124M, 50 %": Settings(GPT2_124M, 0.50),
    "GPT-2 124M, 35 %": Settings(GPT2_124M, 0.35),
    "GPT-2 124M, 25 %": Settings(GPT2_124M, 0.25),
    "24 layers of 512, 30 %": Settings(DEEP, 0.30),
    "6 layers of 1280, 30 %": Settings(WIDE, 0.30),
}
QUICK = {
    "tiny, 50 %": Settings(TINY, 0.5, 2, 32, keywords={"search_range_mb": 1, "min_chunk_size_mb": 0.25}),
}


def predicted(session: Session) -> CaseResult:
    """Train every run in a process of its own and compare."""
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    runs = QUICK if session.quick else RUNS
    for name, settings in runs.items():
        session.progress(f"predicted: {name}")
        options = {**asdict(settings), "disk_dir": os.fspath(session.disk_dir)}
        found = session.run("placement_real.train", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
        measured[name] = found
        rows += _rows(name, found)
    return CaseResult(rows, {name: asdict(settings) for name, settings in runs.items()}, measured)


def _rows(name: str, found: dict[str, Any]) -> list[Row]:
    seconds = statistics.median(found["seconds"])
    peak, promised_peak = found["peak_bytes"], found["promised_peak_bytes"]
    return [
        Row(f"{name}: step, median", seconds, "s"),
        Row(f"{name}: step, predicted", found["promised_seconds"], "s"),
        Row(f"{name}: error of the step", abs(found["promised_seconds"] / seconds - 1), "share", TIME_ERROR),
        Row(f"{name}: error of the peak on DEVICE", abs(promised_peak / peak - 1), "share", PEAK_ERROR),
        Row(f"{name}: peak on DEVICE", peak, "bytes", found["device_bytes"]),
    ]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train; return the times of steady steps and what the plan promised.

    Raises:
        StateError: no plan came into force.
    """
    config = GPTConfig(**options["model"])
    device_bytes = int(options["share"] * model_data_bytes(config))
    trainee = ManagedTrainee(
        config,
        device_bytes=device_bytes,
        host_bytes=0,
        non_model_bytes=0,
        disk_dir=options["disk_dir"],
        **options["keywords"],
    )
    count = options["warmup_steps"] + options["measured_steps"]
    batches = make_batches(config, count=count, batch=options["batch"], seq=options["seq"])
    for batch in batches[: options["warmup_steps"]]:
        trainee.step(batch)
    trainee.model.manager.chunks.table.reset_peak()
    seconds = [timed_step(trainee, batch)[1] for batch in batches[options["warmup_steps"] :]]
    step = trainee.model.plan().step
    if step is None:
        raise StateError("no step was planned: everything fits DEVICE, or the order never repeated")
    promised = step.chosen.simulation
    stats = trainee.model.stats()
    trainee.close()
    return {
        "seconds": seconds,
        "device_bytes": device_bytes,
        "plan": step.chosen.name,
        "peak_bytes": stats["device"]["peak_bytes"],
        "stall_seconds": stats["stall_seconds"],
        "promised_seconds": promised.step_seconds,
        "promised_compute_seconds": promised.compute_seconds,
        "promised_peak_bytes": promised.peak_bytes["device"],
    }


TASKS = {"train": train}
