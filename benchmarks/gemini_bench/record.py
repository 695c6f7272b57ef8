"""The data that make a figure worth keeping: place, time, command, commit and target."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gemini import _C

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """One figure of the table.

    ``target`` is the largest good value, or with ``at_least`` the smallest; None: no target.
    """

    what: str
    value: float
    unit: str
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Return whether the target was reached; None if there is no target. NaN reaches no target."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target

    def to_dict(self) -> dict[str, Any]:
        """Return the row in the form of the JSON record."""
        sign = ">=" if self.at_least else "<="
        target = None if self.target is None else f"{sign} {self.target:g}"
        return {"what": self.what, "value": self.value, "unit": self.unit, "target": target, "met": self.met}


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Return hardware, versions, commit, date and load of this run as plain data."""
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        **_commit(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_threads": torch.get_num_threads(),
        "gemini": _C.build_info()["version"],
        "adam_isa": _C.adam_isa(),
    }


def _commit() -> dict[str, Any]:
    """Return the commit of the checkout and whether files differ from it; None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    changes = None if head is None else _git("status", "--porcelain")
    return {"commit": head, "uncommitted_changes": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    if not (_ROOT / ".git").exists():  # an installed package may lie inside somebody else's repository
        return None
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
