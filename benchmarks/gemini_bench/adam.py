"""``gemini bench adam``: the Adam kernels against the memory's limit and against other optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from gemini.errors import ConfigError
from gemini_bench import adam_cases, adam_cuda, adam_quality
from gemini_bench.adam_measure import Settings
from gemini_bench.cases import run_case, verdicts
from gemini_bench.record import environment
from gemini_bench.session import CaseResult, Session

Case = Callable[[Session, Settings], CaseResult]

# Below this, arrays may stay in the caches and what is measured is not memory.
SERIOUS_NUMEL = 32_000_000

# Part of every record: what the times of the rows are times of.
HOW = MappingProxyType(
    {
        "cpu": "Rows of ours time the call of the kernel on prepared arrays; the cases 'small' and 'steps', "
        "and rows that say step(), time the optimizer's step(). Rows of peers time their optimizer's step(), "
        "including their Python; 'in 3 passes' adds the casts before and after it.",
        "cuda": "All rows but the copy time the optimizer's step(), ours and torch's, until the GPU is done.",
    }
)

CASES: Mapping[str, Mapping[str, Case]] = MappingProxyType(
    {
        "cpu": {
            **{name: partial(adam_cases.run, name) for name in adam_cases.TASKS},
            "quality": adam_quality.run,
        },
        "cuda": {"cuda": adam_cuda.run},
    }
)
DEFAULT_NUMEL = MappingProxyType({"cpu": 100_000_000, "cuda": 1_000_000_000})


def chosen(names: Sequence[str] | None, device: str) -> list[str]:
    """Return the cases to run, in the table's order; None is all that the device has.

    Raises:
        ConfigError: for an unknown name, or one of another device; for a GPU where there is none.
    """
    for name in names or ():
        if name not in CASES[device]:
            raise ConfigError(
                f"unknown case {name!r} for --device {device}; choose from {', '.join(CASES[device])}"
            )
    if device == "cuda":
        adam_cuda.require_gpu()
    return [name for name in CASES[device] if names is None or name in names]


def run(
    session: Session, settings: Settings, device: str, names: Sequence[str], command: Sequence[str]
) -> dict[str, Any]:
    """Run the named cases and return one plain dict; a case that fails leaves its error, the others go on."""
    record: dict[str, Any] = {
        "benchmark": "adam",
        "quick": session.quick,
        "how": HOW[device],
        "environment": environment(command),
    }
    cases = {name: run_case(partial(_run, CASES[device][name], settings), session) for name in names}
    return {**record, "cases": cases, **verdicts(cases)}


def _run(case: Case, settings: Settings, session: Session) -> CaseResult:
    return case(session, settings)
