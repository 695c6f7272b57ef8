"""Cases ``largest`` and ``compact``: the largest model under one real limit on resident memory, plain against
managed.

The watch kills a process whose resident memory exceeds the limit. Plain torch, in fp32, climbs a fixed
ladder of sizes; the managed model must train with a multiple of the parameters of the highest rung that plain
torch reached. In ``compact`` it trains in 8 bytes a parameter: bf16 weights with remainders and int8 moments.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from gemini.errors import ConfigError, StateError
from gemini.jobs.gpt.model import GPTConfig, num_parameters
from gemini_bench.nvme_bare import BareDisk
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session
from gemini_bench.trainee import (
    ManagedTrainee,
    PlainTrainee,
    make_batches,
    model_data_bytes,
    timed_step,
    train,
)
from gemini_bench.watch import Ending

TARGET_RATIO = 20.0
COMPACT_RATIO = 120.0
BUDGET_RULE = (
    "device_bytes = half of what the limit leaves above a bare process and 150 MB; non_model_bytes = 0"
)
LADDER_RULE = (
    "GPT, byte vocabulary, 64 positions, heads of 64, activation checkpointing; for p parameters hidden is "
    "64 * round(sqrt(p / 192) / 64), from 64 to 1024, and layers round(p / (12 * hidden ** 2)); p grows by "
    "the same factor from rung to rung"
)
_OVERHEAD_BYTES = 150_000_000
_HEAD = 64
_MAX_HIDDEN = 1024
_ROUNDS_UP = 1.02  # layers are whole: aim a little higher than the ratio
_DISK_SLACK = 1.10
_FLOOR_BYTES = 4 << 30
_FLOOR_BATCH = 16 << 20


@dataclass(frozen=True)
class Settings:
    """What is measured. The ladder's smallest and largest rung are in parameters, roughly."""

    limit_bytes: int = 1 << 30
    ratio: float = TARGET_RATIO
    smallest: int = 1_000_000
    largest: int = 400_000_000
    growth: float = 1.06
    plain_steps: int = 2
    managed_steps: int = 3
    compact: bool = False


QUICK = Settings(limit_bytes=448 << 20, ratio=2.0, growth=1.5)
COMPACT = Settings(limit_bytes=640 << 20, ratio=COMPACT_RATIO, compact=True)


