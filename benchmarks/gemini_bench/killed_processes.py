"""Runs a program in its own process, which a signal ends at a moment chosen before.

Processes are forked from this one, which has imported what they need: a start takes milliseconds. A program
may call ``os.execv`` to be one that nobody has prepared.
"""

from __future__ import annotations

import atexit
import mmap
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

Program = Callable[[], int]
_COUNTED = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.symlink", "os.link")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_TORCHRUN_SECONDS = 0.1  # how often it looks for ranks that have failed


@dataclass(frozen=True)
class Kill:
    """A signal, and when it comes: ``seconds`` after the start, or before the ``operation``-th change of a
    name in the program's directory (from 1; a file that is opened to be written counts). ``again``: seconds
    until a second one. ``group``: all processes of the program get it, as of Ctrl-C."""

    signum: int = signal.SIGKILL
    seconds: float | None = None
    operation: int = 0
    again: float | None = None
    group: bool = False


@dataclass(frozen=True)
class Setting:
    """Where and how a program runs: in ``directory``, whose ``tmp`` takes temporary files, with variables
    of the environment. ``file_bytes``: as much as a file may have, so that writing fails; 0: any number."""

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    file_bytes: int = 0
    most_seconds: float = 120.0


@dataclass(frozen=True)
class Lived:
    """How a program ended: its exit code, or the negative number of the signal that ended it; None where it
    ran too long. ``killed``: the signal was sent before it had ended. ``said``: what it has printed."""

    code: int | None
    seconds: float
    operations: int
    killed: bool
    said: str


class Process:
    """A program that runs. Call :meth:`wait` until it has ended."""

    def __init__(self, program: Program, setting: Setting, kill: Kill | None = None) -> None:
        self._setting, self._kill = setting, kill
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed where it has ended
        self._counts = mmap.mmap(-1, 16)  # operations; whether the program has killed itself
        self._due = [kill.seconds] if kill is not None and kill.seconds is not None else []
        if self._due and kill is not None and kill.again is not None:
            self._due.append(self._due[0] + kill.again)
        self._killed = self._hangs = False
        self.lived: Lived | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._started = time.monotonic()
        # A signal that comes before the child can take it waits: it would raise in this process's own frames.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        self.pid = os.fork()
        if self.pid == 0:
            self._become(program, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._pidfd = os.pidfd_open(self.pid)

    def wait(self, most_seconds: float) -> bool:
        """Send signals when they are due; return whether the program has ended, after at most so long. One
        that runs longer than it may is killed."""
        if self.lived is not None:
            return True
        lives_for = time.monotonic() - self._started
        end = min([lives_for + most_seconds, self._setting.most_seconds, *self._due[:1]])
        if select.select([self._pidfd], [], [], max(0.0, end - lives_for))[0]:
            self._take_end()
            return True
        lives_for = time.monotonic() - self._started
        if self._due and lives_for >= self._due[0]:
            assert self._kill is not None
            del self._due[0]
            self._killed = True
            self._send(self._kill)
        elif lives_for >= self._setting.most_seconds:
            self._hangs = True
            os.kill(self.pid, signal.SIGKILL)
        return False

    def tell(self, signum: int) -> None:
        """Send a signal now, unless it has ended."""
        if not self.wait(0.0):
            os.kill(self.pid, signum)

    def _send(self, kill: Kill) -> None:
        if kill.group:
            with suppress(ProcessLookupError):  # it has not become a group yet
                os.killpg(self.pid, kill.signum)
                return
        os.kill(self.pid, kill.signum)

    def _take_end(self) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        seconds = time.monotonic() - self._started
        os.close(self._pidfd)
        self._output.seek(0)
        said = self._output.read().decode(errors="replace")
        self._output.close()
        operations, did = (int.from_bytes(self._counts[at : at + 8], "little") for at in (0, 8))
        self._counts.close()
        killed = self._killed or bool(did)
        self.lived = Lived(None if self._hangs else code, seconds, operations, killed, said)

    # -- in the process ------------------------------------------------------------------------------

    def _become(self, program: Program, mask: set[Any]) -> NoReturn:
        """Give this process what a program of its own would have; run it, and never return. ``mask``: the
        signals that the program blocks.
        """
        code: object = 1
        try:
            try:
                self._prepare()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                code = program()
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        except SystemExit as asked:
            code = asked.code or 0
        except KeyboardInterrupt:
            sys.excepthook(*sys.exc_info())
            code = 128 + signal.SIGINT
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(BaseException):
                signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def _prepare(self) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device
            os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(self._output.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        directory = self._setting.directory
        os.chdir(directory)
        scratch = directory / "tmp"
        scratch.mkdir(exist_ok=True)
        os.environ.update({"TMPDIR": os.fspath(scratch), **self._setting.environment})
        tempfile.tempdir = None
        torch.set_num_threads(1)
        if self._setting.file_bytes:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._setting.file_bytes, hard))
        sys.addaudithook(self._count)

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not (event in _COUNTED or (event == "open" and arguments[2] & _WRITES)):
            return
        name = arguments[0]
        if isinstance(name, int) or not Path(os.fsdecode(name)).absolute().is_relative_to(
            self._setting.directory
        ):
            return
        count = int.from_bytes(self._counts[:8], "little") + 1
        self._counts[:8] = count.to_bytes(8, "little")
        if self._kill is not None and count == self._kill.operation:
            self._counts[8] = 1
            os.kill(os.getpid(), self._kill.signum)


def live(
    programs: Sequence[Program], settings: Sequence[Setting], kills: Sequence[Kill | None]
) -> list[Lived]:
    """Run programs, each in a process of its own, to their ends. They are ranks where there are several: once
    one has failed the others get SIGTERM, as from torchrun."""
    processes = [Process(*each) for each in zip(programs, settings, kills, strict=True)]
    told = False
    while not all([process.wait(0.5 if len(processes) == 1 else 0.02) for process in processes]):
        failed = [process for process in processes if process.lived is not None and process.lived.code]
        if failed and not told:
            time.sleep(_TORCHRUN_SECONDS)
            told = True
            for process in processes:
                process.tell(signal.SIGTERM)
    return [process.lived for process in processes if process.lived is not None]
