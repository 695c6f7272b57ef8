"""Run the ranks of one machine, started and watched by torchrun."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from gemini.errors import ConfigError
from gemini.parallel.launch.launching import free_port
from gemini.system.durable import scratch_directory

DEFAULT_PORT = 29500
COUNTED = ("auto", "cpu", "gpu")

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Ended:
    """How a run has ended: its exit code, and the reason unless a signal to this process ended it."""

    code: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Program:
    """The program of every rank: a file, or with ``module`` a module. ``is_quiet`` hides its output."""

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    is_quiet: bool = False

    def require(self) -> None:
        """Raise ConfigError if the file is not on this machine."""
        if not self.module and not Path(self.name).is_file():
            raise ConfigError(f"there is no file {self.name!r} to run; to run a module write -m {self.name}")


@dataclass(frozen=True)
class Node:
    """Machine ``index`` of ``count`` and its ranks: a number, or a way to count them (``COUNTED``). All ranks
    meet at ``address`` and ``port`` of the first machine.
    """

    ranks: str = "1"
    index: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        if self.ranks not in COUNTED and not (self.ranks.isdecimal() and int(self.ranks) > 0):
            raise ConfigError(
                f"--nproc-per-node is {self.ranks!r}; give a number of processes, or {', '.join(COUNTED)}"
            )
        if not 0 <= self.index < self.count:
            raise ConfigError(
                f"--node-rank is {self.index} of {self.count} machines; give a number from 0 to the number "
                "of machines minus 1"
            )
        if not 0 < self.port < 2**16:
            raise ConfigError(f"--master-port is {self.port}; ports are 1 to 65535")


@contextmanager
def directory_of_ranks() -> Iterator[Path]:
    """Yield a temporary directory. Leftover directories of killed processes are removed first."""
    with scratch_directory(Path(tempfile.gettempdir(), "ranks")) as directory:
        yield directory


def run_ranks(node: Node, program: Program) -> Ended:
    """Run the ranks of this machine until all have ended. The code is that of the first rank that failed, 128
    plus the number of a signal that ended it or this process, or 0. After a failure the other ranks are
    ended.

    Call it in the main thread: torchrun handles signals inside. Leaves no file behind.

    Raises:
        ConfigError: ranks cannot be counted in this way, or the port is taken.
    """
    if node.index == 0:
        require_free(node.port)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    with directory_of_ranks() as directory:
        try:
            torch_run.run(torch_run.parse_args(_arguments(node, program, directory)))
        except ChildFailedError as error:
            return _failed(*error.get_first_failure())
        except SignalException as error:
            return Ended(128 + error.sigval)
        except ValueError as error:  # counting GPUs where there are none
            raise ConfigError(f"--nproc-per-node {node.ranks}: {error}") from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return Ended()


def chosen_port(port: int | None) -> int:
    """Return the port for ranks of one machine: the given one, else a free one."""
    if port is not None:
        return port
    return DEFAULT_PORT if _is_free(DEFAULT_PORT) else free_port()


def require_free(port: int) -> None:
    """Raise ConfigError if a process on this machine listens at ``port``."""
    if not _is_free(port):
        raise ConfigError(
            f"port {port} on {socket.gethostname()} is already in use, perhaps by another run; choose "
            "another with --master-port"
        )


def _failed(rank: int, failure: ProcessFailure) -> Ended:
    who = f"rank {rank} (process {failure.pid} on {socket.gethostname()})"
    if failure.exitcode >= 0:
        return Ended(failure.exitcode, f"{who} failed with exit code {failure.exitcode}")
    name = signal.Signals(-failure.exitcode).name
    return Ended(128 - failure.exitcode, f"{who} was ended by {name}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _arguments(node: Node, program: Program, directory: Path) -> list[str]:
    return [
        *(f"--nnodes={node.count}", f"--node-rank={node.index}", f"--nproc-per-node={node.ranks}"),
        *(f"--master-addr={node.address}", f"--master-port={node.port}", f"--log-dir={directory}"),
        *(["--redirects=3"] if program.is_quiet else []),  # into files of the log directory
        *(["--module"] if program.module else []),
        *(program.name, *program.arguments),
    ]
