"""Run a function on several processes at once: ``run_on_ranks(check, 2, argument)``.

The processes are started when they are first needed and serve all tests of a session, because starting one
costs seconds. Every run gets a process group of its own, made from nothing and destroyed at its end.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from short_searches import SHORT_SEARCH

if TYPE_CHECKING:
    from torch import Tensor

# What the others get to report their own error, or to leave a collective, after one rank has failed.
GRACE_SECONDS = 3.0
# What a process may take to start and to import torch, on a busy machine.
START_SECONDS = 120.0
# What meeting the other ranks may take there, however short the call.
MEET_SECONDS = 30.0


# The server that all processes are forked from imports these once; no import starts a thread. It passes over
# modules that are not installed.
_IMPORTED = [
    "gemini.parallel",
    "safetensors.torch",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]


class RanksFailed(AssertionError):
    """A rank raised, died or did not end in time; the message has the traceback of each."""


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 180.0,
    backend: str | None = "gloo",
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new default process group; return the results by rank.

    The function must be at the top level of a module; arguments and results are pickled, tensors by value.
    ``timeout`` is in seconds, for the call; a collective gets it too, if it is long. Each rank begins with
    torch's seed 0, one thread, an empty group and the environment of this process as it was when the rank was
    started; what else it changes (default dtype) it changes for later runs.

    Raises:
        RanksFailed: see there. The processes of the run are ended; the next run starts new ones.
    """
    workers = _WORKERS.first(world_size)
    try:
        store = str(Path(_stores(), str(next(_RUNS))))
        case = os.environ.get("PYTEST_CURRENT_TEST", "")
        for rank, worker in enumerate(workers):
            worker.send(_Job(function, args, rank, world_size, store, timeout, backend, case))
        return _results(workers, timeout)
    except BaseException:
        _WORKERS.close()
        raise


def own_part(batch: Tensor) -> Tensor:
    """Return this rank's rows of a global batch; all of them without a process group."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return batch
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def start_process(target: Callable[..., None], args: tuple[Any, ...]) -> BaseProcess:
    """Start a process that has imported torch already and has one thread; ``target`` is at the top level of a
    module."""
    process = _context().Process(target=target, args=args)
    process.start()
    return process


def close_workers() -> None:
    """End the processes, if there are any; the next run starts new ones."""
    _WORKERS.close()


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout: float
    backend: str | None
    case: str


class _Worker:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        context = _context()
        self.pipe, theirs = context.Pipe()
        self._last_words = Path(_stores(), f"worker-{next(_NUMBERS)}")
        serving = (theirs, self._last_words, dict(os.environ))
        self.process = context.Process(target=_serve, args=serving, daemon=True)
        self.process.start()
        theirs.close()
        self.started = False

    def send(self, job: _Job) -> None:
        """Hand out a job; test modules are found where this process finds them."""
        if not self.started:
            if not self.pipe.poll(START_SECONDS):
                raise RanksFailed(f"a process did not start within {START_SECONDS} s")
            self.pipe.recv_bytes()
            self.started = True
        self.pipe.send_bytes(pickle.dumps(list(sys.path)))
        self.pipe.send_bytes(pickle.dumps(job))

    def how_it_died(self) -> str:
        """Wait for a process that no longer answers; return its exit code, and where its threads were if a
        signal of the processor's ended it."""
        self.process.join()
        stacks = self._last_words.read_text() if self._last_words.exists() else ""
        return f"died with exit code {self.process.exitcode}\n{stacks}"

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _context() -> ForkServerContext:
    """Return what starts processes: a server that has imported what takes long, and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class _Workers:
    """The processes that have been started; a run uses the first ones."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def first(self, num_ranks: int) -> list[_Worker]:
        while len(self._workers) < num_ranks:
            self._workers.append(_Worker())
        return self._workers[:num_ranks]

    def close(self) -> None:
        while self._workers:
            self._workers.pop().close()


_WORKERS = _Workers()
_RUNS = count()
_NUMBERS = count()


@cache
def _stores() -> str:
    """Return where the stores of all runs lie. They outlive them: a rank gives signs of life until it knows
    that its group is gone, and one without its file would look for it for minutes."""
    directory = tempfile.mkdtemp(prefix="gemini-ranks-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _results(workers: list[_Worker], timeout: float) -> list[Any]:
    """Wait for all ranks; once one has failed, for the others only a little longer."""
    pipes: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    ends = time.monotonic() + timeout
    while pipes:
        ready = wait(list(pipes), timeout=max(0.0, ends - time.monotonic()))
        if not ready:
            failures |= {rank: "did not end in time; see its stack in stderr" for rank in pipes.values()}
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, workers[rank].how_it_died()
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                ends = min(ends, time.monotonic() + GRACE_SECONDS)
    if failures:
        raise RanksFailed("".join(f"\n--- rank {rank}:\n{text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(workers))]


def _serve(pipe: Connection, last_words: Path, environment: dict[str, str]) -> None:
    """Do jobs until the other end goes away. If the process dies of a fault, ``last_words`` says where."""
    import torch

    os.environ.clear()  # that of the server, which is as old as the first process
    os.environ.update(environment)
    from gemini.placement import local_search

    torch.set_num_threads(1)
    local_search._MOST = SHORT_SEARCH
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    pipe.send_bytes(b"started")
    with suppress(EOFError, KeyboardInterrupt), last_words.open("w") as stacks:
        faulthandler.enable(stacks)
        gc.freeze()  # what was imported: no collection need look at it
        while True:
            sys.path[:] = pickle.loads(pipe.recv_bytes())
            answer = _answer(pipe.recv_bytes())
            try:
                message = pickle.dumps(answer)
            except Exception:
                message = pickle.dumps((False, traceback.format_exc()))
            pipe.send_bytes(message)
            # A process group in a cycle keeps its threads until it is collected. Without this a session
            # gathers a thousand of them, and the ranks spend most of their time on those.
            del answer
            gc.collect()


def _answer(message: bytes) -> tuple[bool, Any]:
    try:
        job: _Job = pickle.loads(message)
        with _own_environment(), _group(job):
            os.environ["PYTEST_CURRENT_TEST"] = job.case
            return True, job.function(*job.args)
    except BaseException:
        return False, traceback.format_exc()


@contextmanager
def _own_environment() -> Iterator[None]:
    """Undo at the end what a job does to the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _group(job: _Job) -> Iterator[None]:
    """Provide the default process group of a job."""
    import torch
    from torch import distributed as dist

    torch.manual_seed(0)
    faulthandler.dump_traceback_later(max(1.0, job.timeout - 1.0))
    limit = timedelta(seconds=max(job.timeout, MEET_SECONDS))
    store = dist.FileStore(job.store, job.world_size)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
    try:
        # A rank that left before the others have connected to it would take their connections down.
        dist.barrier()
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
