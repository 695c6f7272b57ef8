"""The cases ``direct`` and ``memory``: ours against everyone who moves the same bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, GeminiError
from gemini.system.device import free_memory_bytes
from gemini_bench.cases import require_space
from gemini_bench.io_fio import INSTALL, Job, engines, fio_mover, shared_by, version
from gemini_bench.io_own import OwnFile
from gemini_bench.io_peers import DEEPSPEED, TENSORNVME, TensorNvmeFile, deepspeed_mover, try_peer
from gemini_bench.io_settings import QUICK, Settings
from gemini_bench.io_turns import DIRECTIONS, Mover, run_turns
from gemini_bench.paired import AbsentRow, Timings, UnmeasuredRow, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

SHARE = 0.95
FIO = "fio"
MEMORY_DIRECTORY = Path("/dev/shm")
_BACKENDS = ("uring", "threads")
_MARGIN_BYTES = 200_000_000


# -- what competes -------------------------------------------------------------------------------


def direct_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time O_DIRECT writing and reading on a disk, everyone who can in turn."""
    settings, directory = Settings.from_options(options), Path(options["directory"])
    with ExitStack() as stack:
        files, absent = own_files(directory, settings, stack)
        first = files[0]
        jobs = [Job(engine) for engine in ("io_uring", "libaio") if engine in engines()]
        movers = [
            *(file.mover(own_name(file)) for file in files),
            *fio_movers(jobs, first, settings, absent),
            *try_peer(
                DEEPSPEED,
                lambda: deepspeed_mover(f"/proc/self/fd/{first.descriptor()}", settings),
                absent,
            ),
            *try_peer(TENSORNVME, lambda: TensorNvmeFile(directory, settings).mover(), absent),
        ]
        return {**run_turns(movers, settings.repeats, settings.size_bytes), **_about(files, absent)}


def memory_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time writing and reading on tmpfs, where every engine copies memory."""
    settings, directory = Settings.from_options(options), Path(options["directory"])
    with ExitStack() as stack:
        files, absent = own_files(directory, settings, stack)
        counts = {shared_by(most, settings) for most in (1, len(os.sched_getaffinity(0)), settings.depth)}
        jobs = [Job("psync", count, direct=False) for count in sorted(counts)]
        jobs.append(Job("io_uring", direct=False))
        movers = [
            *(file.mover(own_name(file)) for file in files),
            *fio_movers([job for job in jobs if job.engine in engines()], files[0], settings, absent),
        ]
        return {**run_turns(movers, settings.repeats, settings.size_bytes), **_about(files, absent)}


def own_files(directory: Path, settings: Settings, stack: ExitStack) -> tuple[list[OwnFile], dict[str, str]]:
    """Return a file per backend that works here, the default one first, and why others do not."""
    default = stack.enter_context(OwnFile(directory, settings))
    files, absent = [default], {}
    for backend in _BACKENDS:
        if backend != default.file.backend:
            try:
                files.append(stack.enter_context(OwnFile(directory, settings, backend=backend)))
            except GeminiError as error:
                absent[f"ours, {backend}"] = f"does not work here: {error}"
    return files, absent


def own_name(file: OwnFile) -> str:
    """Return what one of our files is called."""
    return f"ours, {file.file.backend}"


def fio_movers(jobs: Sequence[Job], file: OwnFile, settings: Settings, absent: dict[str, str]) -> list[Mover]:
    """Return fio's contenders on the same file as ours."""
    if not jobs:
        absent[FIO] = INSTALL
    return [fio_mover(job, file.descriptor(), settings) for job in jobs]


def _about(files: Sequence[OwnFile], absent: Mapping[str, str]) -> dict[str, Any]:
    return {
        "default": own_name(files[0]),
        "direct": files[0].file.direct,
        "registered": {own_name(file): file.registered for file in files},
        "absent": dict(absent),
        "versions": {FIO: version()} if engines() else {},
    }


# -- which figures -------------------------------------------------------------------------------


def rows(found: Mapping[str, Any]) -> list[Row]:
    """Return rates, and our default's rate over that of the best peer, each way."""
    result: list[Row] = []
    for direction in DIRECTIONS:
        times, default = Timings(found[direction]), found["default"]
        names = list(found[direction]["seconds"])
        peers = [name for name in names if not name.startswith("ours")]
        result += [spread_row(f"{direction}: {name}", times.rate(name), "GB/s") for name in names]
        result += [
            spread_row(f"{direction}: {default} / {peer}", times.share(default, peer), "x") for peer in peers
        ]
        if peers:
            best = times.fastest(peers)
            what = f"{direction}: {default} (the default) / the best peer ({best})"
            result.append(spread_row(what, times.share(default, best), "x", SHARE, at_least=True))
        else:
            what = f"{direction}: {default} (the default) / the best peer: not measured, there is none"
            result.append(UnmeasuredRow(what, math.nan, "x", SHARE, at_least=True, reason="fio " + INSTALL))
    result += [AbsentRow(f"{name} {reason}") for name, reason in found["absent"].items()]
    return result


# -- the cases -----------------------------------------------------------------------------------


def direct(session: Session, settings: Settings) -> CaseResult:
    """Measure on the disk. The page cache has no part in it, but for TensorNVMe."""
    settings = QUICK if session.quick else settings
    _require_disk("direct", session, settings, copies=3)
    session.progress(f"direct: {settings.size_bytes / 1e9:.1f} GB by everyone, {settings.repeats} rounds")
    found = run_task("io_cases.direct", session, settings, session.disk_dir)
    if not found["direct"]:
        raise ConfigError(
            f"{session.disk_dir} is on a file system without O_DIRECT: its page cache would be measured; "
            "pass another --dir"
        )
    return CaseResult(rows(found), settings.to_options()["settings"], found)


def memory(session: Session, settings: Settings) -> CaseResult:
    """Measure on tmpfs, where there is no disk whose noise could hide a difference.

    Raises:
        ConfigError: there is no tmpfs, or too little free memory for two files.
    """
    settings = (QUICK if session.quick else settings).on_tmpfs()
    if not MEMORY_DIRECTORY.is_dir():
        raise ConfigError(f"{MEMORY_DIRECTORY} does not exist; leave the case 'memory' out with --only")
    need = 2 * settings.size_bytes + _MARGIN_BYTES
    way_out = "pass a smaller --size or leave this case out with --only"
    require_space("memory", need, MEMORY_DIRECTORY, way_out)
    if need > free_memory_bytes():
        raise ConfigError(f"case 'memory' needs {need / 1e9:.1f} GB of free memory; {way_out}")
    session.progress(f"memory: {settings.size_bytes / 1e9:.1f} GB on {MEMORY_DIRECTORY}")
    found = run_task("io_cases.memory", session, settings, MEMORY_DIRECTORY)
    return CaseResult(rows(found), settings.to_options()["settings"], found)


def run_task(task: str, session: Session, settings: Settings, directory: Path) -> dict[str, Any]:
    """Run one task in a process of its own. Raises WorkerFailed."""
    options = settings.to_options(directory=os.fspath(directory))
    return session.run(task, options, sample_seconds=TIMING_SAMPLE_SECONDS).data()


def _require_disk(case: str, session: Session, settings: Settings, *, copies: int) -> None:
    need = copies * settings.size_bytes + _MARGIN_BYTES
    require_space(case, need, session.disk_dir, "pass a smaller --size or another --dir")


TASKS = {"direct": direct_task, "memory": memory_task}
