"""Short jobs: a module of ours runs on ranks of this machine, and leaves what it finds in a directory."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from gemini.errors import ConfigError, StateError, in_words
from gemini.parallel.launch.launching import free_port
from gemini.parallel.launch.torchrun import Node, Program, run_ranks
from gemini.system.durable import write_text
from gemini.system.threads import usable_processors

_ERROR = "error"


@contextmanager
def directory_of_job() -> Iterator[Path]:
    """Yield a directory for what a job is told and finds. It is gone before a signal that has ended the ranks
    is raised in this process."""
    try:
        with tempfile.TemporaryDirectory(prefix="gemini-ranks-") as directory:
            yield Path(directory)
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
    with _threads_for(ranks), _torchrun_is_quiet():
        program = Program(module, (str(directory),), module=True, is_quiet=True)
        ended = run_ranks(Node(str(ranks), port=free_port()), program)
    if not ended.code:
        return
    if ended.code > 128 and not ended.reason:
        raise _Signalled(ended.code - 128)
    said = sorted(directory.glob(f"{_ERROR}-*"), key=lambda path: path.stat().st_mtime_ns)
    if not said or ended.code >= 128:  # where a signal has ended a rank, the others know that it is gone
        raise StateError(ended.reason)
    kind, why = json.loads(said[0].read_text())
    raise (ConfigError if kind == ConfigError.__name__ else StateError)(why)


@contextmanager
def as_rank(directory: Path) -> Iterator[None]:
    """On a rank of :func:`run_here`: leave in the directory what it fails with, and the process group at the
    end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        text = json.dumps([type(error).__name__, in_words(error)])
        write_text(directory / f"{_ERROR}-{os.environ['RANK']}", text, "write why a rank has failed")
        raise


@contextmanager
def _threads_for(ranks: int) -> Iterator[None]:
    """Have the ranks that are started meanwhile share the processors."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(usable_processors()) // ranks))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def _torchrun_is_quiet() -> Iterator[None]:
    """Leave out what torchrun logs of ranks that fail: the error has it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
