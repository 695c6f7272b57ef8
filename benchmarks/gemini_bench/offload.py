"""Case ``offload``: a part of the model data on DEVICE, the rest on DISK.

The bound on memory compares like with like: the peak of non-model memory comes from a plain run of the same
steps that keeps its gradients: whenever it peaks, it holds exactly 16 bytes of model data per parameter.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from dataclasses import dataclass
from typing import Any

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPTConfig, num_parameters
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session
from gemini_bench.trainee import (
    GPT2_124M,
    ManagedTrainee,
    PlainTrainee,
    make_batches,
    model_data_bytes,
    timed_step,
    train,
)
from gemini_bench.watch import resident_bytes

ALLOWANCE_BYTES = 150_000_000
FORMULA = (
    "growth = peak RSS of the managed process - bare; bound = device_bytes + non-model + 150 MB; "
    "bare = RSS of a process that imported torch; "
    "non-model = peak RSS of a plain run that keeps its gradients - bare - 16 bytes per parameter"
)


@dataclass(frozen=True)
class Settings:
    """What is measured. ``shares`` are the parts of the model data that DEVICE may hold."""

    model: GPTConfig = GPT2_124M
    batch: int = 4
    seq: int = 128
    warmup_steps: int = 2
    measured_steps: int = 4
    shares: tuple[float, ...] = (0.5, 0.25)


QUICK = Settings(GPTConfig(layers=4, hidden=128, heads=2), batch=2, seq=32, measured_steps=3)


def run(session: Session) -> CaseResult:
    """Measure bare and non-model memory, then every share in a process of its own."""
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    session.progress("offload: memory of a process without a model, and of a plain run")
    bare = session.bare_bytes()
    plain = session.run("offload.plain", options)
    model_data = model_data_bytes(settings.model)
    non_model = plain.peak_rss_bytes - bare - model_data
    measured: dict[str, Any] = {
        "formula": FORMULA,
        "num_parameters": num_parameters(settings.model),
        "model_data_bytes": model_data,
        "bare_rss_bytes": bare,
        "plain_peak_rss_bytes": plain.peak_rss_bytes,
        "plain": plain.data(),
        "non_model_bytes": non_model,
        "shares": {},
    }
    rows = [
        Row("bare process", bare, "bytes"),
        Row("peak of non-model memory", non_model, "bytes"),
    ]
    for share in settings.shares:
        budget = int(share * model_data)
        session.progress(f"offload: {share:.0%} of the model data on DEVICE, {budget} bytes")
        worker = session.run(
            "offload.managed", {**options, "device_bytes": budget, "disk_dir": os.fspath(session.disk_dir)}
        )
        found = worker.data()
        if found["losses"] != plain.data()["losses"]:
            raise StateError(f"losses at {share:.0%} differ from plain torch: {found['losses']}")
        growth, bound = worker.peak_rss_bytes - bare, budget + non_model + ALLOWANCE_BYTES
        measured["shares"][f"{share:g}"] = {
            **found,
            "device_bytes": budget,
            "peak_rss_bytes": worker.peak_rss_bytes,
            "growth_bytes": growth,
            "bound_bytes": bound,
        }
        rows.extend(_rows(f"{share:.0%}", found, growth, bound))
    return CaseResult(rows, options, measured)


def _rows(share: str, found: dict[str, Any], growth: int, bound: int) -> list[Row]:
    steps = len(found["seconds"])
    rows = [
        Row(f"{share}: step, median", statistics.median(found["seconds"]), "s"),
        Row(f"{share}: share of time stalled", found["stall_seconds"] / sum(found["seconds"]), "share"),
    ]
    for link, verb in (("disk_read", "read"), ("disk_write", "written")):
        traffic = found[link]
        rows.append(Row(f"{share}: {verb} per step", traffic["bytes"] / steps, "bytes"))
        if traffic["seconds"] > 0:
            rows.append(Row(f"{share}: {verb}", traffic["bytes"] / traffic["seconds"] / 1e9, "GB/s"))
    rows.append(Row(f"{share}: growth of resident memory", growth, "bytes", bound))
    return rows


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Train everything resident with gradients kept, for the watch to see its peak."""
    settings = _settings(options)
    before = resident_bytes()
    trainee = PlainTrainee(settings.model, keep_gradients=True)
    return {"rss_before_model_bytes": before, "losses": train(trainee, _batches(settings))}


def managed(options: dict[str, Any]) -> dict[str, Any]:
    """Train with ``device_bytes`` on DEVICE, the rest on DISK; count what the measured steps move."""
    settings = _settings(options)
    before = resident_bytes()
    trainee = ManagedTrainee(
        settings.model,
        device_bytes=options["device_bytes"],
        host_bytes=0,
        non_model_bytes=0,
        disk_dir=options["disk_dir"],
    )
    batches = _batches(settings)
    losses = train(trainee, batches[: settings.warmup_steps])
    start = trainee.model.stats()
    seconds = []
    for batch in batches[settings.warmup_steps :]:
        loss, elapsed = timed_step(trainee, batch)
        losses.append(loss)
        seconds.append(elapsed)
    end = trainee.model.stats()
    trainee.close()
    moved = {
        link: {key: end[link][key] - start[link][key] for key in ("bytes", "seconds")}
        for link in ("disk_read", "disk_write")
    }
    return {
        "rss_before_model_bytes": before,
        "losses": losses,
        "seconds": seconds,
        "stall_seconds": end["stall_seconds"] - start["stall_seconds"],
        "device_peak_bytes": end["device"]["peak_bytes"],
        "managed_model_data_bytes": end["model_data_bytes"],
        **moved,
    }


def _batches(settings: Settings) -> list[Any]:
    count = settings.warmup_steps + settings.measured_steps
    return make_batches(settings.model, count=count, batch=settings.batch, seq=settings.seq)


def _settings(options: dict[str, Any]) -> Settings:
    values = {name: options[name] for name in (field.name for field in dataclasses.fields(Settings))}
    return Settings(**{**values, "model": GPTConfig(**values["model"]), "shares": tuple(values["shares"])})


TASKS = {"plain": plain, "managed": managed}
