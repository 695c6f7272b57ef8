"""``gemini bench programs``: every case, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gemini_bench import programs_import, programs_load, programs_loop, programs_resume
from gemini_bench.cases import choose, run_cases
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session], CaseResult]] = MappingProxyType(
    {
        "loop": programs_loop.run,
        "resume": programs_resume.run,
        "load": programs_load.run,
        "import": programs_import.run,
    }
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    return run_cases("programs", session, {name: CASES[name] for name in names}, command)
