"""What files without a name take of a disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

INDEX_BYTES = 8 * 2**10
"""That the file system adds to a file in pieces."""


def disk_space(directory: Path) -> int:
    """Return what this process's files in a directory take of the disk; they have no names."""
    taken = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # what listed them
            if str(entry.readlink()).startswith(str(directory)):
                taken += entry.stat().st_blocks * 512
    return taken
