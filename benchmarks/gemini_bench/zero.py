"""``gemini bench zero``: every case, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini_bench import zero_step, zero_volume
from gemini_bench.cases import choose, run_cases
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session, int], CaseResult]] = MappingProxyType(
    {"fsdp2": zero_step.run, "volume": zero_volume.run}
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, rounds: int, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    cases = {name: partial(_run, name, rounds) for name in names}
    return run_cases("zero", session, cases, command)


def _run(name: str, rounds: int, session: Session) -> CaseResult:
    return CASES[name](session, rounds)
