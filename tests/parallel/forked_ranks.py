"""Ranks that torchrun might have started, forked from a process that has imported torch: a program on this
machine, or a job on the hosts of ``hosts.py``."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from hosts import WIRE, Host
from processes import start_process
from torch.distributed import TCPStore

from gemini.parallel.launch.launching import free_port

_SPACES = ("net", "pid", "uts", "ipc", "mnt")  # those of a host; the last one takes /proc away
_PORT = 29500
_PROGRAM_SECONDS = 240.0
_END_SECONDS = 30.0  # in which the ranks of all hosts end


@dataclass(frozen=True)
class Ended:
    """How a job ended on one host: ``returncode`` None where it was still running."""

    returncode: int | None
    seconds: float
    output: str


@dataclass(frozen=True)
class Job:
    """What runs on each host: ``program(*arguments)``, at the top level of a module, on so many ``ranks``."""

    program: Callable[..., None]
    arguments: tuple[Any, ...]
    ranks: int
    environment: dict[str, str]


def launch(hosts: tuple[Host, Host], job: Job, *, directory: Path, timeout: float) -> list[Ended]:
    """Run a job as torchrun would, but by processes that have imported torch already; return how it ended on
    each host, what has not ended within ``timeout`` seconds included: that ends with its host. ``directory``
    gets the outputs."""
    begin = time.monotonic()
    ended = []
    with ExitStack() as stack:
        started = []
        for number in range(len(hosts)):
            output = directory / f"{hosts[number].name}-{time.monotonic_ns()}.txt"
            process = start_process(_on_host, (hosts, number, job, output))
            stack.callback(process.join)
            stack.callback(process.kill)
            started.append((process, output))
        for process, output in started:
            process.join(max(0.0, begin + timeout - time.monotonic()))
            ended.append(Ended(process.exitcode, time.monotonic() - begin, output.read_text()))
    return ended


def run_program(path: Path, *arguments: str, ranks: int) -> str:
    """Run a program with so many ranks on this machine; return what they have printed."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = start_process(_run_here, (path, arguments, ranks, Path(output.name)))
        process.join(_PROGRAM_SECONDS)
        process.kill()
        process.join()
        said = output.read()
    assert process.exitcode == 0, said
    return said


def _run_here(path: Path, arguments: tuple[str, ...], ranks: int, output: Path) -> None:
    _write_to(output)
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    sys.argv = [str(path), *arguments]
    run = partial(runpy.run_path, str(path), run_name="__main__")
    if not _all_end_well(_start_ranks(run, ranks, 0, ranks, ("localhost", free_port()))):
        raise SystemExit(1)


def _on_host(hosts: tuple[Host, Host], number: int, job: Job, output: Path) -> None:
    """Be the launcher of a host."""
    _write_to(output)
    _enter(hosts[number])
    os.environ.update(job.environment, GLOO_SOCKET_IFNAME=WIRE, TP_SOCKET_IFNAME=WIRE)
    # Only children are in the namespace of processes.
    _exit_as(_forked(lambda: _run_ranks(hosts, number, job)))


def _enter(host: Host) -> None:
    """Move this process, which has one thread, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{host.pid}/ns/{name}", os.O_RDONLY) for name in _SPACES]
    for space in spaces:
        if libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {host.name}")
        os.close(space)


def _run_ranks(hosts: tuple[Host, Host], number: int, job: Job) -> None:
    """Start the ranks of a host and hold the store that all meet in, on the first host; fail as they do."""
    everywhere, run = len(hosts) * job.ranks, partial(job.program, *job.arguments)
    pids = _start_ranks(run, job.ranks, number * job.ranks, everywhere, (hosts[0].address, _PORT))
    store = TCPStore(hosts[0].address, _PORT, is_master=number == 0, wait_for_workers=False)
    if not _all_end_well(pids):
        raise SystemExit(1)
    store.set(f"host {number} ended", "")
    if number == 0:  # the store goes with this process
        store.wait([f"host {each} ended" for each in range(len(hosts))], timedelta(seconds=_END_SECONDS))


def _start_ranks(
    run: Callable[[], Any], here: int, first: int, everywhere: int, store: tuple[str, int]
) -> list[int]:
    """Have ranks ``run`` on this machine, with the variables that torchrun sets; return their processes."""
    pids = []
    for local in range(here):
        place = {
            "RANK": first + local,
            "LOCAL_RANK": local,
            "WORLD_SIZE": everywhere,
            "LOCAL_WORLD_SIZE": here,
        }
        place |= {"LOCAL_WORLD_SIZE": here, "MASTER_ADDR": store[0], "MASTER_PORT": store[1]}
        pids.append(_forked(partial(_run_rank, run, place)))
    return pids


def _run_rank(run: Callable[[], Any], place: dict[str, Any]) -> None:
    os.environ.update({name: str(value) for name, value in place.items()})
    run()


def _all_end_well(pids: list[int]) -> bool:
    """Wait for ranks; end the others when one has failed, and say whether none has."""
    left, well = set(pids), True
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status != 0 and well:
            well = False
            for other in left:
                os.kill(other, signal.SIGKILL)
    return well


def _write_to(output: Path) -> None:
    """Have what this process and its children print in a file."""
    with output.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _forked(run: Callable[[], None]) -> int:
    """Return the process that calls ``run`` and ends, with 1 if that raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_as(pid: int) -> None:
    """End as a child does."""
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
