"""Files that are written once, made durable, and remembered by size and checksum."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemini.checkpoint.checksum import combined, crc32c
from gemini.errors import CheckpointError, IoError

_READ_BYTES = 4 * 2**20


class DamagedError(CheckpointError):
    """A checkpoint, or a file of it, is not what was written: an older one may be whole."""


@dataclass(frozen=True)
class Seal:
    """What a file must have to be the one that was written."""

    num_bytes: int
    crc32c: int


class SealedFile:
    """A new private file (mode 0600), written at any place in any order; durable once :meth:`finish` returns.

    Every failure is an :class:`gemini.errors.IoError` with path and offset. Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts: dict[int, tuple[int, int]] = {}  # by offset: bytes, checksum
        with _io_error("create", path, 0):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write ``data``, all of it, at ``offset``. No byte of the file may be written twice."""
        rest, at = memoryview(data), offset
        self._parts[offset] = (rest.nbytes, crc32c(rest))
        while rest:
            with _io_error("write", self.path, at):
                written = os.pwrite(self._descriptor, rest, at)
            rest, at = rest[written:], at + written

    def finish(self) -> Seal:
        """Make the file durable, close it, and return its seal."""
        try:
            with _io_error("sync", self.path, 0):
                os.fsync(self._descriptor)
        finally:
            self.close()
        parts, end = sorted(self._parts.items()), 0
        for offset, (num_bytes, _) in parts:
            assert offset == end, f"{self.path}: bytes {end} to {offset} were not written"
            end += num_bytes
        return Seal(end, combined(part for _, part in parts))

    def close(self) -> None:
        """Close the file, finished or not. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_sealed(path: Path, data: bytes) -> Seal:
    """Write a small file as a whole; return its seal."""
    file = SealedFile(path)
    try:
        file.write(data, 0)
        return file.finish()
    finally:
        file.close()


def check_seal(path: Path, seal: Seal, *, content: bool) -> None:
    """Compare a file's size, and its ``content`` if asked, with its seal.

    Raises:
        DamagedError: the file is missing, unreadable, or another one than was written.
    """
    try:
        size = path.stat().st_size
        checksum = _checksum(path) if content and size == seal.num_bytes else seal.crc32c
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from error
    if size != seal.num_bytes:
        raise DamagedError(f"{path} is damaged: it has {size} bytes, {seal.num_bytes} were written")
    if checksum != seal.crc32c:
        raise DamagedError(f"{path} is damaged: its {size} bytes are not those that were written")


def _checksum(path: Path) -> int:
    return combined((len(block), crc32c(block)) for block in _blocks(path))


def _blocks(path: Path) -> Iterator[memoryview]:
    """Yield the file piece by piece; each is overwritten by the next."""
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_READ_BYTES))
        while count := file.readinto(buffer):
            yield buffer[:count]


@contextmanager
def _io_error(doing: str, path: Path, offset: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        message = f"cannot {doing} the checkpoint: {error.strerror or error}"
        raise IoError(code, message, str(path), offset) from error
