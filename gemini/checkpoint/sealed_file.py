"""Files that are written once, made durable, and remembered by size and checksums."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gemini.checkpoint.part import BLOCK_BYTES, Part, joined, parts_of
from gemini.checkpoint.staging import StagedFile, Staging, write_at
from gemini.errors import CheckpointError, IoError, in_words


class DamagedError(CheckpointError):
    """A checkpoint, or a file of it, is not what was written: an older one may be whole."""


class UnreadableError(DamagedError):
    """This user may not read a checkpoint, or a file of it: it may be whole."""


def cannot_read(path: Path, error: OSError) -> DamagedError:
    """Return what to raise where ``path`` could not be read."""
    message = f"cannot read {path}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return UnreadableError(
            f"{message}; checkpoints are for their owner alone: read it as that user, or have its "
            "permissions changed"
        )
    return DamagedError(message)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into what :func:`cannot_read` returns."""
    try:
        yield
    except OSError as error:
        raise cannot_read(path, error) from error


@contextmanager
def making_sense_of(path: Path) -> Iterator[None]:
    """Turn what is raised inside the block for data that cannot be into a DamagedError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} is damaged: {in_words(error)}") from error


class Seal(NamedTuple):
    """What a file must have to be the one that was written: so many bytes, and a CRC32C for each block."""

    num_bytes: int
    blocks: list[int]

    @classmethod
    def of(cls, data: bytes) -> Seal:
        """Return the seal of a file that holds ``data``."""
        return cls(len(data), [part.crc32c for part in parts_of(memoryview(data), 0)])

    @classmethod
    def read(cls, value: Any) -> Seal:
        """Return the seal that JSON data says. Raises ValueError, TypeError."""
        num_bytes, blocks = value
        if not (type(num_bytes) is int and 0 < num_bytes < 2**63 and isinstance(blocks, list)):
            raise ValueError(f"{value!r:.200} is no size and checksums")
        if len(blocks) != -(-num_bytes // BLOCK_BYTES):
            raise ValueError(f"a file of {num_bytes} bytes has not {len(blocks)} blocks")
        if not all(type(checksum) is int and 0 <= checksum < 2**32 for checksum in blocks):
            raise ValueError("a checksum has 32 bits")
        return cls(num_bytes, blocks)


class SealedFile:
    """A new file, private (mode 0600) if nothing else is said, written at any place in any order; durable
    once :meth:`finish` returns. A ``shared`` one is written by several processes: each opens it and writes
    other bytes.

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
        private: bool = True,
    ) -> None:
        """``staging``: what large files are written through; a small one is written at once.
        ``several_hosts``: processes on other machines share the file. ``private``: nobody else may read it;
        else the umask says who may."""
        self.path = path
        self._parts: list[Part] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if shared else os.O_EXCL)
        if several_hosts:
            # A client of NFS may extend a write to the begin of the page, over what another host wrote there,
            # unless it is synchronous. What goes past the page cache is not concerned.
            flags |= os.O_DSYNC
        with _io_error("create", path, 0):
            self._descriptor = os.open(path, flags, 0o600 if private else 0o666)
        self._staged = StagedFile(path, self._descriptor, staging) if staging is not None else None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write ``data``, all of it, at ``offset``. No byte of the file may be written twice."""
        with _io_error("write", self.path, offset):
            if self._staged is not None:
                self._staged.write(memoryview(data), offset)
            else:
                self._parts += parts_of(memoryview(data), offset)
                write_at(self._descriptor, memoryview(data), offset)

    def lend(self, data: memoryview, offset: int) -> None:
        """Write ``data`` as :meth:`write` does, if possible without a copy: it must stay as it is until
        :meth:`settle` has returned. For files with ``staging``."""
        assert self._staged is not None
        with _io_error("write", self.path, offset):
            self._staged.lend(data, offset)

    def settle(self) -> None:
        """Wait until nothing that was lent is in use any more."""
        assert self._staged is not None
        with _io_error("write", self.path, 0):
            self._staged.settle()

    def finish(self) -> list[Part]:
        """Make the file durable, close it, and return what was written here, in order, adjoining parts of a
        block as one."""
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
    blocks, end = joined(parts), 0
    for block in blocks:
        if block.offset != end:
            raise CheckpointError(
                f"{path}: after its first {end} bytes come those from {block.offset} on: not each byte was "
                "written once"
            )
        end += block.num_bytes
    if not blocks:
        raise CheckpointError(f"{path}: none of its bytes were written")
    return Seal(end, [block.crc32c for block in blocks])


def write_sealed(path: Path, data: bytes) -> Seal:
    """Write a small file as a whole; return its seal."""
    file = SealedFile(path)
    try:
        file.write(data, 0)
        return sealed(path, file.finish())
    finally:
        file.close()


def check_size(path: Path, seal: Seal) -> None:
    """Raise DamagedError unless the file has as many bytes as its seal; what they are is not looked at."""
    with reading(path):
        found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"{path} is damaged: it is no regular file")
    size = found.st_size
    if size != seal.num_bytes:
        raise DamagedError(f"{path} is damaged: it has {size} bytes, {seal.num_bytes} were written")


@contextmanager
def _io_error(doing: str, path: Path, offset: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        message = f"cannot {doing} the checkpoint: {error.strerror or error}"
        at = error.filename2 if isinstance(error.filename2, int) else offset
        raise IoError(code, message, str(path), at) from error
