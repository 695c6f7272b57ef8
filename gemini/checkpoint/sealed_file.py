"""Files that are written once, made durable, and remembered by size and checksum."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemini.checkpoint.checksum import combined, crc32c
from gemini.checkpoint.part import Part, joined
from gemini.checkpoint.read_ahead import BLOCK_BYTES, ReadAhead, open_direct
from gemini.checkpoint.staging import StagedFile, Staging, write_at
from gemini.errors import CheckpointError, IoError


class DamagedError(CheckpointError):
    """A checkpoint, or a file of it, is not what was written: an older one may be whole."""


@dataclass(frozen=True)
class Seal:
    """What a file must have to be the one that was written."""

    num_bytes: int
    crc32c: int


class SealedFile:
    """A new private file (mode 0600), written at any place in any order; durable once :meth:`finish` returns.
    A ``shared`` one is written by several processes: each opens it and writes other bytes.

    Every failure is an :class:`gemini.errors.IoError` with path and offset; with ``staging`` a later call may
    raise it. Not thread-safe.
    """

    def __init__(
        self,
        path: Path,
        staging: Staging | None = None,
        *,
        shared: bool = False,
        several_hosts: bool = False,
    ) -> None:
        """``staging``: what large files are written through; a small one is written at once.
        ``several_hosts``: processes on other machines share the file."""
        self.path = path
        self._parts: list[Part] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if shared else os.O_EXCL)
        if several_hosts:
            # A client of NFS may extend a write to the begin of the page, over what another host wrote there,
            # unless it is synchronous. What goes past the page cache is not concerned.
            flags |= os.O_DSYNC
        with _io_error("create", path, 0):
            self._descriptor = os.open(path, flags, 0o600)
        self._staged = StagedFile(path, self._descriptor, staging) if staging is not None else None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write ``data``, all of it, at ``offset``. No byte of the file may be written twice."""
        with _io_error("write", self.path, offset):
            if self._staged is not None:
                self._staged.write(memoryview(data), offset)
            else:
                self._parts.append(Part.of(memoryview(data), offset))
                write_at(self._descriptor, memoryview(data), offset)

    def finish(self) -> list[Part]:
        """Make the file durable, close it, and return what was written here, in order, adjoining parts as
        one."""
        try:
            if self._staged is not None:
                with _io_error("write", self.path, 0):
                    self._parts = self._staged.finish()
            with _io_error("sync", self.path, 0):
                os.fsync(self._descriptor)
        finally:
            self.close()
        return joined(self._parts)

    def close(self) -> None:
        """Close the file, finished or not. Idempotent."""
        if self._staged is not None:
            self._staged.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


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


def check_seal(path: Path, seal: Seal, ahead: ReadAhead | None = None) -> None:
    """Compare a file's size with its seal; its content, too, where there is something to read it with.

    Raises:
        DamagedError: the file is missing, unreadable, or another one than was written.
    """
    try:
        size = path.stat().st_size
        checksum = _checksum(path, size, ahead) if ahead and size == seal.num_bytes else seal.crc32c
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from error
    if size != seal.num_bytes:
        raise DamagedError(f"{path} is damaged: it has {size} bytes, {seal.num_bytes} were written")
    if checksum != seal.crc32c:
        raise DamagedError(f"{path} is damaged: its {size} bytes are not those that were written")


def _checksum(path: Path, size: int, ahead: ReadAhead) -> int:
    descriptor = open_direct(path)
    try:
        blocks = (ahead.block(descriptor, index, size) for index in range(-(-size // BLOCK_BYTES)))
        return combined((len(block), crc32c(block.data)) for block in blocks)
    finally:
        ahead.forget(descriptor)
        os.close(descriptor)


@contextmanager
def _io_error(doing: str, path: Path, offset: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        message = f"cannot {doing} the checkpoint: {error.strerror or error}"
        at = error.filename2 if isinstance(error.filename2, int) else offset
        raise IoError(code, message, str(path), at) from error
