"""``gemini bench runtime``: every case, one record."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gemini.bench import endurance, largest, offload, preop, resident
from gemini.bench.record import environment
from gemini.bench.session import CaseResult, Session
from gemini.errors import ConfigError, GeminiError

CASES: Mapping[str, Callable[[Session], CaseResult]] = MappingProxyType(
    {
        "resident": resident.run,
        "offload": offload.run,
        "preop": preop.run,
        "largest": largest.run,
        "endurance": endurance.run,
    }
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise ConfigError(f"unknown case {unknown[0]!r}; choose from {', '.join(CASES)}")
    return [name for name in CASES if names is None or name in names]


def run(session: Session, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on.

    Every case gets a directory of its own within ``session.disk_dir``, removed when it ends.
    """
    record: dict[str, Any] = {
        "benchmark": "runtime",
        "quick": session.quick,
        "environment": environment(command),
    }
    cases: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="gemini-bench-", dir=session.disk_dir) as directory:
            cases[name] = _run_case(CASES[name], replace(session, disk_dir=Path(directory)))
    return {**record, "cases": cases, "failed": _failed(cases), "missed": _missed(cases)}


def _run_case(case: Callable[[Session], CaseResult], session: Session) -> dict[str, Any]:
    try:
        result = case(session)
    except GeminiError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "rows": [row.to_dict() for row in result.rows],
        "settings": result.settings,
        "measured": result.measured,
    }


def _failed(cases: Mapping[str, Any]) -> list[str]:
    return [name for name, case in cases.items() if "error" in case]


def _missed(cases: Mapping[str, Any]) -> list[str]:
    """Return the figures that did not reach their target."""
    return [
        f"{name}: {row['what']}"
        for name, case in cases.items()
        for row in case.get("rows", ())
        if row["met"] is False
    ]
