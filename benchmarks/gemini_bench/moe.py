"""``gemini bench moe``: every case, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gemini_bench import moe_training
from gemini_bench.cases import choose, run_cases
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session], CaseResult]] = MappingProxyType({"training": moe_training.training})


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    return run_cases("moe", session, {name: CASES[name] for name in names}, command)


TASKS = {"training": moe_training.measure}
