"""Case ``endurance``: 2,000 steps under a tight budget take no more memory, files or disk than 200."""

from __future__ import annotations

import dataclasses
import gc
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gemini.jobs.gpt.model import GPTConfig
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import ManagedTrainee, make_batches, model_data_bytes
from gemini_bench.watch import resident_bytes

RSS_GROWTH_BYTES = 1 << 20
_STANDARD_ERROR = 2  # the watch redirects the standard streams to files of its own


SMALL = GPTConfig(layers=4, hidden=64, heads=2, seq=32)


@dataclass(frozen=True)
class Settings:
    """The settings of the run, and the steps after which it is measured. ``share`` is the part of the model
    data that DEVICE may hold.
    """

    model: GPTConfig = SMALL
    batch: int = 2
    seq: int = 32
    share: float = 0.35
    checkpoints: tuple[int, ...] = (200, 1000, 2000)


QUICK = Settings(checkpoints=(10, 20, 40))


def run(session: Session) -> CaseResult:
    """Train in one process; compare what it holds at the last checkpoint with what it held at the first."""
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    session.progress(f"endurance: {settings.checkpoints[-1]} steps under a tight budget")
    found = session.run(
        "endurance.steps",
        {**options, "disk_dir": os.fspath(session.disk_dir)},
        sample_seconds=TIMING_SAMPLE_SECONDS,
    ).data()
    first, last = found["readings"][0], found["readings"][-1]
    grown = {name: last[name] - first[name] for name in first}
    since = f"steps {first['step']} to {last['step']}"
    rows = [
        Row(f"resident memory, growth, {since}", grown["rss_bytes"], "bytes", RSS_GROWTH_BYTES),
        Row(f"open files, growth, {since}", grown["open_files"], "files", 0),
        Row(f"size of own files, growth, {since}", grown["file_bytes"], "bytes", 0),
        Row(f"disk space of own files, growth, {since}", grown["file_blocks_bytes"], "bytes", 0),
        Row(f"free space of the file system, change, {since}", grown["filesystem_free_bytes"], "bytes"),
        Row("written to DISK over all steps", found["disk_write_bytes"], "bytes"),
    ]
    return CaseResult(rows, options, found)


def steps(options: dict[str, Any]) -> dict[str, Any]:
    """Train to the last checkpoint and read what the process holds at each."""
    values = {name: options[name] for name in (field.name for field in dataclasses.fields(Settings))}
    settings = Settings(**{**values, "model": GPTConfig(**values["model"])})
    disk_dir = options["disk_dir"]
    budget = int(settings.share * model_data_bytes(settings.model))
    trainee = ManagedTrainee(
        settings.model, device_bytes=budget, host_bytes=0, non_model_bytes=0, disk_dir=disk_dir
    )
    batches = make_batches(settings.model, count=16, batch=settings.batch, seq=settings.seq)
    readings = []
    for step in range(1, settings.checkpoints[-1] + 1):
        trainee.step(batches[step % len(batches)])
        if step in settings.checkpoints:
            readings.append({"step": step, **reading(Path(disk_dir))})
    return {
        "device_bytes": budget,
        "readings": readings,
        "disk_write_bytes": trainee.model.stats()["disk_write"]["bytes"],
    }


def reading(directory: Path) -> dict[str, int]:
    """Return the resources that this process holds now: resident memory, open files, and the space of its
    unlinked files. These are the open files without a name on the device of ``directory``.
    """
    gc.collect()
    device = directory.stat().st_dev
    descriptors = [entry.name for entry in Path("/proc/self/fd").iterdir()]
    sizes = [_own_file(int(number), device) for number in descriptors if int(number) > _STANDARD_ERROR]
    return {
        "rss_bytes": resident_bytes(),
        "open_files": len(descriptors),
        "file_bytes": sum(size for size, _ in sizes),
        "file_blocks_bytes": sum(blocks for _, blocks in sizes),
        "filesystem_free_bytes": psutil.disk_usage(os.fspath(directory)).free,
    }


def _own_file(descriptor: int, device: int) -> tuple[int, int]:
    """Return size and allocated bytes of an open file without a name, (0, 0) for anything else."""
    try:
        found = os.fstat(descriptor)
    except OSError:  # the descriptor of the listing itself
        return 0, 0
    if not stat.S_ISREG(found.st_mode) or found.st_dev != device or found.st_nlink > 0:
        return 0, 0
    return found.st_size, found.st_blocks * 512


TASKS = {"steps": steps}