def rung(parameters: float) -> GPTConfig:
    """Return the GPT with about ``parameters`` parameters, wider first, then deeper."""
    hidden = min(_MAX_HIDDEN, _HEAD * max(1, round(math.sqrt(parameters / 192) / _HEAD)))
    layers = max(1, round(parameters / (12 * hidden * hidden)))
    return GPTConfig(layers=layers, hidden=hidden, heads=hidden // _HEAD, seq=64, checkpoint_activations=True)


def ladder(settings: Settings) -> list[GPTConfig]:
    """Return the rungs, by number of parameters, each once."""
    count = math.ceil(math.log(settings.largest / settings.smallest) / math.log(settings.growth)) + 1
    rungs = {rung(settings.smallest * settings.growth**index) for index in range(count)}
    return sorted(rungs, key=num_parameters)


def highest(count: int, reaches: Callable[[int], bool]) -> int:
    """Return the largest index below ``count`` that the monotone ``reaches`` accepts, by bisection, or -1."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        if reaches(middle):
            low = middle
        else:
            high = middle
    return low


def run(session: Session) -> CaseResult:
    """Find plain torch's largest model under the limit; train one ``ratio`` times larger under it."""
    return _run(session, QUICK if session.quick else Settings())


def run_compact(session: Session) -> CaseResult:
    """Do the same with 8 bytes a parameter."""
    return _run(session, dataclasses.replace(QUICK, compact=True) if session.quick else COMPACT)


def _run(session: Session, settings: Settings) -> CaseResult:
    if session.limit_bytes is not None:
        settings = dataclasses.replace(settings, limit_bytes=session.limit_bytes)
    bare = session.bare_bytes()
    budget = (settings.limit_bytes - bare - _OVERHEAD_BYTES) // 2
    if budget <= 0:
        raise ConfigError(
            f"the limit of {settings.limit_bytes} bytes leaves nothing above the {bare} that importing torch "
            f"takes and {_OVERHEAD_BYTES} for the runtime; raise it"
        )
    attempts: list[dict[str, Any]] = []
    rungs = ladder(settings)
    reached = highest(len(rungs), lambda index: _plain_fits(session, settings, rungs[index], attempts))
    if not 0 <= reached < len(rungs) - 1:
        raise StateError(
            f"no rung, or every rung, of the ladder fits {settings.limit_bytes} bytes; choose another limit"
        )
    plain = rungs[reached]
    target = rung(_ROUNDS_UP * settings.ratio * num_parameters(plain))
    found = _train_managed(session, settings, target, budget)
    ratio = num_parameters(target) / num_parameters(plain)
    measured = {
        "ladder_rule": LADDER_RULE,
        "budget_rule": BUDGET_RULE,
        "bare_rss_bytes": bare,
        "plain_attempts": attempts,
        "plain_model": dataclasses.asdict(plain),
        "plain_parameters": num_parameters(plain),
        "next_rung_parameters": num_parameters(rungs[reached + 1]),
        "managed_model": dataclasses.asdict(target),
        "managed_parameters": num_parameters(target),
        "ratio": ratio,
        "managed": found,
    }
    if settings.compact:
        measured["disk_floor"] = session.run("largest.floor", _floor_options(session, found)).data()
    return CaseResult(_rows(settings, measured), dataclasses.asdict(settings), measured)


def _rows(settings: Settings, measured: dict[str, Any]) -> list[Row]:
    found = measured["managed"]
    rows = [
        Row("limit on resident memory", settings.limit_bytes, "bytes"),
        Row("plain torch, largest that trains", measured["plain_parameters"], "parameters"),
        Row("managed, trained", measured["managed_parameters"], "parameters"),
        Row("managed / plain", measured["ratio"], "x", settings.ratio, at_least=True),
        Row("managed, peak resident memory", found["peak_rss_bytes"], "bytes", settings.limit_bytes),
        Row("managed, last step", found["seconds"][-1], "s"),
        Row("managed, first loss", found["losses"][0], "nats"),
        Row("managed, last loss, on the same batch", found["losses"][-1], "nats", found["losses"][0]),
        Row("managed, most on disk", found["disk_peak_bytes"], "bytes"),
    ]
    if settings.compact:
        step = statistics.median(found["seconds"][1:])
        floor = found["step_bytes"] / measured["disk_floor"]["bytes_per_second"]
        rows += [
            Row("managed, model data", found["model_data_bytes"] / measured["managed_parameters"], "B/param"),
            Row("managed, read and written per step", found["step_bytes"], "bytes"),
            Row("the bare disk, for as many bytes", floor, "s"),
            Row("managed, median step / that floor", step / floor, "x"),
        ]
    return rows


def _floor_options(session: Session, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "disk_dir": os.fspath(session.disk_dir),
        "file_bytes": min(found["disk_peak_bytes"], _FLOOR_BYTES),
    }


def _plain_fits(
    session: Session, settings: Settings, model: GPTConfig, attempts: list[dict[str, Any]]
) -> bool:
    """Say whether plain torch trains ``model`` without being killed; remember the attempt."""
    parameters = num_parameters(model)
    session.progress(f"largest: plain torch, {parameters:,} parameters")
    options = {"model": dataclasses.asdict(model), "steps": settings.plain_steps}
    worker = session.run("largest.plain", options, limit_bytes=settings.limit_bytes)
    ending = worker.watched.ending
    attempts.append(
        {"parameters": parameters, "ending": ending.value, "peak_rss_bytes": worker.peak_rss_bytes}
    )
    if ending is Ending.OVER_LIMIT:
        return False
    worker.data()
    return True


def _train_managed(session: Session, settings: Settings, model: GPTConfig, budget: int) -> dict[str, Any]:
    """Train ``model`` under the limit with ``budget`` bytes of DEVICE.

    Raises:
        ConfigError: the disk has too little room; nothing was written.
        WorkerFailed: it was killed over the limit, or failed.
        StateError: a loss is not finite, or never changes.
    """
    need, free = (
        int(_DISK_SLACK * model_data_bytes(model, compact=settings.compact)),
        psutil.disk_usage(os.fspath(session.disk_dir)).free,
    )
    if need > free:
        raise ConfigError(
            f"the model of {num_parameters(model):,} parameters needs {need} bytes of disk; {free} are free"
        )
    session.progress(f"largest: managed, {num_parameters(model):,} parameters, {budget} bytes on DEVICE")
    options = {
        "model": dataclasses.asdict(model),
        "steps": settings.managed_steps,
        "device_bytes": budget,
        "disk_dir": os.fspath(session.disk_dir),
        "compact": settings.compact,
    }
    worker = session.run("largest.managed", options, limit_bytes=settings.limit_bytes)
    found = worker.data()
    losses = found["losses"]
    if not all(math.isfinite(loss) for loss in losses) or len(set(losses)) == 1:
        raise StateError(f"the managed model does not learn: losses {losses}")
    return {**found, "device_bytes": budget, "peak_rss_bytes": worker.peak_rss_bytes}


def plain(options: dict[str, Any]) -> dict[str, Any]:
    """Train the model that ``options`` describe with everything resident."""
    config = GPTConfig(**options["model"])
    batch = make_batches(config, count=1, batch=1, seq=config.seq)[0]
    return {"losses": train(PlainTrainee(config), [batch] * options["steps"])}


def managed(options: dict[str, Any]) -> dict[str, Any]:
    """Train the model that ``options`` describe under its budget, on one batch over and over."""
    config = GPTConfig(**options["model"])
    batch = make_batches(config, count=1, batch=1, seq=config.seq)[0]
    trainee = ManagedTrainee(
        config,
        compact=options["compact"],
        device_bytes=options["device_bytes"],
        host_bytes=0,
        non_model_bytes=0,
        disk_dir=options["disk_dir"],
    )
    losses, seconds, moved = [], [], [0]
    for _ in range(options["steps"]):
        loss, took = timed_step(trainee, batch)
        losses.append(loss)
        seconds.append(took)
        stats = trainee.model.stats()
        moved.append(stats["disk_read"]["bytes"] + stats["disk_write"]["bytes"])
    trainee.close()
    return {
        "losses": losses,
        "seconds": seconds,
        "stall_seconds": stats["stall_seconds"],
        "model_data_bytes": stats["model_data_bytes"],
        "step_bytes": moved[-1] - moved[-2],
        "disk_budget_bytes": stats["disk"]["budget_bytes"],
        "disk_peak_bytes": stats["disk"]["peak_bytes"],
        "disk_read": stats["disk_read"],
        "disk_write": stats["disk_write"],
    }


def floor(options: dict[str, Any]) -> dict[str, Any]:
    """Read every byte of a new file and write it back, three times; no computing."""
    disk = BareDisk.of_new_file(options["disk_dir"], options["file_bytes"], _FLOOR_BATCH, 8 * _FLOOR_BATCH)
    try:
        seconds = [disk.run() for _ in range(3)]
    finally:
        disk.close()
    return {"seconds": seconds, "bytes_per_second": 2 * disk.nbytes / statistics.median(seconds)}


TASKS = {"plain": plain, "managed": managed, "floor": floor}
