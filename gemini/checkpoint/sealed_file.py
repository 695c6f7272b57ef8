"""Files that are written once, made durable, and remembered by size and checksum."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


class Part(NamedTuple):
    """Bytes of a file that one process has written, one after the other from ``offset`` on."""

    offset: int
    num_bytes: int
    crc32c: int


class SealedFile:
    """A new private file (mode 0600), written at any place in any order; durable once :meth:`finish` returns.
    A ``shared`` one is written by several processes: each opens it and writes other bytes.

    Every failure is an :class:`gemini.errors.IoError` with path and offset. Not thread-safe.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self._parts: dict[int, Part] = {}  # by offset
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if shared else os.O_EXCL)
        with _io_error("create", path, 0):
            self._descriptor = os.open(path, flags, 0o600)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write ``data``, all of it, at ``offset``. No byte of the file may be written twice."""
        rest, at = memoryview(data), offset
        self._parts[offset] = Part(offset, rest.nbytes, crc32c(rest))
        while rest:
            with _io_error("write", self.path, at):
                written = os.pwrite(self._descriptor, rest, at)
            rest, at = rest[written:], at + written

    def finish(self) -> list[Part]:
        """Make the file durable, close it, and return what was written here, in order, adjoining parts as
        one."""
        try:
            with _io_error("sync", self.path, 0):
                os.fsync(self._descriptor)
        finally:
            self.close()
        return joined(self._parts.values())

    def close(self) -> None:
        """Close the file, finished or not. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` in order of their offsets, those that adjoin as one."""
    runs: list[list[Part]] = []
    for part in sorted(parts):
        if runs and sum(runs[-1][-1][:2]) == part.offset:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        Part(run[0].offset, sum(part.num_bytes for part in run), combined(part[1:] for part in run))
        for run in runs
    ]


def sealed(path: Path, parts: Iterable[Part]) -> Seal:
    """Return the seal of a file of which ``parts`` were written.

    Raises:
        CheckpointError: they are not all of it, each byte once.
    """
    whole = joined(parts)
    if len(whole) != 1 or whole[0].offset != 0:
        runs = [(part.offset, part.offset + part.num_bytes) for part in whole]
        raise CheckpointError(f"{path}: of its bytes those written are {runs}, not each one once")
    return Seal(whole[0].num_bytes, whole[0].crc32c)


def write_sealed(path: Path, data: bytes) -> Seal:
    """Write a small file as a whole; return its seal."""
    file = SealedFile(path)
    try:
        file.write(data, 0)
        return sealed(path, file.finish())
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
