"""Run over several machines, which are named by hand or in a file. One process on each machine starts its
ranks: here directly, elsewhere over ssh.

Each of those processes reads its standard input: signals arrive as lines, and the end of input means SIGTERM.
So no process keeps running on a machine that has lost the connection to the starting one.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from gemini.errors import ConfigError, IoError, StateError
from gemini.parallel.launch.torchrun import Ended, Node, Program
from gemini.system.files import read_regular
from gemini.system.input_files import MAX_DOCUMENT_BYTES

# A host as ssh takes it; neither it nor its user may begin with a dash, which would be an option.
_HOST = re.compile(r"(?:[\w.+][\w.+-]*@)?[A-Za-z0-9_:][\w.:%-]*", re.ASCII)
_NEXT_LINE = "give one name per line"


def read_hostfile(path: Path) -> list[str]:
    """Return the hosts in a file, one per line; repeated hosts, as in lists of schedulers, are returned once.
    Empty lines and comments after ``#`` are ignored.

    Raises:
        IoError: it cannot be read.
        ConfigError: a line is not a host, or there is none.
    """
    try:
        lines = read_regular(path, MAX_DOCUMENT_BYTES).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise IoError(error.errno or 0, f"{error.strerror}; name another hostfile", str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; {_NEXT_LINE}") from None
    found: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        name = line.partition("#")[0].strip()
        if name:
            found[_checked(name, f"line {number} of {path}", _NEXT_LINE)] = None
    if not found:
        raise ConfigError(f"{path} names no host; {_NEXT_LINE}")
    return _each_once(found, str(path))


def parse_hosts(text: str, option: str) -> list[str]:
    """Return the hosts of a comma-separated list, each once. Raises ConfigError for an invalid name."""
    names = [name.strip() for name in text.split(",")]
    found = dict.fromkeys(_checked(name, option, "separate names with commas") for name in names)
    return _each_once(found, option)


def checked_address(address: str) -> str:
    """Return the given ``--master-addr``. Raises ConfigError if it is no name or address."""
    if "@" in address:
        raise ConfigError(f"--master-addr is {address!r}; give the host without the user")
    return _checked(address, "--master-addr", "give the name or address of a machine")


def choose_hosts(known: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[str]:
    """Return the ``known`` hosts that are included (all, if none is named) and not excluded, in their order.

    Raises:
        ConfigError: an included or excluded host is not known, or none is left.
    """
    for option, names in (("--include", include), ("--exclude", exclude)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"{option} names {', '.join(unknown)}; the hosts are {', '.join(known)}")
    left = [name for name in known if (not include or name in include) and name not in exclude]
    if not left:
        raise ConfigError(f"no host is left: {', '.join(known)} without {', '.join(exclude)}")
    return left


def first_to_listen(
    hosts: Sequence[str], master_addr: str | None, known: Sequence[str]
) -> tuple[list[str], str]:
    """Return the hosts, with the host where ranks meet first, and its address: ``master_addr``, or the name
    of the first host. ``known`` are the hosts before the choice.

    Raises:
        ConfigError: other machines would not find that host at this address.
    """
    ordered = list(hosts)
    address = address_of(ordered[0]) if master_addr is None else checked_address(master_addr)
    named = [host for host in known if address_of(host) == address]
    if named and named[0] not in hosts:
        raise ConfigError(f"--master-addr is {address}, which is not among the hosts: {', '.join(hosts)}")
    if named:
        ordered.remove(named[0])
        ordered.insert(0, named[0])
    if len(ordered) > 1 and is_loopback(address):
        raise ConfigError(
            f"{len(ordered)} machines connect to {address}, but this address means a different machine on "
            "each of them; set --master-addr to a name or address of the first one that the others can reach"
        )
    return ordered, address


def address_of(host: str) -> str:
    """Return a host without the user."""
    return host.rpartition("@")[2]


def is_loopback(address: str) -> bool:
    """Return whether every machine takes this address for itself."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address.lower().rstrip(".") == "localhost" or address.startswith("127.")
    return number.is_loopback or number.is_unspecified


def is_this_machine(host: str) -> bool:
    """Return whether a host, given without a user, is this machine."""
    if host in {"localhost", socket.gethostname()}:
        return True
    links = psutil.net_if_addrs().values()
    own = {address.address.partition("%")[0] for addresses in links for address in addresses}
    with suppress(OSError, UnicodeError):
        return any(str(found[4][0]) in own for found in socket.getaddrinfo(host, None))
    return False


