"""The cases ``depth``, ``cpu`` and ``checksum``: what our engine does and costs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gemini_bench.cases import require_space
from gemini_bench.io_cases import own_files, own_name, run_task
from gemini_bench.io_own import OwnFile
from gemini_bench.io_settings import QUICK, Settings
from gemini_bench.io_turns import DIRECTIONS, READ, run_turns
from gemini_bench.paired import Spread, Timings, spread_row
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session

DEPTH_SHARE = 0.95
CALLS_PER_BATCH = 2.0
CPU_SECONDS_PER_GB = 0.05
PLAIN, CHECKED = "without checksums", "with CRC32C"
_MARGIN_BYTES = 200_000_000
_ROUNDS = 3  # processor time hardly drifts


# -- tasks ---------------------------------------------------------------------------------------


def depth_task(options: dict[str, Any]) -> dict[str, Any]:
    """Count what the engine does while a file is written and read twice."""
    settings, directory = Settings.from_options(options), Path(options["directory"])
    with ExitStack() as stack:
        files, absent = own_files(directory, settings, stack)
        found = {}
        for file in files:
            for _ in range(2):
                file.write()
                file.read()
            found[own_name(file)] = dict(file.file.stats())
        return {"stats": found, "default": own_name(files[0]), "depth": settings.depth, "absent": absent}


def cpu_task(options: dict[str, Any]) -> dict[str, Any]:
    """Take processor time over bytes, of the engine and of the whole process."""
    settings, directory = Settings.from_options(options), Path(options["directory"])
    with ExitStack() as stack:
        files, absent = own_files(directory, settings, stack)
        found = {}
        for file in files:
            file.write()
            passes = [_costs(file, settings) for _ in range(min(_ROUNDS, settings.repeats))]
            found[own_name(file)] = {
                direction: {
                    who: [one[direction][who] for one in passes] for who in ("engine", "process", "seconds")
                }
                for direction in DIRECTIONS
            }
        return {"costs": found, "default": own_name(files[0]), "absent": absent}


def checksum_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time two files of the default backend, one of them with checksums."""
    settings, directory = Settings.from_options(options), Path(options["directory"])
    with ExitStack() as stack:
        plain = stack.enter_context(OwnFile(directory, settings))
        checked = stack.enter_context(OwnFile(directory, settings, checksums=True))
        movers = [plain.mover(PLAIN), checked.mover(CHECKED)]
        found = run_turns(movers, settings.repeats, settings.size_bytes)
        costs = {name: _costs(file, settings) for name, file in ((PLAIN, plain), (CHECKED, checked))}
        return {**found, "costs": costs, "backend": plain.file.backend}


def _costs(file: OwnFile, settings: Settings) -> dict[str, dict[str, float]]:
    """Write and read once; return seconds of processor time per GB, and seconds."""
    found = {}
    gigabytes = settings.size_bytes / 1e9
    for direction in DIRECTIONS:
        engine, process = file.file.stats()["cpu_seconds"], time.process_time()
        elapsed = file.read() if direction == READ else file.write()
        found[direction] = {
            "engine": (file.file.stats()["cpu_seconds"] - engine) / gigabytes,
            "process": (time.process_time() - process) / gigabytes,
            "seconds": elapsed,
        }
    return found


# -- which figures -------------------------------------------------------------------------------


def depth_rows(found: dict[str, Any]) -> list[Row]:
    """Return depth and system calls per batch; targets are those of the default backend."""
    rows = []
    for name, stats in found["stats"].items():
        judged = name == found["default"]
        calls = stats["system_calls"] / max(1, stats["batches"])
        rows += [
            Row(
                f"{name}: mean requests at the device / {found['depth']} configured",
                stats["mean_depth"] / found["depth"],
                "x",
                DEPTH_SHARE if judged else None,
                at_least=True,
            ),
            Row(f"{name}: system calls per batch", calls, "calls", CALLS_PER_BATCH if judged else None),
            Row(f"{name}: system calls per request", stats["system_calls"] / stats["requests"], "calls"),
        ]
    return rows


def cpu_rows(found: dict[str, Any]) -> list[Row]:
    """Return seconds per GB, which is cores per GB/s; targets are those of the default backend.

    The kernel does the work of io_uring on whichever thread is at hand, so all of the process counts there.
    """
    rows: list[Row] = []
    for name, costs in found["costs"].items():
        for direction in DIRECTIONS:
            for who, what in (("engine", "the engine's threads"), ("process", "the whole process")):
                judged = name == found["default"] and (who == "engine" or name.endswith("uring"))
                rows.append(
                    spread_row(
                        f"{name}: {direction}, {what}",
                        Spread.of(costs[direction][who]),
                        "s/GB",
                        CPU_SECONDS_PER_GB if judged else None,
                    )
                )
    return rows


def checksum_rows(found: dict[str, Any]) -> list[Row]:
    """Return rates, their ratio, and processor time."""
    rows: list[Row] = []
    for direction in DIRECTIONS:
        times = Timings(found[direction])
        rows += [spread_row(f"{direction}, {name}", times.rate(name), "GB/s") for name in (PLAIN, CHECKED)]
        what = f"{direction}, rate {CHECKED} / {PLAIN}"
        rows.append(spread_row(what, times.share(CHECKED, PLAIN), "x"))
        rows += [
            Row(f"{direction}, {name}: processor time", found["costs"][name][direction]["process"], "s/GB")
            for name in (PLAIN, CHECKED)
        ]
    return rows


# -- the cases -----------------------------------------------------------------------------------

_ROWS = {"depth": depth_rows, "cpu": cpu_rows, "checksum": checksum_rows}
TASKS = {"depth": depth_task, "cpu": cpu_task, "checksum": checksum_task}


def run(case: str, session: Session, settings: Settings) -> CaseResult:
    """Measure one of the cases in a process of its own."""
    settings = QUICK if session.quick else settings
    need = 2 * settings.size_bytes + _MARGIN_BYTES
    require_space(case, need, session.disk_dir, "pass a smaller --size or another --dir")
    session.progress(f"{case}: {settings.size_bytes / 1e9:.1f} GB")
    found = run_task(f"io_engine.{case}", session, settings, session.disk_dir)
    return CaseResult(_ROWS[case](found), settings.to_options()["settings"], found)
