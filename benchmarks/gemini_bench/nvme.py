"""``gemini bench nvme``: training with states on disk, against what computing and the disk allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini_bench import nvme_alldisk, nvme_managed, nvme_plain, nvme_stream
from gemini_bench.cases import choose, run_cases
from gemini_bench.nvme_settings import Settings
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session, Settings], CaseResult]] = MappingProxyType(
    {
        "plain": nvme_plain.run,
        "managed": nvme_managed.run,
        "alldisk": nvme_alldisk.run,
        "stream": nvme_stream.stream,
        "memory": nvme_stream.memory,
    }
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(session: Session, settings: Settings, names: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    cases = {name: partial(_run, name, settings) for name in names}
    return run_cases("nvme", session, cases, command, install="deepspeed")


def _run(name: str, settings: Settings, session: Session) -> CaseResult:
    return CASES[name](session, settings)
