"""Case ``largest``: the largest model that the GPU, the host's memory and the disk hold together, trained."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import OutOfBudgetError, StateError
from gemini.system.device import default_budget_bytes, free_memory_bytes
from gemini_bench.gpu_device import BenchDevice, open_bench_device
from gemini_bench.gpu_settings import TINY, TINY_CHUNKS, ModelSettings
from gemini_bench.gpu_trainee import (
    MODEL_DATA_BYTES_PER_PARAMETER,
    ManagedTrainee,
    make_batches,
    saved_bytes,
)
from gemini_bench.llama import LLAMA_7B, LlamaConfig, num_parameters
from gemini_bench.paired import wall_seconds
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

SHARE = 0.9
_GIB, _MIB = 2**30, 2**20
_DISK_SHARE = 0.9  # of what is free
_WORKSPACE = 2 * _GIB  # of libraries, and what torch's allocator keeps


@dataclass(frozen=True)
class Settings(ModelSettings):
    """The model's ``layers`` are as many as fit. Budgets in bytes, None: what is free, less a margin, at
    most ``most_host_bytes`` and ``most_disk_bytes``."""

    model: LlamaConfig = LLAMA_7B
    batch: int = 1
    seq: int = 2048
    steps: int = 3
    most_host_bytes: int = 120 * _GIB
    most_disk_bytes: int = 256 * _GIB
    device_bytes: int | None = None
    disk_bytes: int | None = None


QUICK = Settings(
    dataclasses.replace(TINY, checkpointing=True),
    seq=16,
    most_host_bytes=24 * _MIB,
    device_bytes=40 * _MIB,
    disk_bytes=64 * _MIB,
    keywords={**TINY_CHUNKS, "non_model_bytes": 0},
)


def run(session: Session, device: str) -> CaseResult:
    """Fill all three tiers with one model and train it."""
    chosen = QUICK if session.quick else Settings()
    if session.limit_bytes is not None:
        chosen = dataclasses.replace(
            chosen,
            most_host_bytes=min(chosen.most_host_bytes, session.limit_bytes),
            most_disk_bytes=min(chosen.most_disk_bytes, session.limit_bytes),
        )
    settings = dataclasses.asdict(chosen)
    session.progress("largest: one model on DEVICE, HOST and DISK; initializing takes minutes")
    options = {**settings, "device": device, "disk_dir": os.fspath(session.disk_dir)}
    worker = session.run("gpu_largest.train", options, sample_seconds=TIMING_SAMPLE_SECONDS)
    found = {**worker.data(), "peak_rss_bytes": worker.peak_rss_bytes}
    return CaseResult(rows(found), settings, found)


def rows(found: Mapping[str, Any]) -> list[Row]:
    """Return how much of the tiers the model fills, and how fast it trains."""
    numel, budgets = found["num_parameters"], found["budgets"]
    most = sum(budgets.values()) / MODEL_DATA_BYTES_PER_PARAMETER
    last = found["step_seconds"][-1]
    return [
        *(Row(f"budget of {tier.upper()}", nbytes, "bytes") for tier, nbytes in budgets.items()),
        Row("parameters, trained", numel, "parameters"),
        Row("of what the tiers could hold", numel / most, "share", SHARE, at_least=True),
        Row("last step", last, "s"),
        Row("tokens per second", found["tokens"] / last, "1/s"),
        Row("read from the disk in it", found["disk_read_bytes"], "bytes"),
        Row("written to the disk in it", found["disk_written_bytes"], "bytes"),
        Row("first loss", found["losses"][0], "nats"),
        Row("last loss, on the same batch", found["losses"][-1], "nats", found["losses"][0]),
        Row("peak resident memory of the process", found["peak_rss_bytes"], "bytes"),
    ]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train the largest model that is not refused, on one batch over and over.

    Raises:
        OutOfBudgetError: not even one layer fits.
        StateError: it does not learn.
    """
    settings = Settings.from_options(options)
    device = open_bench_device(options["device"])
    budgets = _budgets(settings, device, Path(options["disk_dir"]))
    model, trainee = _largest(settings, device, budgets, options["disk_dir"])
    (batch,) = make_batches(model, device, count=1, shape=(settings.batch, settings.seq))
    losses, seconds, links = [], [], []
    for _ in range(settings.steps):
        before = trainee.model.stats()

        def step() -> None:
            losses.append(float(trainee.step(batch)))
            trainee.model.manager.run_pending()

        seconds.append(wall_seconds(step, device.compute.synchronize))
        after = trainee.model.stats()
        links.append([after[link]["bytes"] - before[link]["bytes"] for link in ("disk_read", "disk_write")])
    trainee.close()
    if not all(math.isfinite(loss) for loss in losses) or len(set(losses)) == 1:
        raise StateError(f"the model does not learn: losses {losses}")
    read_bytes, written_bytes = links[-1]
    return {
        "budgets": budgets,
        "model": dataclasses.asdict(model),
        "num_parameters": num_parameters(model),
        "tokens": settings.batch * settings.seq,
        "losses": losses,
        "step_seconds": seconds,
        "disk_read_bytes": read_bytes,
        "disk_written_bytes": written_bytes,
    }


def _budgets(settings: Settings, device: BenchDevice, disk_dir: Path) -> dict[str, int]:
    device_bytes, disk_bytes = settings.device_bytes, settings.disk_bytes
    if device_bytes is None:
        device_bytes = default_budget_bytes(device.compute.free_bytes())
    if disk_bytes is None:
        disk_bytes = min(settings.most_disk_bytes, int(_DISK_SHARE * shutil.disk_usage(disk_dir).free))
    host_bytes = min(settings.most_host_bytes, default_budget_bytes(free_memory_bytes()))
    return {"device": device_bytes, "host": host_bytes, "disk": disk_bytes}


def _largest(
    settings: Settings, device: BenchDevice, budgets: Mapping[str, int], disk_dir: str
) -> tuple[LlamaConfig, ManagedTrainee]:
    """Return the deepest model that the runtime accepts, and its trainer. A refused model costs nothing: the
    runtime refuses it before it allocates memory.
    """
    room = sum(budgets.values()) / MODEL_DATA_BYTES_PER_PARAMETER
    one, two = (num_parameters(dataclasses.replace(settings.model, layers=layers)) for layers in (1, 2))
    layers = max(1, int((room - one) / (two - one)) + 1)
    keywords = {f"{tier}_bytes": nbytes for tier, nbytes in budgets.items()}
    while True:
        model = dataclasses.replace(settings.model, layers=layers)
        keywords["non_model_bytes"] = saved_bytes(model, settings.batch * settings.seq) + _WORKSPACE
        try:
            trainee = ManagedTrainee(model, device, disk_dir=disk_dir, **{**keywords, **settings.keywords})
            return model, trainee
        except OutOfBudgetError:
            if layers == 1:
                raise
        layers -= 1


TASKS = {"train": train}
