"""The memory that the control groups of this process leave it: containers, Slurm jobs, systemd units."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str  # the line of memory.stat: file pages that the kernel takes back first


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def free_bytes() -> int | None:
    """Return what the tightest of the process's control groups and those above them leaves; None without a
    limit."""
    left = [_left(group, files) for group, files in _groups()]
    return min((nbytes for nbytes in left if nbytes is not None), default=None)


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Yield the groups that count this process's memory, each before the one above it; those that can be seen
    from within a container."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        mounts: tuple[Path, ...] = ()
        files = _V2
        if not controllers:
            mounts = (MOUNTS, MOUNTS / "unified")
        elif "memory" in controllers.split(","):
            mounts, files = (MOUNTS / "memory",), _V1
        for mount in mounts:
            group = mount / path.lstrip("/")
            for place in (group, *group.parents):
                if place.is_relative_to(mount):
                    yield place, files


def _left(group: Path, files: _Files) -> int | None:
    try:
        limit, usage = (group / files.limit).read_text().strip(), (group / files.usage).read_text().strip()
        stat = (group / "memory.stat").read_text()
    except OSError:
        return None
    if not (limit.isdigit() and usage.isdigit()):
        return None  # "max"
    words = dict(line.partition(" ")[::2] for line in stat.splitlines())
    return max(0, int(limit) - int(usage) + int(words.get(files.reclaimable, 0)))
