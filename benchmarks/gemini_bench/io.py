"""``gemini bench io``: AsyncFile against fio, DeepSpeed's async I/O and TensorNVMe, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini_bench import io_cases, io_engine
from gemini_bench.cases import choose, run_cases
from gemini_bench.io_settings import Settings
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session, Settings], CaseResult]] = MappingProxyType(
    {
        "direct": io_cases.direct,
        "memory": io_cases.memory,
        **{name: partial(io_engine.run, name) for name in io_engine.TASKS},
    }
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, settings: Settings, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    cases = {name: partial(_run, name, settings) for name in names}
    return run_cases("io", session, cases, command, install="fio")


def _run(name: str, settings: Settings, session: Session) -> CaseResult:
    return CASES[name](session, settings)
