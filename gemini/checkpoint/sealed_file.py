"""Files that are written once, made durable, and verified by size and checksums.

Threads write large files past the page cache, from staging or directly from the caller's memory. Writing
through the page cache costs CPU time per page twice, takes memory from other programs, and leaves the disk
idle until the sync. Copying to staging took two thirds of the remaining time, so large contiguous values are
written without a copy.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gemini import _C
from gemini.errors import CheckpointError, IoError, in_words
from gemini.offload.async_file import direct_memory
from gemini.system.threads import Workers

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest power in the highest bit
_ONE = 1 << 31
# Every block of a file has its own checksum, so that each read can be verified by itself.
BLOCK_BYTES = 4 * 2**20


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC32C of ``data``; the GIL is released while it is computed."""
    raw = np.frombuffer(data, dtype=np.uint8)
    return _C.crc32c(raw.ctypes.data, raw.nbytes) if raw.nbytes else 0


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Combine (bytes, crc) pairs into the CRC of their concatenation."""
    whole = 0
    for num_bytes, checksum in parts:
        whole = _product(_shift(num_bytes), whole) ^ checksum
    return whole


def _product(left: int, right: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """Return x to the power of the number of bits: the factor of a CRC when ``num_bytes`` follow it."""
    power, square, bits = _ONE, _ONE >> 1, 8 * num_bytes
    while bits:
        if bits & 1:
            power = _product(power, square)
        square = _product(square, square)
        bits >>= 1
    return power


class Part(NamedTuple):
    """Contiguous bytes within one block of a file, written by one process."""

    offset: int
    num_bytes: int
    crc32c: int


def parts_of(data: memoryview, offset: int) -> list[Part]:
    """Return the parts of ``data`` written at ``offset``: one for each block that it touches."""
    parts = []
    while data:
        piece = data[: BLOCK_BYTES - offset % BLOCK_BYTES]
        parts.append(Part(offset, piece.nbytes, crc32c(piece)))
        data, offset = data[piece.nbytes :], offset + piece.nbytes
    return parts


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` sorted by offset, with adjoining parts of a block merged."""
    runs: list[list[Part]] = []
    for part in sorted(parts):
        if runs and sum(runs[-1][-1][:2]) == part.offset and part.offset % BLOCK_BYTES:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [
        Part(run[0].offset, sum(part.num_bytes for part in run), combined(part[1:] for part in run))
        for run in runs
    ]


_BLOCK_BYTES = 4096
_BUFFER_BYTES = 4 * 2**20
_NUM_BUFFERS = 4
_NUM_THREADS = 2
MEMORY_ALIGN = 512  # the alignment that devices need for memory that they read
_LENT_BYTES = 2**20  # smaller pieces are copied

Buffer = npt.NDArray[np.uint8]


class DamagedError(CheckpointError):
    """A checkpoint or one of its files differs from what was written; an older checkpoint may be intact."""


class UnreadableError(DamagedError):
    """This user may not read a checkpoint or one of its files; it may be intact."""


class OtherVersionError(UnreadableError):
    """Another version of this library wrote the checkpoint or file; it may be intact."""


def cannot_read(path: Path, error: OSError) -> DamagedError:
    """Return the error for a ``path`` that could not be read."""
    message = f"cannot read {path}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return UnreadableError(
            f"{message}; only the owner of a checkpoint can read it: read it as that user, or change "
            "its permissions"
        )
    return DamagedError(message)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into the error of :func:`cannot_read`."""
    try:
        yield
    except OSError as error:
        raise cannot_read(path, error) from error


@contextmanager
def making_sense_of(path: Path) -> Iterator[None]:
    """Turn errors from malformed data inside the block into a DamagedError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedError(f"{path} is damaged: {in_words(error)}") from error


