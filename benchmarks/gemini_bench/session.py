"""The common options of all cases, and the function that runs a case's workers."""

from __future__ import annotations

import json
import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemini.errors import GeminiError
from gemini_bench.record import Row
from gemini_bench.watch import Ending, WatchedRun, run_watched

# Not this package: importing it would bring more into memory than torch.
_BARE_PROGRAM = (
    "import torch, os; print(int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))"
)

# Reading another process's counters takes part of a core; while time is measured, do it seldom.
TIMING_SAMPLE_SECONDS = 0.1


class WorkerFailed(GeminiError):
    """A worker process ended without a result."""


@dataclass(frozen=True)
class WorkerRun:
    """The result of a worker (None if it has none) and the readings of the watch."""

    result: dict[str, Any] | None
    watched: WatchedRun

    @property
    def peak_rss_bytes(self) -> int:
        """The highest sample of resident memory."""
        return self.watched.peak_rss_bytes

    def data(self) -> dict[str, Any]:
        """Return the result. Raises WorkerFailed, with the reason, if there is none."""
        if self.result is None:
            raise WorkerFailed(
                f"a worker ended without a result ({self.watched.ending.value}, "
                f"exit code {self.watched.exit_code}, peak {self.watched.peak_rss_bytes} bytes):\n"
                f"{self.watched.error_tail}"
            )
        return self.result


@dataclass(frozen=True)
class CaseResult:
    """The results of a case: rows for the table, and all data behind them as plain data."""

    rows: Sequence[Row]
    settings: dict[str, Any]
    measured: dict[str, Any]


def run_worker(
    task: str,
    options: dict[str, Any],
    *,
    limit_bytes: int | None = None,
    sample_seconds: float = 0.002,
    timeout_seconds: float = 3600.0,
    stop: threading.Event | None = None,
) -> WorkerRun:
    """Run one task in a fresh process under the watch, until it ends or ``stop`` is set."""
    request = json.dumps({"task": task, "options": options})
    watched = run_watched(
        [sys.executable, "-m", "gemini_bench.worker", request],
        limit_bytes=limit_bytes,
        sample_seconds=sample_seconds,
        timeout_seconds=timeout_seconds,
        stop=stop,
    )
    finished = watched.ending is Ending.FINISHED
    return WorkerRun(json.loads(watched.output) if finished else None, watched)


def measure_bare_bytes() -> int:
    """Return the resident bytes of a process that has imported torch and nothing else; median of three."""
    readings = []
    for _ in range(3):
        watched = run_watched([sys.executable, "-c", _BARE_PROGRAM])
        if watched.ending is not Ending.FINISHED:
            raise WorkerFailed(f"cannot import torch in a fresh process:\n{watched.error_tail}")
        readings.append(int(watched.output))
    return int(statistics.median(readings))


@dataclass(frozen=True)
class Session:
    """Options of one ``gemini bench runtime``, or of another that runs its cases in workers.

    ``disk_dir`` takes the DISK tier's file; ``limit_bytes`` is the real memory limit of the case that asks
    how large a model fits, on a GPU the most of HOST and of the disk (None: its default). ``quick`` shrinks
    everything until the figures mean nothing. ``record``: the file that the record goes to; pictures go
    beside it.
    """

    disk_dir: Path
    quick: bool = False
    limit_bytes: int | None = None
    progress: Callable[[str], None] = lambda _text: None
    run: Callable[..., WorkerRun] = run_worker
    bare_bytes: Callable[[], int] = measure_bare_bytes
    record: Path | None = None
