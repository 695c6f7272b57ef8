"""Common parts of the cases of ``gemini bench adam``: settings, memory, one worker per number of threads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.system.device import free_memory_bytes
from gemini_bench.paired import AbsentRow, Contender, Timings, require_same_job, run_paired, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
# Results of different optimizers after the same steps: rounding apart, far below one step of 1e-4.
_TOLERANCE = 2e-6
_MARGIN_BYTES = 1_000_000_000  # the interpreter, torch, DeepSpeed and their temporaries


@dataclass(frozen=True)
class Settings:
    """Parameters per contender, numbers of threads to measure with, and rounds that count.

    Raises:
        ConfigError: a value that cannot be measured with here.
    """

    numel: int = 100_000_000
    threads: tuple[int, ...] = (1, 2)
    repeats: int = 15

    def __post_init__(self) -> None:
        cores = len(os.sched_getaffinity(0))
        for name, values in (
            ("numel", (self.numel,)),
            ("repeats", (self.repeats,)),
            ("threads", self.threads),
        ):
            if not values or min(values) < 1:
                raise ConfigError(f"{name} is {values[0] if values else 'empty'}; it must be 1 or more")
        if max(self.threads) > cores:
            raise ConfigError(
                f"{max(self.threads)} threads on {cores} cores would measure the scheduler; "
                f"choose at most {cores}"
            )


def parse_count(text: str) -> int:
    """Return a number of elements from text such as ``"100M"``, ``"1.5B"`` or ``"65536"``."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        count = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        count = 0.0
    if not 1 <= count < 2**53 or not count.is_integer():
        raise ConfigError(f"{text!r} is not a number of elements; write 65536, 1M or 1.5B")
    return int(count)


def require_memory(case: str, need_bytes: int, free_bytes: int) -> None:
    """Raise ConfigError with the numbers if a case does not fit into free memory."""
    need = need_bytes + _MARGIN_BYTES
    if need > free_bytes:
        raise ConfigError(
            f"{case} needs {need / 1e9:.1f} GB of memory at once and {free_bytes / 1e9:.1f} GB are free; "
            "pass a smaller --numel"
        )


RowsOf = Callable[[str, Timings, Mapping[str, str]], Sequence[Row]]


def measure(session: Session, settings: Settings, case: str, held_bytes: int, rows_of: RowsOf) -> CaseResult:
    """Run task ``adam_cases.<case>`` once per number of threads and return the rows of all.

    ``held_bytes``: what all its contenders hold together.
    ``rows_of`` gets a prefix for its texts, the times, and the peers that are absent with the reasons.

    Raises:
        ConfigError: too little memory; nothing was run.
        WorkerFailed: a worker ended without a result.
    """
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    for threads in settings.threads:
        require_memory(f"case {case!r}", held_bytes, free_memory_bytes())
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        session.progress(f"{case}: {settings.numel:,} parameters, {label}")
        options = {"numel": settings.numel, "repeats": settings.repeats, "threads": threads}
        found = session.run(f"adam_cases.{case}", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
        rows.extend(rows_of(f"{label}: ", Timings(found), found["absent"]))
        measured[label] = found
    return CaseResult(rows, dataclasses.asdict(settings), measured)


def use_threads(count: int) -> None:
    """Give every contender of this process ``count`` threads.

    Torch and DeepSpeed share one OpenMP, which torch sets; the variable is for a DeepSpeed that was
    linked to another one and is loaded later.
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


# -- parts of a case -----------------------------------------------------------------------------


def prepared(options: Mapping[str, Any]) -> int:
    """Set the number of threads that a task was asked for; return its number of elements."""
    use_threads(options["threads"])
    return int(options["numel"])


def timed(
    contenders: Sequence[Contender],
    same_job: Sequence[Contender],
    options: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the paired times of a task as plain data.

    Raises:
        StateError: the results of ``same_job`` differ.
    """
    found = run_paired(contenders, options["repeats"])
    if same_job:
        require_same_job(same_job, _TOLERANCE)
    return {**found, **about}


def time_rows(prefix: str, times: Timings, names: Sequence[str]) -> list[Row]:
    """Return one row per contender."""
    return [spread_row(f"{prefix}{name}", times.milliseconds(name), "ms") for name in names]


def absent_rows(prefix: str, absent: Mapping[str, str]) -> list[Row]:
    """Return one row per peer that is not here, with the reason."""
    return [AbsentRow(f"{prefix}{name} {reason}") for name, reason in absent.items()]