class Seal(NamedTuple):
    """The size of a file and the CRC32C of each block, by which it is verified."""

    num_bytes: int
    blocks: list[int]

    @classmethod
    def of(cls, data: bytes) -> Seal:
        """Return the seal of a file that contains ``data``."""
        return cls(len(data), [part.crc32c for part in parts_of(memoryview(data), 0)])

    @classmethod
    def read(cls, value: Any) -> Seal:
        """Return the seal from JSON data. Raises ValueError, TypeError."""
        num_bytes, blocks = value
        if not (type(num_bytes) is int and 0 < num_bytes < 2**63 and isinstance(blocks, list)):
            raise ValueError(f"{value!r:.200} is no size and checksums")
        if len(blocks) != -(-num_bytes // BLOCK_BYTES):
            raise ValueError(f"a file of {num_bytes} bytes has not {len(blocks)} blocks")
        if not all(type(checksum) is int and 0 <= checksum < 2**32 for checksum in blocks):
            raise ValueError("a checksum has 32 bits")
        return cls(num_bytes, blocks)


class SealedFile:
    """A new file, written at any place in any order; durable once :meth:`finish` returns. Private (mode 0600)
    by default.

    Several processes may write a ``shared`` file: each opens it and writes other bytes. Every failure is an
    :class:`gemini.errors.IoError` with path and offset; with ``staging`` a later call may raise it. Not
    thread-safe.
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
        """Args:
        path: the file to create.
        staging: the buffers through which a large file is written; None writes a small file at once.
        shared: several processes write the file.
        several_hosts: some of these processes are on other machines.
        private: only this user may read the file; False: the umask decides.
        """
        self.path = path
        self._parts: list[Part] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if shared else os.O_EXCL)
        if several_hosts:
            # Unless writes are synchronous, an NFS client may extend one to the start of its page and
            # overwrite bytes of another host. Writes past the page cache are not affected.
            flags |= os.O_DSYNC
        with _io_error("create", path, 0):
            self._descriptor = os.open(path, flags, 0o600 if private else 0o666)
        self._staged = StagedFile(path, self._descriptor, staging) if staging is not None else None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``. No byte of the file may be written twice."""
        with _io_error("write", self.path, offset):
            if self._staged is not None:
                self._staged.write(memoryview(data), offset)
            else:
                self._parts += parts_of(memoryview(data), offset)
                write_at(self._descriptor, memoryview(data), offset)

    def lend(self, data: memoryview, offset: int) -> None:
        """Write ``data`` like :meth:`write`, without a copy if possible: it must not change until
        :meth:`settle` returns. Only with ``staging``.
        """
        assert self._staged is not None
        with _io_error("write", self.path, offset):
            self._staged.lend(data, offset)

    def settle(self) -> None:
        """Wait until no lent memory is in use."""
        assert self._staged is not None
        with _io_error("write", self.path, 0):
            self._staged.settle()

    def finish(self) -> list[Part]:
        """Make the file durable and close it. Return the written parts in order, adjoining parts of a block
        merged.
        """
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
    """Return the seal of a file that consists of ``parts``.

    Raises:
        CheckpointError: they do not cover each byte exactly once.
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
    """Write a small file in one call; return its seal."""
    file = SealedFile(path)
    try:
        file.write(data, 0)
        return sealed(path, file.finish())
    finally:
        file.close()


def check_size(path: Path, seal: Seal) -> None:
    """Raise DamagedError unless the file has the size in its seal. Its contents are not read."""
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


class Staging:
    """16 MiB of buffers and the writing threads, shared by all files of a checkpoint. For one thread at a
    time; close it.
    """

    def __init__(self) -> None:
        memory = direct_memory(_NUM_BUFFERS * _BUFFER_BYTES).numpy()
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for begin in range(0, len(memory), _BUFFER_BYTES):
            self._free.put(memory[begin : begin + _BUFFER_BYTES])
        self._filling: dict[StagedFile, None] = {}  # files with a partly filled buffer, oldest first
        self._workers = Workers(_NUM_THREADS)

    def take(self, file: StagedFile) -> Buffer:
        """Return a buffer for ``file`` to fill; blocks until one is free."""
        if self._free.empty() and self._filling:
            next(iter(self._filling)).flush()
        buffer = self._free.get()
        self._filling[file] = None
        return buffer

    def write(self, file: StagedFile, buffer: Buffer, begin: int, end: int) -> Future[None]:
        """Write bytes ``[begin, end)`` of ``file`` from a buffer that it has filled."""
        self._filling.pop(file)
        written = self._workers.submit(partial(file.write_out, buffer, begin, end))
        written.add_done_callback(lambda _: self._free.put(buffer))
        return written

    def write_lent(self, write: Callable[[], None]) -> Future[None]:
        """Run a write that needs no buffer on a writing thread."""
        return self._workers.submit(write)

    def give_back(self, file: StagedFile, buffer: Buffer) -> None:
        """Take back a buffer of ``file`` without writing it."""
        self._filling.pop(file)
        self._free.put(buffer)

    def close(self) -> None:
        """End the threads; no file may be open. Idempotent."""
        self._workers.close()


class StagedFile:
    """A file open for writing at any place. Consecutive writes are collected into one request: aligned blocks
    go past the page cache if the file system can do it, the edges through it.

    Errors are OSError, raised by a later call; ``filename2`` is the offset of the failed write.
    """

    def __init__(self, path: Path, descriptor: int, staging: Staging) -> None:
        """``descriptor`` belongs to the caller, who closes it after this object."""
        self._staging = staging
        self._descriptor = descriptor
        self._direct = descriptor
        with suppress(OSError):  # the file system has no O_DIRECT
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._buffer: Buffer | None = None
        self._begin = self._end = 0  # the range of the file in the buffer
        self._writes: list[Future[None]] = []
        self._lent: list[Future[None]] = []  # those of the writes that read the caller's memory
        self._takes_lent = self._direct != descriptor
        self._parts: list[Part] = []  # in any order

    def write(self, data: memoryview, offset: int) -> None:
        """Copy ``data``, to be written at ``offset``."""
        source = np.frombuffer(data, np.uint8)
        if self._buffer is not None and offset != self._end:
            self.flush()
        while len(source):
            if self._buffer is None:
                self._buffer = self._staging.take(self)
                self._begin = self._end = offset
            at = self._end - _floor(self._begin)
            count = min(len(source), _BUFFER_BYTES - at)
            self._buffer[at : at + count] = source[:count]
            self._end, offset, source = self._end + count, offset + count, source[count:]
            if at + count == _BUFFER_BYTES:
                self.flush()
        self._raise_failed(wait=False)

    def lend(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` without a copy; it must not change until :meth:`settle` returns."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        first, last = _floor(offset + _BLOCK_BYTES - 1), _floor(offset + data.nbytes)
        if not self._takes_lent or (address - offset) % MEMORY_ALIGN or last - first < _LENT_BYTES:
            self.write(data, offset)
            return
        self.write(data[: first - offset], offset)
        while first < last:
            end = min(last, (first // _BUFFER_BYTES + 1) * _BUFFER_BYTES)
            piece = data[first - offset : end - offset]
            self._lent.append(self._staging.write_lent(partial(self._write_lent, piece, first)))
            self._writes.append(self._lent[-1])
            first = end
        self.write(data[last - offset :], last)

    def settle(self) -> None:
        """Wait until no lent memory is in use, even if Ctrl-C arrives; raise an error of a failed write."""
        interrupt: KeyboardInterrupt | None = None
        while self._lent:
            try:
                self._lent[-1].exception()
                self._lent.pop()
            except KeyboardInterrupt as raised:
                interrupt = raised
        if interrupt is not None:
            raise interrupt
        self._raise_failed(wait=False)

    def flush(self) -> None:
        """Submit the copied bytes for writing."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._writes.append(self._staging.write(self, buffer, self._begin, self._end))

    def finish(self) -> list[Part]:
        """Write everything, wait, and return the written parts."""
        self.flush()
        self._raise_failed(wait=True)
        return self._parts

    def close(self) -> None:
        """Wait for running writes and discard the rest. Idempotent."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._staging.give_back(self, buffer)
        for write in self._writes:
            write.exception()
        self._writes.clear()
        direct, self._direct = self._direct, self._descriptor
        if direct != self._descriptor:
            os.close(direct)

    def write_out(self, buffer: Buffer, begin: int, end: int) -> None:
        """Write bytes ``[begin, end)`` of the file from ``buffer``, which starts at the block boundary before
        ``begin``.
        """
        base, first, last = _floor(begin), _floor(begin + _BLOCK_BYTES - 1), _floor(end)
        rest = buffer.data
        self._parts += parts_of(rest[begin - base : end - base], begin)
        if first >= last:
            write_at(self._descriptor, rest[begin - base : end - base], begin)
            return
        write_at(self._descriptor, rest[begin - base : first - base], begin)
        self._write_blocks(rest[first - base : last - base], first)
        write_at(self._descriptor, rest[last - base : end - base], last)

    def _write_lent(self, data: memoryview, offset: int) -> None:
        self._parts += parts_of(data, offset)
        self._write_blocks(data, offset)

    def _write_blocks(self, data: memoryview, offset: int) -> None:
        try:
            count = os.pwrite(self._direct, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or self._direct == self._descriptor:
                error.filename2 = offset
                raise
            count, self._takes_lent = 0, False  # O_DIRECT opens, but cannot write, or not from this memory
        write_at(self._descriptor, data[count:], offset + count)

    def _raise_failed(self, *, wait: bool) -> None:
        while self._writes and (wait or self._writes[0].done()):
            self._writes.pop(0).result()


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``. Raises OSError with the failed offset as ``filename2``."""
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as error:
            error.filename2 = offset
            raise
        data, offset = data[count:], offset + count


def _floor(offset: int) -> int:
    return offset // _BLOCK_BYTES * _BLOCK_BYTES
