"""Ranks of this machine: short jobs, in which a module of ours runs on them and leaves what it finds in a
directory, and the parts that other starters of ranks share.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from gemini.errors import ConfigError, StateError, in_words
from gemini.parallel.launch.launching import free_port
from gemini.parallel.launch.torchrun import Node, Program, directory_of_ranks, run_ranks
from gemini.system.durable import write_text
from gemini.system.process import end_with_parent
from gemini.system.threads import usable_processors

_ERROR = "error"
_STARTER = "GEMINI_STARTER_OF_RANKS"  # the process


@contextmanager
def directory_of_job() -> Iterator[Path]:
    """Yield a directory for what a job is told and finds. It is gone before a signal that has ended the ranks
    is raised in this process."""
    try:
        with directory_of_ranks() as directory:
            yield directory
    except _Signalled as ended:
        signal.raise_signal(ended.number)
        raise StateError(f"{signal.Signals(ended.number).name} has ended the ranks") from None


class _Signalled(BaseException):
    """This process was told to end while ranks ran."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_here(module: str, directory: Path, ranks: int) -> None:
    """Run ``python -m module directory`` on so many ranks, which share the processors. What they print is not
    seen.

    Called in the main thread, inside :func:`directory_of_job`; a signal ends the ranks.

    Raises:
        ConfigError: a rank was refused something. StateError: it has failed otherwise. The message has the
            words of the first one, where it has written any.
    """
    variables = {"OMP_NUM_THREADS": threads_per_rank(ranks), **named_starter()}
    with environment(variables), quiet_torchrun():
        program = Program(module, (str(directory),), module=True, is_quiet=True)
        ended = run_ranks(Node(str(ranks), port=free_port()), program)
    if not ended.code:
        return
    if ended.code > 128 and not ended.reason:
        raise _Signalled(ended.code - 128)
    first = first_error(directory)
    if first is None or ended.code >= 128:  # where a signal has ended a rank, the others know that it is gone
        raise StateError(ended.reason)
    kind, why = first
    raise (ConfigError if kind == ConfigError.__name__ else StateError)(why)


def named_starter() -> dict[str, str]:
    """Return a variable for the environment of ranks that this process starts: :func:`end_with_starter` reads
    it."""
    return {_STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """On a rank: end once the process that has started it was killed. Nobody would read what the rank finds,
    and it would keep others out of the directory of its run. A process that is no such rank goes on."""
    starter = os.environ.pop(_STARTER, "")  # processes that the rank starts have another parent
    if starter.isdecimal():
        end_with_parent(int(starter))


@contextmanager
def as_rank(directory: Path) -> Iterator[None]:
    """On a rank of :func:`run_here`: leave in the directory what it fails with, and the process group at the
    end."""
    end_with_starter()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        leave_error(directory, error)
        raise


def leave_error(directory: Path, error: Exception) -> None:
    """On a rank: write into ``directory`` what it has failed with."""
    text = json.dumps([type(error).__name__, in_words(error)])
    write_text(directory / f"{_ERROR}-{os.environ['RANK']}", text, "write why a rank has failed")


def first_error(directory: Path) -> tuple[str, str] | None:
    """Return the class and the words of the error that a rank has left first; None: none has."""
    left = sorted(directory.glob(f"{_ERROR}-*"), key=lambda path: path.stat().st_mtime_ns)
    if not left:
        return None
    kind, why = json.loads(left[0].read_text())
    return kind, why


def threads_per_rank(ranks: int) -> str:
    """Return OMP_NUM_THREADS for ranks that share the processors of this machine."""
    return str(max(1, len(usable_processors()) // ranks))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, which processes that start meanwhile get."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def quiet_torchrun() -> Iterator[None]:
    """Leave out what torchrun logs of ranks that fail or are ended: the error has it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
