"""fio as a contender: a process per pass, timed by itself."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from typing import Any

from gemini.errors import StateError
from gemini_bench.io_settings import Settings
from gemini_bench.io_turns import READ, WRITE, Mover

INSTALL = "is not installed: apt-get install fio"
_TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Job:
    """How fio moves the bytes: ``num_jobs`` threads share the file, each with a part in a row of its own."""

    engine: str
    num_jobs: int = 1
    direct: bool = True

    @property
    def name(self) -> str:
        """What the contender is called."""
        return f"fio {self.engine}" if self.num_jobs == 1 else f"fio {self.engine} x {self.num_jobs}"


def shared_by(most: int, settings: Settings) -> int:
    """Return the largest number of jobs, at most ``most``, among which the blocks divide evenly."""
    blocks = settings.size_bytes // settings.block_bytes
    return next(count for count in range(most, 0, -1) if blocks % count == 0)


def engines() -> frozenset[str]:
    """Return the engines of the fio that is installed; none where there is no fio."""
    program = shutil.which("fio")
    if program is None:
        return frozenset()
    done = subprocess.run([program, "--enghelp"], capture_output=True, text=True, timeout=60, check=False)
    return frozenset(done.stdout.split())


def version() -> str:
    """Return what the installed fio calls itself."""
    done = subprocess.run(["fio", "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def fio_mover(job: Job, descriptor: int, settings: Settings) -> Mover:
    """Return fio as a contender on the file that ``descriptor`` of this process is open on."""
    return Mover(
        job.name,
        partial(_run, job, descriptor, settings, WRITE),
        partial(_run, job, descriptor, settings, READ),
    )


def arguments(job: Job, descriptor: int, settings: Settings, direction: str) -> list[str]:
    """Return the command: the fastest way that fio has with this engine, block size and depth.

    Each job has buffers for its requests only, allocated and filled before its clock starts.
    """
    share = settings.size_bytes // job.num_jobs
    command = [
        "fio",
        f"--name={direction}",
        # Not a name: the file has none, and fio inherits the descriptor.
        f"--filename=/proc/self/fd/{descriptor}",
        f"--rw={direction}",
        f"--ioengine={job.engine}",
        f"--bs={settings.block_bytes}",
        f"--iodepth={settings.depth}",
        f"--direct={int(job.direct)}",
        f"--size={share}",
        f"--offset_increment={share}",
        f"--numjobs={job.num_jobs}",
        "--thread",
        "--fallocate=none",
        "--gtod_reduce=1",
        "--scramble_buffers=0",
        "--output-format=json",
    ]
    if job.engine == "io_uring":
        command += ["--fixedbufs=1", "--registerfiles=1"]
    return command


def _run(job: Job, descriptor: int, settings: Settings, direction: str) -> float:
    command = arguments(job, descriptor, settings, direction)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
        pass_fds=[descriptor],
    )
    if done.returncode != 0:
        raise StateError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-1000:]}")
    return seconds(done.stdout, direction, settings.size_bytes)


def seconds(output: str, direction: str, size_bytes: int) -> float:
    """Return the time of the slowest job from fio's report; it counts whole milliseconds.

    Raises:
        StateError: fio did not move all bytes.
    """
    report: dict[str, Any] = json.loads(output[output.index("{") :])
    jobs = [job[direction] for job in report["jobs"]]
    moved = sum(job["io_bytes"] for job in jobs)
    if moved != size_bytes:
        raise StateError(f"fio moved {moved} bytes instead of {size_bytes}")
    return max(1, *(int(job["runtime"]) for job in jobs)) / 1000.0
