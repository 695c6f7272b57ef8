"""Starts several worker processes as the ranks of one process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from gemini_bench.session import Session, WorkerRun

# A peak of a step lasts for longer; more samples would take time from those who are measured.
SAMPLE_SECONDS = 0.02
# What a rank waits for the others before it gives up, and what a run may take.
_TIMEOUT_SECONDS = 600.0


def run_ranks(session: Session, task: str, options: dict[str, Any], world: int) -> list[WorkerRun]:
    """Run one task in ``world`` fresh processes at once, each under the watch; return what became of each, by
    rank. The task enters :func:`rank_of` with its options. When one ends without a result, or this function
    is left by an exception, the others are killed: they would wait for it.

    Raises:
        WorkerFailed: a rank ended without a result.
    """
    store = Path(session.disk_dir, f"store-{len(list(session.disk_dir.iterdir()))}")
    common = {**options, "world": world, "store": str(store)}
    stop = threading.Event()
    failed: list[WorkerRun] = []

    def run(rank: int) -> WorkerRun:
        found = session.run(
            task,
            {**common, "rank": rank},
            sample_seconds=SAMPLE_SECONDS,
            timeout_seconds=_TIMEOUT_SECONDS,
            stop=stop,
        )
        if found.result is None:
            failed.append(found)
            stop.set()
        return found

    with ThreadPoolExecutor(world) as pool:
        try:
            runs = list(pool.map(run, range(world)))
        finally:
            stop.set()
    if failed:
        failed[0].data()  # raises: the first to fail is why the others were killed
    return runs


@contextmanager
def rank_of(options: dict[str, Any]) -> Iterator[int]:
    """Be a rank, of one thread, of the group that ``options`` describe, over gloo; return which."""
    torch.set_num_threads(1)
    rank, world = int(options["rank"]), int(options["world"])
    dist.init_process_group(
        "gloo",
        init_method=Path(options["store"]).resolve().as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
    )
    try:
        yield rank
    finally:
        dist.destroy_process_group()