def _checked(name: str, where: str, way_out: str) -> str:
    if not _HOST.fullmatch(name):
        raise ConfigError(f"{where} has {name!r}, which is not the name of a host; {way_out}")
    return name


def _each_once(names: Iterable[str], where: str) -> list[str]:
    """Return ``names``. Raises ConfigError if a host is listed twice with different users."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(address_of(name), name)
        if other != name:
            raise ConfigError(
                f"{where} names {address_of(name)} twice, as {other} and as {name}; leave one out"
            )
    return list(names)


# Environment variables copied to every machine: Python's search path, and settings of communication
# libraries.
_PASSED = ("PYTHONPATH", "PYTHONSAFEPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_PASSED_BEGINNINGS = ("NCCL_", "GLOO_", "TP_", "UCX_", "TORCH_", "GEMINI_")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_NOT_CONNECTED = 255  # ssh's own exit code; other codes are the command's
_NO_SUCH = (125, 126, 127)  # exit codes of env: the directory or the command does not exist
_CHECK_SECONDS = 30.0
_GRACE_SECONDS = 20.0  # for the others, after one machine has failed or a signal came
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class Hosts:
    """Machines; ranks meet at the first. ``ssh`` is the command that reaches the others, to which host and
    command are appended; ``environ`` names variables to pass in addition to the usual ones.
    """

    names: tuple[str, ...]
    ssh: tuple[str, ...] = ("ssh",)
    environ: tuple[str, ...] = ()


def run_on_hosts(hosts: Hosts, node: Node, program: Program) -> Ended:
    """Run ``program`` on all machines; ``node`` describes the first. Return how the first failed one has
    ended, or how all have. After a failure the others are ended too, with all processes that they have
    started; after 20 s by force. SIGINT, SIGTERM and SIGHUP are passed on; a second signal ends the waiting.

    Call it in the main thread.

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
    """The process that starts a machine's ranks, or the ssh that leads to it."""

    host: str
    index: int
    hosts: Hosts
    local: bool = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.local = "@" not in self.host and is_this_machine(self.host)

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs Python with ``arguments`` there, in this directory and environment."""
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
        # In its own session: signals of the terminal come only to this process, which passes them on.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def tell(self, number: int) -> None:
        """Send a signal there."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended
            self.process.stdin.write(b"%d\n" % number)
            self.process.stdin.flush()

    def end(self) -> None:
        """End it by force if it has not ended. On other machines the end of its input does this; on this one
        its ranks, each in its own session, are killed too.
        """
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
            return Ended(128 - code, f"the program on {self.host} was ended by {signal.Signals(-code).name}")
        return Ended(code, f"{self.host} failed with exit code {code}" if code else "")


def obey_stdin() -> None:
    """Make this process receive the signals that arrive as lines on standard input, and SIGTERM at its end.
    Processes that it starts get an empty standard input.
    """
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
    """Raise StateError for machines that do not answer, or lack the directory or Python."""
    asked = [_ask(job.command("-c", "pass")) for job in jobs]
    ends = time.monotonic() + _CHECK_SECONDS
    problems = []
    for job, process in zip(jobs, asked, strict=True):
        try:
            _, said = process.communicate(timeout=max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems.append(f"{job.host} did not answer over ssh within {_CHECK_SECONDS:.0f} s")
            continue
        lines = said.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        if process.returncode == _NOT_CONNECTED:
            problems.append(f"{job.host} cannot be reached over ssh: {lines[-1].strip()}")
        elif process.returncode in _NO_SUCH:
            problems.append(f"{job.host} lacks a file or directory of this machine: {lines[-1].strip()}")
        elif process.returncode:
            problems.append(f"{job.host} cannot start Python: {lines[-1].strip()}")
    if problems:
        raise StateError(f"{'; '.join(problems)}; nothing was started; leave hosts out with --exclude")


def _ask(command: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise ConfigError(
            f"{command[0]!r}, the command to reach other machines, cannot be run ({error.strerror}); install "
            "it, or choose another with --ssh"
        ) from None


@contextmanager
def _signals_passed_on(jobs: Sequence[_Job]) -> Iterator[list[int]]:
    """Pass signals on to all machines inside the block; yield the list of received ones."""
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
    """Wait until all have ended or, after a failure or a signal, until the grace period is over."""
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
