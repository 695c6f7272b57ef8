"""Start ranks on this machine: short jobs that run one of our modules and leave results in a directory, and
helpers for other starters of ranks.
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
_STARTER = "GEMINI_STARTER_OF_RANKS"  # the starting process


@contextmanager
def directory_of_job() -> Iterator[Path]:
    """Yield a directory for the inputs and results of a job. If a signal has ended the ranks, it is raised in
    this process after the directory was removed.
    """
    try:
        with directory_of_ranks() as directory:
            yield directory
    except _RanksSignalled as ended:
        signal.raise_signal(ended.number)
        raise StateError(f"the ranks were ended by {signal.Signals(ended.number).name}") from None


class _RanksSignalled(BaseException):
    """A signal has ended the ranks and must end this process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_local_ranks(module: str, directory: Path, ranks: int) -> None:
    """Run ``python -m module directory`` on ``ranks`` processes, which share the processors. Their output is
    not shown.

    Call it in the main thread, inside :func:`directory_of_job`; a signal ends the ranks.

    Raises:
        ConfigError: a rank raised it.
        StateError: a rank has failed otherwise. The message is that of the first rank, if it has left one.
    """
    variables = {"OMP_NUM_THREADS": threads_per_rank(ranks), **named_starter()}
    with environment(variables), quiet_torchrun():
        program = Program(module, (str(directory),), module=True, is_quiet=True)
        ended = run_ranks(Node(str(ranks), port=free_port()), program)
    if not ended.code:
        return
    if ended.code > 128 and not ended.reason:
        raise _RanksSignalled(ended.code - 128)
    first = first_error(directory)
    if first is None or ended.code >= 128:  # after a signal, other ranks only report a lost rank
        raise StateError(ended.reason)
    kind, why = first
    raise (ConfigError if kind == ConfigError.__name__ else StateError)(why)


def named_starter() -> dict[str, str]:
    """Return an environment variable that names this process as the starter of ranks, for
    :func:`end_with_starter`.
    """
    return {_STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """On a rank: end this process if the process that started it is killed. Nobody would read its result, and
    it would block the directory of its run. In a process that is no such rank this does nothing.
    """
    starter = os.environ.pop(_STARTER, "")  # removed: processes that the rank starts have another parent
    if starter.isdecimal():
        end_with_parent(int(starter))


@contextmanager
def as_rank(directory: Path) -> Iterator[None]:
    """Run the code of a rank of :func:`run_local_ranks` inside the block: write its error to the directory,
    and destroy the process group at the end.
    """
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
    """On a rank: write an error to ``directory``."""
    text = json.dumps([type(error).__name__, in_words(error)])
    write_text(directory / f"{_ERROR}-{os.environ['RANK']}", text, "write why a rank has failed")


def first_error(directory: Path) -> tuple[str, str] | None:
    """Return the class name and the text of the first error that a rank has left; None if there is none."""
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
    """Set environment variables inside the block, for processes that start there."""
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
    """Suppress torchrun's logs about ranks that fail or are ended: the raised error has the reason."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
