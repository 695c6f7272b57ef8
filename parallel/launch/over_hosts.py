"""A run over several machines: one process on each starts its ranks, here directly and elsewhere over ssh.

Each of those processes reads its standard input: signals come as lines there, and its end is one too. So
nothing is left running on a machine that has lost the one from which the run was started.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from gemini.errors import ConfigError, StateError
from gemini.parallel.launch.hosts import is_this_machine
from gemini.parallel.launch.torchrun import Ended, Node, Program

# What a program finds on every machine as it is here: where Python looks, and how libraries talk.
_PASSED = ("PYTHONPATH", "PYTHONSAFEPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PASSED_BEGINNINGS = ("NCCL_", "GLOO_", "TP_", "UCX_", "TORCH_", "GEMINI_")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_NOT_CONNECTED = 255  # ssh's own exit code; other codes are those of the command
_NO_SUCH = (125, 126, 127)  # env's: the directory or the command is not there
_CHECK_SECONDS = 30.0
_GRACE_SECONDS = 20.0  # for the others, once one machine has failed or the run is to end
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Hosts:
    """Machines, the first of which is where ranks meet. ``ssh`` is the command that reaches the others, to
    which host and command are added; ``environ`` names variables that they get besides the usual ones."""

    names: tuple[str, ...]
    ssh: tuple[str, ...] = ("ssh",)
    environ: tuple[str, ...] = ()


def run_on_hosts(hosts: Hosts, node: Node, program: Program) -> Ended:
    """Run ``program`` on all machines, of which ``node`` is the first; return how the first has ended that
    failed, or how all have. The others are then ended too, with what they have started, after 20 s by force.
    SIGINT, SIGTERM and SIGHUP are passed on; after a second one nobody is waited for.

    Called in the main thread.

    Raises:
        StateError: a machine cannot be reached, or has no such directory or Python; nothing was started.
        ConfigError: there is no such program or ssh.
    """
    jobs = [_Job(name, index, hosts) for index, name in enumerate(hosts.names)]
    if any(job.local for job in jobs):
        program.require()
    _require_reached([job for job in jobs if not job.local])
    with ExitStack() as stack:
        for job in jobs:
            job.start(node, program)
            stack.callback(job.end)
        with _signals_passed_on(jobs) as received:
            return _watch(jobs, received)


@dataclass
class _Job:
    """The process that has a machine's ranks, or the ssh that leads to it."""

    host: str
    index: int
    hosts: Hosts
    local: bool = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.local = "@" not in self.host and is_this_machine(self.host)

    def command(self, *arguments: str) -> list[str]:
        """Return what runs Python with ``arguments`` there, in this directory and environment."""
        if self.local:
            return [sys.executable, *arguments]
        options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
        passed = [f"{name}={value}" for name, value in os.environ.items() if self._passes(name)]
        there = ["env", "-C", str(Path.cwd()), *passed, sys.executable, *arguments]
        return [*self.hosts.ssh, *options, self.host, shlex.join(there)]

    def _passes(self, name: str) -> bool:
        return name in {*_PASSED, *self.hosts.environ} or name.startswith(_PASSED_BEGINNINGS)

    def start(self, node: Node, program: Program) -> None:
        command = self.command(
            *("-m", "gemini", "run", "--told-by-stdin", f"--nproc-per-node={node.ranks}"),
            *(f"--nnodes={len(self.hosts.names)}", f"--node-rank={self.index}"),
            *(f"--master-addr={node.address}", f"--master-port={node.port}"),
            *(["-m"] if program.module else []),
            *(program.name, *program.arguments),
        )
        # In a session of its own: what the terminal sends comes to this process alone, which passes it on.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def tell(self, number: int) -> None:
        """Send a signal there."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended
            self.process.stdin.write(b"%d\n" % number)
            self.process.stdin.flush()

    def end(self) -> None:
        """End it by force if it has not ended. Elsewhere the end of its input says so; here its ranks, each
        in a session of its own, are ended with it."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                for started in psutil.Process(self.process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        started.kill()
            self.process.kill()
        self.process.wait()

    def ended(self) -> Ended:
        """Return how it has ended."""
        code: int = self.process.returncode
        if code == _NOT_CONNECTED and not self.local:
            return Ended(1, f"the connection to {self.host} was lost")
        if code < 0:
            return Ended(128 - code, f"what ran on {self.host} was ended by {signal.Signals(-code).name}")
        return Ended(code, f"{self.host} has failed with exit code {code}" if code else "")


def obey_stdin() -> None:
    """Have this process get the signals that come as lines on standard input, and SIGTERM when that ends.
    What it starts finds an empty standard input."""
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def obey() -> None:
        for line in orders:
            os.kill(os.getpid(), int(line))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=obey, daemon=True).start()


def _require_reached(jobs: Sequence[_Job]) -> None:
    """Raise StateError for the machines that do not answer, or not as this one would."""
    asked = [_ask(job.command("-c", "pass")) for job in jobs]
    ends = time.monotonic() + _CHECK_SECONDS
    problems = []
    for job, process in zip(jobs, asked, strict=True):
        try:
            _, said = process.communicate(timeout=max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems.append(f"{job.host} does not answer over ssh within {_CHECK_SECONDS:.0f} s")
            continue
        lines = said.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        if process.returncode == _NOT_CONNECTED:
            problems.append(f"{job.host} cannot be reached over ssh: {lines[-1].strip()}")
        elif process.returncode in _NO_SUCH:
            problems.append(f"{job.host} lacks what this machine has: {lines[-1].strip()}")
        elif process.returncode:
            problems.append(f"{job.host} does not start Python: {lines[-1].strip()}")
    if problems:
        raise StateError(f"{'; '.join(problems)}; nothing was started. --exclude leaves hosts out")


def _ask(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(
            f"{command[0]!r}, which is to reach other machines, cannot be run ({error.strerror}); install "
            "it, or name another by --ssh"
        ) from None


@contextmanager
def _signals_passed_on(jobs: Sequence[_Job]) -> Iterator[list[int]]:
    """Pass signals on to all machines meanwhile; provide what came."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for job in jobs:
            job.tell(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(jobs: Sequence[_Job], received: Sequence[int]) -> Ended:
    """Wait until all have ended, or until those that should have had their time."""
    first = Ended()
    running = list(jobs)
    deadline = None
    while running and not (deadline and time.monotonic() > deadline) and len(received) < 2:
        for job in [job for job in running if job.process.poll() is not None]:
            running.remove(job)
            if not first.code:
                first = job.ended()
        if deadline is None and (first.code or received):
            deadline = time.monotonic() + _GRACE_SECONDS
            for job in running if not received else ():
                job.tell(signal.SIGTERM)
        time.sleep(_PAUSE_SECONDS)
    return Ended(128 + received[0]) if received else first
