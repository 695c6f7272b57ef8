"""Case ``resident``: the runtime's cost when everything fits, against plain torch with the same Adam."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPTConfig, num_parameters
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import (
    GPT2_124M,
    ManagedTrainee,
    PlainTrainee,
    Trainee,
    make_batches,
    model_data_bytes,
    timed_step,
    train,
)

TIME_RATIO = 1.03
MEMORY_RATIO = 1.03


@dataclass(frozen=True)
class Settings:
    """The settings of the case. ``memory_runs``: processes per model; ``memory_steps``: steps in each."""

    model: GPTConfig = GPT2_124M
    batch: int = 4
    seq: int = 128
    warmup_steps: int = 2
    measured_steps: int = 9
    memory_runs: int = 2
    memory_steps: int = 3


QUICK = Settings(GPTConfig(layers=2, hidden=64, heads=2), batch=2, seq=32, measured_steps=3, memory_runs=1)


def run(session: Session) -> CaseResult:
    """Time both models in one process; then measure the peak memory of each in separate processes."""
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    session.progress("resident: plain and managed, alternating steps in one process")
    timing = session.run("resident.paired", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    peaks: dict[str, list[int]] = {"plain": [], "managed": []}
    for index in range(settings.memory_runs):
        for kind, found in peaks.items():
            session.progress(f"resident: peak memory, {kind}, run {index + 1} of {settings.memory_runs}")
            worker = session.run("resident.memory", {**options, "kind": kind})
            worker.data()
            found.append(worker.peak_rss_bytes)
    measured = {**timing, "peak_rss_bytes": peaks, "num_parameters": num_parameters(settings.model)}
    return CaseResult(_rows(timing, peaks), options, measured)


def _rows(timing: dict[str, Any], peaks: dict[str, list[int]]) -> list[Row]:
    plain, managed = timing["plain_seconds"], timing["managed_seconds"]
    pairs = [ours / theirs for ours, theirs in zip(managed, plain, strict=True)]
    memory = {kind: statistics.median(found) for kind, found in peaks.items()}
    return [
        Row("plain step, median", statistics.median(plain), "s"),
        Row("plain step, shortest", min(plain), "s"),
        Row("plain step, longest", max(plain), "s"),
        Row("managed step, median", statistics.median(managed), "s"),
        Row("managed step, shortest", min(managed), "s"),
        Row("managed step, longest", max(managed), "s"),
        Row(
            "step time, ratio of medians",
            statistics.median(managed) / statistics.median(plain),
            "x",
            TIME_RATIO,
        ),
        Row("step time, median of paired ratios", statistics.median(pairs), "x", TIME_RATIO),
        Row("plain peak memory", memory["plain"], "bytes"),
        Row("managed peak memory", memory["managed"], "bytes"),
        Row("peak memory, ratio", memory["managed"] / memory["plain"], "x", MEMORY_RATIO),
    ]


def paired(options: dict[str, Any]) -> dict[str, Any]:
    """Train both models in this process on the same batches; who goes first changes from pair to pair.

    Raises:
        StateError: the losses differ, or not everything stayed on DEVICE: then the times compare nothing.
    """
    settings = _settings(options)
    count = settings.warmup_steps + settings.measured_steps
    batches = make_batches(settings.model, count=count, batch=settings.batch, seq=settings.seq)
    trainees: dict[str, Trainee] = {
        "plain": PlainTrainee(settings.model),
        "managed": ManagedTrainee(settings.model),
    }
    losses: dict[str, list[float]] = {kind: [] for kind in trainees}
    seconds: dict[str, list[float]] = {kind: [] for kind in trainees}
    for index, batch in enumerate(batches):
        for kind in sorted(
            trainees, reverse=index % 2 == 0
        ):  # plain first in even steps, managed first in odd ones
            loss, elapsed = timed_step(trainees[kind], batch)
            losses[kind].append(loss)
            if index >= settings.warmup_steps:
                seconds[kind].append(elapsed)
    managed = trainees["managed"]
    assert isinstance(managed, ManagedTrainee)
    if losses["plain"] != losses["managed"]:
        raise StateError(f"the managed model's losses differ from the plain model's: {losses}")
    if not managed.resident:
        raise StateError(
            "not everything stayed on DEVICE; this machine has too little free memory for this case"
        )
    return {
        "plain_seconds": seconds["plain"],
        "managed_seconds": seconds["managed"],
        "losses": losses["plain"],
        "losses_identical": True,
        "chunks": managed.model.stats()["num_chunks"],
        "wasted_bytes": managed.model.stats()["wasted_bytes"],
    }


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Train one model, ``options["kind"]``, for the watch to see its peak."""
    settings = _settings(options)
    trainee = PlainTrainee(settings.model) if options["kind"] == "plain" else ManagedTrainee(settings.model)
    batches = make_batches(
        settings.model, count=settings.memory_steps, batch=settings.batch, seq=settings.seq
    )
    return {"losses": train(trainee, batches), "model_data_bytes": model_data_bytes(settings.model)}


def _settings(options: dict[str, Any]) -> Settings:
    values = {name: options[name] for name in (field.name for field in dataclasses.fields(Settings))}
    return Settings(**{**values, "model": GPTConfig(**values["model"])})


TASKS = {"paired": paired, "memory": memory}
