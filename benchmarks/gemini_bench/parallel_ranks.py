"""Forked processes as the ranks of one process group, each with its peak memory.

A case runs many groups. Importing torch takes a process longer than the steps that are measured, so one
worker imports it and forks the ranks of each group.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gemini.errors import GeminiError
from gemini_bench.watch import resident_bytes
from gemini_bench.zero_ranks import rank_of

_TIMEOUT_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankFailed(GeminiError):
    """A forked rank raised or died; the others were killed."""


@dataclass(frozen=True)
class RankRun:
    """What a rank returned, and the highest resident memory that was seen of it."""

    result: Any
    peak_rss_bytes: int


def fork_ranks(call: Callable[[int], Any], world: int, *, sample_seconds: float = 0.005) -> list[RankRun]:
    """Call ``call(rank)`` in ``world`` processes forked from this one, each of one thread; return what they
    returned (plain data), by rank. More than one are the ranks of a gloo group. None outlives the call.

    Call it before this process computes anything: a forked process has no threads but its own.

    Raises:
        RankFailed: with the traceback of the first rank that failed, or how it died.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory, "store"))
        pipes, processes = [], []
        try:
            for rank in range(world):
                reading, writing = context.Pipe(duplex=False)
                arguments = (call, {"rank": rank, "world": world, "store": store}, writing, os.getpid())
                process = context.Process(target=_be_rank, args=arguments)
                process.start()
                writing.close()
                pipes.append(reading)
                processes.append(process)
            return _watch(pipes, [process.pid or 0 for process in processes], sample_seconds)
        finally:
            torch.set_num_threads(threads)
            for process in processes:
                process.kill()
                process.join()


def _watch(pipes: list[Connection], pids: list[int], sample_seconds: float) -> list[RankRun]:
    """Sample the ranks' memory until all have returned."""
    peaks = [0] * len(pids)
    results: dict[int, Any] = {}
    ends = time.monotonic() + _TIMEOUT_SECONDS
    while len(results) < len(pids):
        for rank, (pipe, pid) in enumerate(zip(pipes, pids, strict=True)):
            if rank in results:
                continue
            peaks[rank] = max(peaks[rank], resident_bytes(pid))
            if pipe.poll():
                results[rank] = _received(rank, pipe)
        if time.monotonic() > ends:
            raise RankFailed(f"no result of all {len(pids)} ranks within {_TIMEOUT_SECONDS:.0f} s")
        time.sleep(sample_seconds)
    return [RankRun(results[rank], peak) for rank, peak in enumerate(peaks)]


def _received(rank: int, pipe: Connection) -> Any:
    try:
        returned, value = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died without a word") from None
    if not returned:
        raise RankFailed(f"rank {rank}:\n{value}")
    return value


def _be_rank(call: Callable[[int], Any], options: dict[str, Any], pipe: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before it could be followed
    try:
        if options["world"] == 1:
            pipe.send((True, call(0)))
            return
        with rank_of(options) as rank:
            result = call(rank)
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
