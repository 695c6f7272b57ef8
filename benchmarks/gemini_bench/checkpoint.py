"""``gemini bench checkpoint``: every case, one record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini_bench import checkpoint_kills, checkpoint_speed
from gemini_bench.cases import choose, run_cases
from gemini_bench.session import CaseResult, Session

CASES: Mapping[str, Callable[[Session], CaseResult]] = MappingProxyType(
    {
        "kills": checkpoint_kills.run,
        "speed": checkpoint_speed.speed,
        "async": checkpoint_speed.overhead,
    }
)


def chosen(names: Sequence[str] | None) -> list[str]:
    """Return the cases to run, in the table's order; None is all. Raise ConfigError for an unknown name."""
    return choose(CASES, names)


def run(
    session: Session, names: Sequence[str], command: Sequence[str], *, kills: int | None = None
) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on.

    ``kills``: how often the case of that name kills; None: its default.
    """
    cases = {name: CASES[name] for name in names}
    if "kills" in cases:
        cases["kills"] = partial(checkpoint_kills.run, kills=kills)
    return run_cases("checkpoint", session, cases, command)
