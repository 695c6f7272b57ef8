"""Files that are written once, made durable, and remembered by size and checksums.

Large ones go past the page cache, written by threads: copied to staging, or lent. Writing through the page
cache takes the processor's time for every page, and again to write it back; it takes memory from the
machine's other programs; and the disk idles until the file is synced. Copying took two thirds of what was
left: large pieces of memory that lie as they will in the file are written from where they are.
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
# Every so many bytes of a file have a checksum of their own: what is read at a time is compared at once.
BLOCK_BYTES = 4 * 2**20


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of ``data``; the GIL is released while it is computed."""
    raw = np.frombuffer(data, dtype=np.uint8)
    return _C.crc32c(raw.ctypes.data, raw.nbytes) if raw.nbytes else 0


def combined(parts: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of what the parts, each (bytes, checksum), are one after the other."""
    whole = 0
    for num_bytes, checksum in parts:
        whole = _product(_shift(num_bytes), whole) ^ checksum
    return whole


def _product(left: int, right: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the checksum's."""
    product, bit = 0, _ONE
    while bit:
        if left & bit:
            product ^= right
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
        bit >>= 1
    return product


@lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """Return x to the power of the number of bits: what a checksum is multiplied by where bytes follow."""
    power, square, bits = _ONE, _ONE >> 1, 8 * num_bytes
    while bits:
        if bits & 1:
            power = _product(power, square)
        square = _product(square, square)
        bits >>= 1
    return power


class Part(NamedTuple):
    """Bytes of one block of a file that one process has written, one after the other from ``offset`` on."""

    offset: int
    num_bytes: int
    crc32c: int


def parts_of(data: memoryview, offset: int) -> list[Part]:
    """Return what ``data`` is, written at ``offset``: a part for each block that it has bytes of."""
    parts = []
    while data:
        piece = data[: BLOCK_BYTES - offset % BLOCK_BYTES]
        parts.append(Part(offset, piece.nbytes, crc32c(piece)))
        data, offset = data[piece.nbytes :], offset + piece.nbytes
    return parts


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return ``parts`` in order of their offsets, those that adjoin in a block as one."""
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
MEMORY_ALIGN = 512  # what devices ask of the memory that they read
_LENT_BYTES = 2**20  # less is copied

Buffer = npt.NDArray[np.uint8]


class DamagedError(CheckpointError):
    """A checkpoint, or a file of it, is not what was written: an older one may be whole."""


class UnreadableError(DamagedError):
    """This user may not read a checkpoint, or a file of it: it may be whole."""


class OtherVersionError(UnreadableError):
    """A checkpoint, or a file of it, was written by another version of this library: it may be whole."""


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
    """Return the seal of a file with these ``parts`` written.

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


class Staging:
    """16 MiB for all files of a checkpoint, each of them takes what it fills, and the threads that write.

    For one thread at a time; close it.
    """

    def __init__(self) -> None:
        memory = direct_memory(_NUM_BUFFERS * _BUFFER_BYTES).numpy()
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for begin in range(0, len(memory), _BUFFER_BYTES):
            self._free.put(memory[begin : begin + _BUFFER_BYTES])
        self._filling: dict[StagedFile, None] = {}  # the one that has waited longest first
        self._workers = Workers(_NUM_THREADS)

    def take(self, file: StagedFile) -> Buffer:
        """Return a buffer for ``file`` to fill, once one is free."""
        if self._free.empty() and self._filling:
            next(iter(self._filling)).flush()
        buffer = self._free.get()
        self._filling[file] = None
        return buffer

    def write(self, file: StagedFile, buffer: Buffer, begin: int, end: int) -> Future[None]:
        """Write what ``file`` has filled of a buffer: bytes ``[begin, end)`` of the file."""
        self._filling.pop(file)
        written = self._workers.submit(partial(file.write_out, buffer, begin, end))
        written.add_done_callback(lambda _: self._free.put(buffer))
        return written

    def write_lent(self, write: Callable[[], None]) -> Future[None]:
        """Carry out a write that needs no buffer."""
        return self._workers.submit(write)

    def give_back(self, file: StagedFile, buffer: Buffer) -> None:
        """Take back what ``file`` has filled and does not want to be written."""
        self._filling.pop(file)
        self._free.put(buffer)

    def close(self) -> None:
        """End the threads; no file may be open. Idempotent."""
        self._workers.close()


class StagedFile:
    """A file open for writing at any place. What follows on what was written before goes to the device with
    it: aligned blocks past the page cache where the file system can, the edges through it.

    Errors are OSError, raised by a later call; the offset at which one came up is its ``filename2``.
    """

    def __init__(self, path: Path, descriptor: int, staging: Staging) -> None:
        """``descriptor`` is the caller's, to be closed after this."""
        self._staging = staging
        self._descriptor = descriptor
        self._direct = descriptor
        with suppress(OSError):  # this file system has no such thing
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._buffer: Buffer | None = None
        self._begin = self._end = 0  # of what the buffer holds of the file
        self._writes: list[Future[None]] = []
        self._lent: list[Future[None]] = []  # of them, those from memory of others
        self._takes_lent = self._direct != descriptor
        self._parts: list[Part] = []  # in any order

    def write(self, data: memoryview, offset: int) -> None:
        """Take ``data`` over, to be written at ``offset``."""
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
        """Have ``data`` written at ``offset``; it stays as it is until :meth:`settle` has returned."""
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
        """Return once nothing that was lent is in use, also where Ctrl-C comes; raise what has failed."""
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
        """Have written what was taken over."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._writes.append(self._staging.write(self, buffer, self._begin, self._end))

    def finish(self) -> list[Part]:
        """Write everything, wait for it, and return what was written."""
        self.flush()
        self._raise_failed(wait=True)
        return self._parts

    def close(self) -> None:
        """Wait for what is being written, forget the rest. Idempotent."""
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
        """Write bytes ``[begin, end)`` of the file, which ``buffer`` holds from the block's begin on."""
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
            count, self._takes_lent = 0, False  # it was opened, but it cannot, or not from any memory
        write_at(self._descriptor, data[count:], offset + count)

    def _raise_failed(self, *, wait: bool) -> None:
        while self._writes and (wait or self._writes[0].done()):
            self._writes.pop(0).result()


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``. Raises OSError; its ``filename2`` is the offset of what could not be written."""
    while data:
        try:
            count = os.pwrite(descriptor, data, offset)
        except OSError as error:
            error.filename2 = offset
            raise
        data, offset = data[count:], offset + count


def _floor(offset: int) -> int:
    return offset // _BLOCK_BYTES * _BLOCK_BYTES
