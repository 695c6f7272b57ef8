"""Files that are written once, made durable, and remembered by size and checksum."""

from __future__ import annotations

import errno
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gemini.errors import CheckpointError, IoError

_READ_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Seal:
    """What a file must have to be the one that was written."""

    num_bytes: int
    crc32: int


class SealedFile:
    """A new private file (mode 0600), written front to back; durable once the ``with`` block ends.

    Every failure is an :class:`gemini.errors.IoError` with path and offset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._crc32 = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _io_error(error, "create", path, 0) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, all of it."""
        rest = memoryview(data)
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except OSError as error:
                raise _io_error(error, "write", self.path, self.num_bytes) from error
            self._crc32 = zlib.crc32(rest[:written], self._crc32)
            self.num_bytes += written
            rest = rest[written:]

    @property
    def seal(self) -> Seal:
        """Size and checksum of what was written so far."""
        return Seal(self.num_bytes, self._crc32)

    def __enter__(self) -> SealedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        except OSError as failed:
            raise _io_error(failed, "sync", self.path, self.num_bytes) from failed
        finally:
            os.close(self._descriptor)


def check_seal(path: Path, seal: Seal, *, content: bool) -> None:
    """Compare a file's size, and its ``content`` if asked, with its seal.

    Raises:
        CheckpointError: the file is missing, unreadable, or another one than was written.
    """
    try:
        size = path.stat().st_size
        crc32 = _checksum(path) if content and size == seal.num_bytes else seal.crc32
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if size != seal.num_bytes:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, {seal.num_bytes} were written")
    if crc32 != seal.crc32:
        raise CheckpointError(f"{path} is damaged: its {size} bytes are not those that were written")


def _checksum(path: Path) -> int:
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_READ_BYTES))
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


def _io_error(error: OSError, doing: str, path: Path, offset: int) -> IoError:
    code = error.errno or errno.EIO
    return IoError(code, f"cannot {doing} the checkpoint: {error.strerror or error}", str(path), offset)
