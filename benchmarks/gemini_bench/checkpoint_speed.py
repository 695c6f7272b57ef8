"""Cases ``speed`` and ``async``: saving and loading against the disk, and the cost of saves for training."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini import checkpoint
from gemini.model.ddp import GeminiDDP
from gemini.offload.async_file import direct_memory
from gemini.optim import GeminiAdamOptimizer
from gemini.runtime import init_on
from gemini_bench.cases import require_space
from gemini_bench.nvme_bare import leave_page_cache
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

_MIB = 2**20
_BLOCK_BYTES = 4 * _MIB
SPEED_SHARE = 0.8
ASYNC_OVERHEAD = 0.03


@dataclass(frozen=True)
class Settings:
    """A stack of ``layers`` square layers; its checkpoint has 12 bytes per parameter. ``every``: steps from
    one save to the next. ``batch`` rows make the computing of a step."""

    hidden: int = 2048
    layers: int = 20
    batch: int = 512
    repeats: int = 5
    every: int = 10

    @property
    def checkpoint_bytes(self) -> int:
        return 12 * self.layers * self.hidden**2


QUICK = Settings(hidden=64, layers=4, batch=8, repeats=1, every=3)


def speed(session: Session) -> CaseResult:
    """Save and load 1 GB; write and read as much in the same directory with O_DIRECT, in turn."""
    settings = _settings(session, "speed", 4)
    found = session.run("checkpoint_speed.speed", _options(settings, session), sample_seconds=0.1).data()
    median = {name: statistics.median(seconds) for name, seconds in found.items()}
    gigabytes = settings.checkpoint_bytes / 1e9
    written, read = median["write"] / median["save"], median["read"] / median["load"]
    rows = [
        Row("disk: a file written and synced, the one before removed", gigabytes / median["write"], "GB/s"),
        Row("save, the one before removed", gigabytes / median["save"], "GB/s"),
        Row("save / disk", written, "share", SPEED_SHARE, at_least=True),
        Row("disk: a file read", gigabytes / median["read"], "GB/s"),
        Row("load", gigabytes / median["load"], "GB/s"),
        Row("load / disk", read, "share", SPEED_SHARE, at_least=True),
    ]
    return CaseResult(rows, dataclasses.asdict(settings), found)


def overhead(session: Session) -> CaseResult:
    """Train with no save, with synchronous and with asynchronous ones, in turn; compare within each turn."""
    settings = _settings(session, "async", 3)
    found = session.run(
        "checkpoint_speed.overhead", _options(settings, session), sample_seconds=TIMING_SAMPLE_SECONDS
    ).data()
    plain = found["plain"]
    rows = [spread_row("step without a save", Spread.of([one / settings.every for one in plain]), "s")]
    for name in ("save", "save_async"):
        turns = list(zip(found[name], plain, strict=True))
        still = Spread.of([saving - without for saving, without in turns])
        share = Spread.of([saving / without - 1 for saving, without in turns])
        limit = ASYNC_OVERHEAD if name == "save_async" else None
        rows += [
            spread_row(f"{name}(): training stands still or is slower by", still, "s per save"),
            spread_row(f"{name}() every {settings.every} steps: overhead", share, "share", limit),
        ]
    return CaseResult(rows, dataclasses.asdict(settings), found)


def _settings(session: Session, case: str, copies: int) -> Settings:
    settings = QUICK if session.quick else Settings()
    need = copies * settings.checkpoint_bytes
    require_space(case, need, session.disk_dir, "name another --disk-dir")
    session.progress(f"{case}: a checkpoint of {settings.checkpoint_bytes / 1e9:.2g} GB")
    return settings


def _options(settings: Settings, session: Session) -> dict[str, Any]:
    return {**dataclasses.asdict(settings), "disk_dir": os.fspath(session.disk_dir)}


def _build(options: dict[str, Any]) -> tuple[Settings, Path, GeminiDDP, GeminiAdamOptimizer]:
    place = Path(options.pop("disk_dir"))
    settings = Settings(**options)
    torch.manual_seed(0)
    with init_on("meta"):
        layers = (nn.Linear(settings.hidden, settings.hidden, bias=False) for _ in range(settings.layers))
        module = nn.Sequential(*layers)
    model = GeminiDDP(module, "cpu")
    return settings, place, model, GeminiAdamOptimizer(model, lr=1e-4)


def _train(settings: Settings, model: GeminiDDP, optimizer: GeminiAdamOptimizer) -> None:
    x = torch.ones(settings.batch, settings.hidden)
    for _ in range(settings.every):
        optimizer.backward(model(x).mean())
        optimizer.step()


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _measure_speed(options: dict[str, Any]) -> dict[str, Any]:
    settings, place, model, optimizer = _build(options)
    _train(dataclasses.replace(settings, batch=1, every=2), model, optimizer)
    found: dict[str, list[float]] = {name: [] for name in ("write", "save", "read", "load")}
    plain = place / "plain"
    _write_plain(plain, settings.checkpoint_bytes)
    checkpoint.save(place / "run", model, optimizer, keep=1)
    for _ in range(settings.repeats):
        found["write"].append(_seconds(lambda: _replace_plain(plain, settings.checkpoint_bytes)))
        found["save"].append(_seconds(lambda: checkpoint.save(place / "run", model, optimizer, keep=1)))
        path = checkpoint.latest(place / "run")
        for file in (plain, *path.iterdir()):
            leave_page_cache(file)
        found["read"].append(_seconds(lambda: _read_plain(plain)))
        found["load"].append(_seconds(lambda: checkpoint.load(place / "run", model, optimizer)))
    model.close()
    return found


def _measure_overhead(options: dict[str, Any]) -> dict[str, Any]:
    settings, place, model, optimizer = _build(options)
    _train(settings, model, optimizer)
    saves: dict[str, Callable[[], object]] = {
        "plain": lambda: None,
        "save": lambda: checkpoint.save(place / "run", model, optimizer, keep=1),
        "save_async": lambda: checkpoint.save_async(place / "run", model, optimizer, keep=1),
    }
    found: dict[str, list[float]] = {name: [] for name in saves}
    for _ in range(settings.repeats):
        for name, save in saves.items():

            def period(save: Callable[[], object] = save) -> None:
                save()
                _train(settings, model, optimizer)

            found[name].append(_seconds(period))
            model.manager.snapshot.close(finish=True)
    model.close()
    return found


def _replace_plain(path: Path, num_bytes: int) -> None:
    newer = path.with_suffix(".new")
    _write_plain(newer, num_bytes)
    path.unlink()
    newer.rename(path)


def _write_plain(path: Path, num_bytes: int) -> None:
    """Write zeros, whole blocks of 4 KiB."""
    block = direct_memory(_BLOCK_BYTES).numpy().data
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        for offset in range(0, num_bytes, _BLOCK_BYTES):
            os.pwrite(descriptor, block[: num_bytes - offset], offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_plain(path: Path) -> None:
    block = direct_memory(_BLOCK_BYTES).numpy().data
    descriptor, offset = _open(path, os.O_RDONLY), 0
    try:
        while count := os.preadv(descriptor, [block], offset):
            offset += count
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """Open a file past the page cache, if its file system supports that."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


TASKS = {"speed": _measure_speed, "overhead": _measure_overhead}
