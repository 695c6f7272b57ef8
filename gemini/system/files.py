"""Safe file access. A failed write is an IoError that says what failed, and leaves no partial file. Reads
accept only regular files of limited size that name their format. A lock can reserve a directory for one
process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemini.errors import IoError, printable
from gemini.system.config import format_bytes

logger = logging.getLogger(__name__)

KEY = "format"  # the key of a document's format
_MOST_DIGITS = 6


@contextmanager
def io_errors(doing: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError inside the block into an IoError: ``cannot <doing>``, the reason, ``path``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise IoError(error.errno or 0, f"cannot {doing}: {reason}", os.fspath(path)) from error


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading and return the descriptor; ``flags``: further flags of ``os.open``.
    With ``os.O_NOFOLLOW`` a link is refused.

    Raises OSError, also if it is not a regular file: a FIFO would block its reader indefinitely, and opening
    a device may have effects.
    """
    _require_regular(path.stat(follow_symlinks=not flags & os.O_NOFOLLOW), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        _require_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, max_bytes: int, flags: int = 0) -> bytes:
    """Return the contents of a file. Raises OSError like :func:`open_regular`, and if it has more than
    ``max_bytes``.
    """
    descriptor = open_regular(path, flags)
    try:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than {format_bytes(max_bytes)}", str(path)
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(descriptor)


def parse_json(text: bytes | str) -> Any:
    """Return the value of JSON text; bytes must be UTF-8. Raises ValueError if it is invalid."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _require_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {what}", str(path))


def append_whole(path: Path, data: bytes) -> None:
    """Append all of ``data``, or nothing. Raises OSError, also if ``path`` is not a regular file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        _require_regular(os.fstat(file.fileno()), path)
        end = file.tell()
        try:
            if file.write(data) != len(data):  # a raw write may be short when space runs out
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


@dataclass(frozen=True)
class Format:
    """A document format with a ``name`` and ``version``; each document has both, as in ``gemini-trace-2``.

    ``older``: for versions that are no longer read, the reason and what to do.
    """

    name: str
    version: int
    older: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.version}"

    def version_of(self, document: Any) -> int | None:
        """Return the version in ``document``; None if it is not of this format."""
        said = document.get(KEY) if isinstance(document, dict) else None
        if not isinstance(said, str):
            return None
        match = re.fullmatch(rf"{re.escape(self.name)}-(\d{{1,{_MOST_DIGITS}}})", said, re.ASCII)
        return int(match[1]) if match else None

    def is_read(self, document: Any) -> bool:
        """Return whether ``document`` has the version that this release reads."""
        return self.version_of(document) == self.version

    def refusal(self, document: Any, what: object) -> str:
        """Return a one-line message that says what an unreadable ``document`` is; ``what`` names it."""
        version, where = self.version_of(document), printable(str(what))
        if version is None:
            return f"{where} is not a {self} file"
        said = f"{where} is a {self.name}-{version} file"
        if version > self.version:
            return (
                f"{said}, written by a newer version of gemini-runtime; this one reads {self}: install the "
                "newer one (pip install -U gemini-runtime)"
            )
        why = self.older.get(version)
        return f"{said} of an earlier release, which this one does not read{f': {why}' if why else ''}"


class DirectoryLock:
    """Keeps other processes out of a directory until :meth:`release`; the kernel releases it if the process
    dies.

    ``is_exclusive``: False if the file system has no locks, so that nothing is kept out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Take the lock. Raises BlockingIOError if another process has it, OSError if the directory does not
        exist.
        """
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._owner = os.getpid()
        self.is_exclusive = True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise
        except OSError as error:
            self.is_exclusive = False
            logger.info("%s cannot be locked (%s): nothing keeps a second process out", path, error)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor is None:
            return
        if os.getpid() == self._owner:  # a forked child shares the lock and must not release the parent's
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None
