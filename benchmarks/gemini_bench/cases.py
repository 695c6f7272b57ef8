"""The cases of a benchmark: the choice of cases, one record of all, and disk space to run them in."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemini.errors import ConfigError, GeminiError
from gemini.system.files import io_errors
from gemini_bench.record import environment
from gemini_bench.session import CaseResult, Session

Case = Callable[[Session], CaseResult]


def choose(cases: Mapping[str, object], names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None chooses all. Raises ConfigError for an unknown
    name.
    """
    unknown = [name for name in names or () if name not in cases]
    if unknown:
        raise ConfigError(f"unknown case {unknown[0]!r}; choose from {', '.join(cases)}")
    return [name for name in cases if names is None or name in names]


def run_cases(
    benchmark: str, session: Session, cases: Mapping[str, Case], command: Sequence[str], *, install: str = ""
) -> dict[str, Any]:
    """Run every case and return one plain dict; a case that fails leaves its error, the others go on.

    Every case gets a directory of its own within ``session.disk_dir``, removed when it ends. ``install``:
    what the targets need that could not be measured. What is known so far goes to ``session.record`` after
    each case: what ends the process does not take it along.
    """
    record: dict[str, Any] = {
        "benchmark": benchmark,
        "quick": session.quick,
        "environment": environment(command),
        "disk": _disk(session.disk_dir),
    }
    found: dict[str, Any] = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory(prefix="gemini-bench-", dir=session.disk_dir) as directory:
            found[name] = run_case(case, replace(session, disk_dir=Path(directory)))
        left = [name for name in cases if name not in found]
        if session.record is not None and left:
            write_record({**record, "cases": found, **verdicts(found), "not_run": left}, session.record)
    return {**record, "cases": found, **verdicts(found), "install": install}


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON. Raises IoError."""
    with io_errors("write the record", path):
        path.write_text(json.dumps(record, indent=2) + "\n")


def verdicts(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the cases that ``failed``, and the figures that ``missed`` a target or were ``not_measured``."""
    rows = [(name, row) for name, case in found.items() for row in case.get("rows", ())]
    return {
        "failed": [name for name, case in found.items() if "error" in case],
        "missed": [f"{name}: {row['what']}" for name, row in rows if row["met"] is False],
        "not_measured": [f"{name}: {row['what']}" for name, row in rows if "not_measured" in row],
    }


def require_space(case: str, need_bytes: int, directory: Path, way_out: str) -> None:
    """Raise ConfigError with the numbers if the files of a case do not fit on a directory's file system."""
    free = shutil.disk_usage(directory).free
    if need_bytes > free:
        raise ConfigError(
            f"case {case!r} needs {need_bytes / 1e9:.1f} GB in {directory} and {free / 1e9:.1f} GB are free; "
            f"{way_out}"
        )


def run_case(case: Case, session: Session) -> dict[str, Any]:
    """Run one case and return its rows, settings and readings as plain data, or its error."""
    try:
        result = case(session)
    except GeminiError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "rows": [row.to_dict() for row in result.rows],
        "settings": result.settings,
        "measured": result.measured,
    }


def _disk(directory: Path) -> dict[str, Any]:
    """Return the file system of a directory, as the kernel lists it; None if it cannot be read.

    Not the directory: it says something about whose machine it is, not about the figures.
    """
    device, kind = None, None
    best = -1
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        source, point, found, *_ = line.split(" ")
        if os.fspath(directory.resolve()).startswith(point) and len(point) > best:
            device, kind, best = source, found, len(point)
    return {"device": device, "file_system": kind}
