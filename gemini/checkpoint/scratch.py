"""Directories next to what is being made, which becomes it by a rename; those of killed processes go."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemini.system.directory_lock import DirectoryLock

_RANDOM = "[a-z0-9_]{8}"  # what tempfile adds


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield an empty private directory next to ``target``, which is removed on leaving the block.

    Those for the same ``target`` that no process holds any more are removed first. Raises OSError.
    """
    _remove_leftovers(target)
    scratch, lock = _make(target)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


def _prefix(target: Path) -> str:
    return f".{target.name}.gemini-"  # nobody else's


def _make(target: Path) -> tuple[Path, DirectoryLock]:
    """Return a new directory, locked."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        with suppress(FileNotFoundError, BlockingIOError):  # another process has taken it for a leftover
            lock = DirectoryLock(scratch)
            if scratch.exists():
                return scratch, lock
            lock.release()


def _remove_leftovers(target: Path) -> None:
    name = re.compile(re.escape(_prefix(target)) + _RANDOM)
    found: list[Path] = []
    with suppress(PermissionError):  # a directory that may be written need not be readable
        found += (path for path in target.parent.iterdir() if name.fullmatch(path.name))
    for path in found:
        # It stays: its process is alive, another user's, no directory, or just removed by its process.
        with suppress(OSError):
            lock = DirectoryLock(path)
            try:
                if lock.is_exclusive:
                    shutil.rmtree(path)
            finally:
                lock.release()
