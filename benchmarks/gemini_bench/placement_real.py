"""Case ``predicted``: real steps on the CPU with a DISK tier, against the promises made before them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPTConfig
from gemini.placement.report import PlannedStep
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import GPT2_124M, ManagedTrainee, make_batches, model_data_bytes, timed_step

TIME_ERROR = 0.10
PEAK_ERROR = 0.02

DEEP = GPTConfig(vocab=16384, layers=24, hidden=512, heads=8, seq=512)
WIDE = GPTConfig(vocab=8192, layers=6, hidden=1280, heads=16, seq=512)
TINY = GPTConfig(layers=4, hidden=128, heads=2)


@dataclass(frozen=True)
class Settings:
    """One run. The first five steps record and time the order; from then on a plan is in force, and the
    first promise is renewed when three steps have followed it.

    Before each of ``blocks`` of ``block_steps`` steps the promise in force is asked for; it is judged by the
    middle one of these steps, none of which it knows.
    """

    model: GPTConfig
    share: float
    batch: int = 4
    seq: int = 128
    warmup_steps: int = 8
    blocks: int = 4
    block_steps: int = 5
    keywords: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "GPT-2 124M, 50 %": Settings(GPT2_124M, 0.50),
    "GPT-2 124M, 35 %": Settings(GPT2_124M, 0.35),
    "GPT-2 124M, 25 %": Settings(GPT2_124M, 0.25),
    "24 layers of 512, 30 %": Settings(DEEP, 0.30),
    "6 layers of 1280, 30 %": Settings(WIDE, 0.30),
}
QUICK = {
    "tiny, 50 %": Settings(
        TINY, 0.5, 2, 32, blocks=2, keywords={"search_range_mb": 1, "min_chunk_size_mb": 0.25}
    ),
}


def predicted(session: Session) -> CaseResult:
    """Train every run in its own process and compare."""
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
    blocks = found["blocks"]
    seconds = [statistics.median(block["seconds"]) for block in blocks]

    def errors(promised: Iterable[float]) -> Spread:
        return Spread.of([abs(one / took - 1) for one, took in zip(promised, seconds, strict=True)])

    first = [found["first_promised_seconds"]] * len(blocks)
    before = [block["before"]["seconds"] for block in blocks]
    after = [block["after"]["seconds"] for block in blocks]
    peak, promised_peak = found["peak_bytes"], found["promised_peak_bytes"]
    return [
        spread_row(f"{name}: step, median of each block", Spread.of(seconds), "s"),
        spread_row(f"{name}: step, promised before each block", Spread.of(before), "s"),
        spread_row(f"{name}: error of the step", errors(before), "share", TIME_ERROR),
        spread_row(f"{name}: error, had the first promise stayed", errors(first), "share"),
        spread_row(f"{name}: error of the model, told the block's own pace", errors(after), "share"),
        Row(f"{name}: error of the peak on DEVICE", abs(promised_peak / peak - 1), "share", PEAK_ERROR),
        Row(f"{name}: peak on DEVICE", peak, "bytes", found["device_bytes"]),
    ]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train; return the times of steady steps, and the promises before and after them.

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
    warmup_steps, block_steps = options["warmup_steps"], options["block_steps"]
    count = warmup_steps + options["blocks"] * block_steps
    batches = make_batches(config, count=count, batch=options["batch"], seq=options["seq"])
    for batch in batches[:warmup_steps]:
        trainee.step(batch)
    trainee.model.manager.chunks.table.reset_peak()
    promised = [_promise(trainee)]
    seconds = []
    for begin in range(warmup_steps, count, block_steps):
        seconds.append([timed_step(trainee, batch)[1] for batch in batches[begin : begin + block_steps]])
        promised.append(_promise(trainee))
    step, stats = _planned(trainee), trainee.model.stats()
    trainee.close()
    return {
        "blocks": [
            {"before": before, "seconds": block, "after": after}
            for block, (before, after) in zip(seconds, pairwise(promised), strict=True)
        ],
        "device_bytes": device_bytes,
        "plan": step.chosen.name,
        "peak_bytes": stats["device"]["peak_bytes"],
        "first_promised_seconds": step.chosen.simulation.step_seconds,
        "promised_peak_bytes": step.chosen.simulation.peak_bytes["device"],
    }


def _promise(trainee: ManagedTrainee) -> dict[str, float]:
    """Return the promise in force, and the pace that it was made of."""
    promise = _planned(trainee).promise
    return {
        "seconds": promise.simulation.step_seconds,
        "computing_seconds": promise.pace.computing_seconds,
        "num_steps": promise.pace.num_steps,
        **{link.name: link.bytes_per_second for link in promise.pace.links},
    }


def _planned(trainee: ManagedTrainee) -> PlannedStep:
    step = trainee.model.plan().step
    if step is None:
        raise StateError("no step was planned: everything fits DEVICE, or the order never repeated")
    return step


TASKS = {"train": train}
