"""Directories next to what is being made, which becomes it by a rename; those of killed processes go."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_RANDOM = "[a-z0-9_]{8}"  # what tempfile adds


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield an empty private directory next to ``target``, which is removed on leaving the block.

    Those for the same ``target`` that no process holds any more are removed first. Raises OSError.
    """
    _remove_leftovers(target)
    scratch, descriptor = _make(target)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _prefix(target: Path) -> str:
    return f".{target.name}.gemini-"  # nobody else's


def _make(target: Path) -> tuple[Path, int]:
    """Return a new directory, and what keeps it locked; the kernel ends that with the process."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        with suppress(FileNotFoundError):  # another process has taken it for a leftover
            descriptor = os.open(scratch, os.O_RDONLY | os.O_CLOEXEC)
            if _lock(descriptor) is not False and scratch.exists():
                return scratch, descriptor
            os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Lock a directory; return False where another process has, None where locks cannot be had there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.info("a directory cannot be locked (%s): no leftovers are removed there", error)
        return None
    return True


def _remove_leftovers(target: Path) -> None:
    name = re.compile(re.escape(_prefix(target)) + _RANDOM)
    found: list[Path] = []
    with suppress(PermissionError):  # a directory that may be written need not be readable
        found += (path for path in target.parent.iterdir() if name.fullmatch(path.name))
    for path in found:
        with suppress(OSError):  # it stays: another user's, no directory, or just removed by its process
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _lock(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)
