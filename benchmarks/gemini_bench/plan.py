"""``gemini bench plan``: every case, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini_bench import plan_predicted, plan_search
from gemini_bench.cases import choose, run_cases
from gemini_bench.plan_predicted import Settings
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session, Settings], CaseResult]] = MappingProxyType(
    {
        "predicted": plan_predicted.run,
        "search": lambda session, _settings: plan_search.planning(session),
        "architectures": lambda session, _settings: plan_search.architectures(session),
    }
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, settings: Settings, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    cases = {name: partial(_run, name, settings) for name in names}
    return run_cases("plan", session, cases, command)


def _run(name: str, settings: Settings, session: Session) -> CaseResult:
    return CASES[name](session, settings)
