"""Writing files: every failure is an IoError that says what could not be done, and leaves no half file."""

from __future__ import annotations

import errno
import os
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


@contextmanager
def replacing(path: Path, doing: str) -> Iterator[Path]:
    """Yield a temporary name to write; on leaving the block it becomes ``path``. Raises IoError."""
    temporary = path.with_name(path.name + ".tmp")
    with io_errors(doing, path):
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def append_whole(path: Path, data: bytes) -> None:
    """Append all of ``data``, or nothing of it. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) != len(data):  # a raw write may be short where the space ends
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise
