"""Run a program in its own process and watch its resident memory from outside.

The runtime resets the kernel's high-water mark (VmHWM) while it measures non-model memory, so a peak that
counts must be sampled by someone else: the parent reads ``/proc/<pid>/statm`` every few milliseconds.
"""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ERROR_TAIL_CHARS = 2000


class Ending(enum.Enum):
    """How a watched process ended."""

    FINISHED = "finished"  # exit code 0
    FAILED = "failed"  # any other exit code, or a signal that the watch did not send
    OVER_LIMIT = "over the memory limit"  # killed by the watch
    OUT_OF_TIME = "out of time"  # killed by the watch
    STOPPED = "stopped"  # killed by the watch, which was told to


@dataclass(frozen=True)
class WatchedRun:
    """The outcome of a watched process. ``peak_rss_bytes`` is the highest sample; a shorter peak may be
    missed.
    """

    ending: Ending
    exit_code: int
    seconds: float
    peak_rss_bytes: int
    output: str
    error_tail: str


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident bytes of a process, 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[1]) * _PAGE_BYTES


def run_watched(
    command: Sequence[str],
    *,
    limit_bytes: int | None = None,
    sample_seconds: float = 0.002,
    timeout_seconds: float = 3600.0,
    stop: threading.Event | None = None,
    environ: Mapping[str, str] | None = None,
) -> WatchedRun:
    """Run ``command`` to its end, or kill it once a sample of its resident memory exceeds ``limit_bytes`` or
    ``stop`` is set.

    The process gets SIGKILL, with all that it has started, also when this function is left by an exception
    (Ctrl-C): none outlives the call. Memory of its children is not counted. ``environ``: its environment;
    None: this process's.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environ,
            start_new_session=True,  # to be killed with its children
        )
        start = time.monotonic()
        peak = 0
        killed: Ending | None = None
        try:
            while process.poll() is None:
                peak = max(peak, resident_bytes(process.pid))
                if limit_bytes is not None and peak > limit_bytes:
                    killed = Ending.OVER_LIMIT
                elif time.monotonic() - start > timeout_seconds:
                    killed = Ending.OUT_OF_TIME
                elif stop is not None and stop.is_set():
                    killed = Ending.STOPPED
                if killed is not None:
                    break
                time.sleep(sample_seconds)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return WatchedRun(
            ending=killed or (Ending.FINISHED if code == 0 else Ending.FAILED),
            exit_code=code,
            seconds=time.monotonic() - start,
            peak_rss_bytes=peak,
            output=_text(output),
            error_tail=_text(errors)[-_ERROR_TAIL_CHARS:],
        )


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
