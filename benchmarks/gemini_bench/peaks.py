"""Peaks of a process's resident memory, phase by phase, sampled by a process beside it.

The sampler is ``python -m gemini_bench.peaks PID``: each line that it reads ends a phase, and is answered by
that phase's peaks. It ends with its input, and so with the process that it watches. Nothing but the standard
library is imported here.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_SAMPLE_SECONDS = 0.002
_KIB = 1024
_FIELDS = ("VmRSS:", "RssFile:")


class PhasePeaks:
    """The peaks of this process, by the names of phases; one that comes again is counted in.

    ``resident``: bytes; ``unmapped``: those without pages of mapped files, which the kernel drops and reads
    again as it needs memory.
    """

    def __init__(self) -> None:
        self.resident: dict[str, int] = {}
        self.unmapped: dict[str, int] = {}
        command = [sys.executable, "-m", "gemini_bench.peaks", str(os.getpid())]
        self._sampler = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def __enter__(self) -> PhasePeaks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sampler.communicate()

    def end(self, phase: str) -> None:
        """End the phase that began at the last call, and name it ``phase``."""
        assert self._sampler.stdin is not None
        assert self._sampler.stdout is not None
        self._sampler.stdin.write("\n")
        resident, unmapped = json.loads(self._sampler.stdout.readline())
        self.resident[phase] = max(self.resident.get(phase, 0), resident)
        self.unmapped[phase] = max(self.unmapped.get(phase, 0), unmapped)


def memory_of(pid: int | str = "self") -> tuple[int, int]:
    """Return a process's resident bytes, and those that are no pages of mapped files; zeros once it ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    sizes = {line.split()[0]: int(line.split()[1]) * _KIB for line in lines if line.startswith(_FIELDS)}
    resident, mapped = (sizes.get(field, 0) for field in _FIELDS)
    return resident, resident - mapped


def main(pid: int) -> None:
    """Sample a process, and answer each line of standard input with the peaks since the last one."""
    resident, unmapped = memory_of(pid)
    while True:
        asked = bool(select.select([sys.stdin], [], [], _SAMPLE_SECONDS)[0])
        now = memory_of(pid)
        resident, unmapped = max(resident, now[0]), max(unmapped, now[1])
        if not asked:
            continue
        if not os.read(sys.stdin.fileno(), 1):  # not readline(), whose buffer select() would not see
            return
        sys.stdout.write(json.dumps([resident, unmapped]) + "\n")
        sys.stdout.flush()
        resident, unmapped = memory_of(pid)


if __name__ == "__main__":
    main(int(sys.argv[1]))
