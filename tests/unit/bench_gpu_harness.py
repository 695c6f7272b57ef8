"""Benchmarks of a GPU in the process of the test."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from gemini_bench.session import WorkerRun
from gemini_bench.watch import Ending, WatchedRun
from gemini_bench.worker import find_task


def in_process(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
    """Run a task here, with options and result through JSON as if it had a process of its own."""
    threads, shows_errors = torch.get_num_threads(), sys.excepthook  # which process groups replace
    try:
        result = find_task(task)(json.loads(json.dumps(options)))
    finally:
        torch.set_num_threads(threads)
        sys.excepthook = shows_errors
    return WorkerRun(json.loads(json.dumps(result)), WatchedRun(Ending.FINISHED, 0, 0.1, 0, "", ""))


def figures(rows: Any) -> dict[str, Any]:
    """Return the rows of a table by what they say."""
    return {row.what: row for row in rows}
