"""Writing files: every failure is an IoError that says what could not be done, and leaves no half file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gemini.errors import IoError


@contextmanager
def io_errors(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError inside the block into an IoError: ``cannot <doing>``, the reason, ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise IoError(error.errno or 0, f"cannot {doing}: {reason}", os.fspath(path)) from error


def temporary_of(path: Path) -> Path:
    """Return the name under which :func:`replacing` writes a file; a kill leaves it behind."""
    return path.with_name(path.name + ".tmp")


@contextmanager
def replacing(path: Path, doing: str) -> Iterator[Path]:
    """Yield a temporary name to write; on leaving the block it becomes ``path``. Raises IoError."""
    temporary = temporary_of(path)
    with io_errors(doing, path):
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return what a file holds.

    Raises OSError, too, for what is no regular file (a FIFO would keep its reader waiting for ever) and for
    more than ``max_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        _require_regular(found, path)
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, more than {max_bytes}", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(descriptor)


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def append_whole(path: Path, data: bytes) -> None:
    """Append all of ``data``, or nothing of it. Raises OSError, too, for what is no regular file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        _require_regular(os.fstat(file.fileno()), path)
        end = file.tell()
        try:
            if file.write(data) != len(data):  # a raw write may be short where the space ends
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise
