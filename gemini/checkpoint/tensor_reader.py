"""Reading safetensors files piece by piece into memory of bounded size: a few blocks ahead, past the page
cache, each compared with its checksum.

The library maps whole files, and what is touched of them counts as the process's memory.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gemini.checkpoint.checksum import BLOCK_BYTES, crc32c
from gemini.checkpoint.sealed_file import DamagedError, Seal, making_sense_of, reading
from gemini.checkpoint.structure import table, whole_number
from gemini.checkpoint.tensor_file import TYPE_NAMES
from gemini.offload.async_file import direct_memory
from gemini.system.files import open_regular, parse_json
from gemini.system.threads import Workers

_TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_MAX_HEADER_BYTES = 10**8  # the format's own limit
_NUM_BLOCKS = 4  # the one that is used, and those being read
_NUM_THREADS = 2
_ALIGN = 4096

_Memory = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredTensor:
    """Where a file holds a tensor: ``begin`` is its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class TensorReader:
    """The tensors of one safetensors file, best read in their order in it. Not thread-safe; close it.

    Raises:
        DamagedError: it cannot be opened or read, or what was to be had of it is not what was written.
    """

    def __init__(self, path: Path, seal: Seal, ahead: ReadAhead) -> None:
        """``ahead``: what the file is read with."""
        self._file = BlockFile(path, seal, ahead)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def pieces(
        self, name: str, first: int = 0, count: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (element, values) of ``count`` elements of ``name`` from ``first``, flat; None: to its end.

        Values are valid until the next are asked for, here or of another file.
        """
        stored = self.tensors[name]
        size = stored.dtype.itemsize
        last = stored.numel if count is None else first + count
        assert 0 <= first <= last <= stored.numel, name
        # What follows a whole tensor is wanted next; what follows a part of one may not be.
        read_on = last == stored.numel
        while first < last:
            raw = self._bytes(stored.begin + first * size, (last - first) * size, read_on)
            yield first, torch.from_numpy(raw).view(stored.dtype)
            first += len(raw) // size

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Return a copy of what :meth:`pieces` yields."""
        stored = self.tensors[name]
        values = torch.empty(
            stored.numel - first if count is None else count, dtype=stored.dtype, device="cpu"
        )
        for at, piece in self.pieces(name, first, count):
            values[at - first : at - first + piece.numel()] = piece
        return values

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of ``name`` in its shape."""
        return self.read(name).reshape(self.tensors[name].shape)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _read_header(self) -> dict[str, StoredTensor]:
        file = self._file
        return _read_header(file.path, file.seal.num_bytes, lambda end: file.head(end))

    def _bytes(
        self, offset: int, count: int, read_on: bool
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return at most ``count`` bytes of the file, whole elements, from ``offset`` on. Blocks after them
        are read meanwhile if ``read_on``."""
        index, first = divmod(offset, BLOCK_BYTES)
        stop = None if read_on else -(-(offset + count) // BLOCK_BYTES)
        return self._file.block(index, stop)[first : first + count]


def stored_tensors(path: Path, seal: Seal) -> dict[str, StoredTensor]:
    """Return what the header of a file says, whose checksum is not looked at. Raises DamagedError."""
    with reading(path):
        descriptor = open_regular(path, os.O_NOFOLLOW)
        try:
            return _read_header(path, seal.num_bytes, lambda end: os.pread(descriptor, end, 0))
        finally:
            os.close(descriptor)


def _read_header(path: Path, size: int, head: Callable[[int], bytes]) -> dict[str, StoredTensor]:
    """Return what the header says of a file of ``size`` bytes, of which ``head`` returns the first so many.
    Raises DamagedError for what the format does not allow: tensors that overlap, bytes that are none's."""
    num_bytes = int.from_bytes(head(min(8, size)), "little")
    if num_bytes > min(_MAX_HEADER_BYTES, size - 8):
        raise DamagedError(f"{path} is damaged: its header would have {num_bytes} bytes")
    with making_sense_of(path):
        text = head(8 + num_bytes)[8:]
        if text[:1] != b"{":
            raise ValueError("its header is no JSON object")
        entries = parse_json(text)
        for value in table(entries.pop("__metadata__", {})).values():
            if not isinstance(value, str):
                raise ValueError(f"its metadata holds {value!r:.200}, which is no text")
        tensors = {name: _stored(entry, 8 + num_bytes) for name, entry in table(entries).items()}
        end = 8 + num_bytes
        for begin, nbytes, name in sorted((t.begin, t.nbytes, name) for name, t in tensors.items()):
            if begin != end:
                raise ValueError(f"{name!r} begins at byte {begin}, where byte {end} is next")
            end += nbytes
        if end != size:
            raise ValueError(f"its tensors end at byte {end} of {size}")
    return tensors


def _stored(entry: Any, base: int) -> StoredTensor:
    begin, end = (whole_number(offset) for offset in entry["data_offsets"])
    shape = tuple(whole_number(size) for size in entry["shape"])
    stored = StoredTensor(_TYPES[entry["dtype"]], shape, base + begin)
    if end - begin != stored.nbytes:
        raise ValueError(f"{entry!r:.200} has not so many bytes")
    if stored.begin % stored.dtype.itemsize:
        raise ValueError(f"{entry!r:.200} does not begin where elements of its type do")
    return stored


class ReadAhead:
    """16 MiB that any number of files are read through, one at a time. For one thread; close it."""

    def __init__(self) -> None:
        memory = direct_memory(_NUM_BLOCKS * BLOCK_BYTES).numpy()
        self._free = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
        self._reads: dict[tuple[BlockFile, int], _Read] = {}
        self._workers = Workers(_NUM_THREADS)

    def block(self, file: BlockFile, blocks: range) -> _Memory:
        """Return the first of ``blocks`` of a file and begin to read those after it, as many as there is room
        for; valid until the next call. Raises DamagedError."""
        blocks = blocks[:_NUM_BLOCKS]
        wanted = {(file, index) for index in blocks}
        for key in self._reads.keys() - wanted:
            self._free.append(self._reads.pop(key).cancelled())
        for index in blocks:
            if (file, index) not in self._reads:
                self._reads[file, index] = _Read(self._workers, file, index, self._free.pop())
        return self._reads[file, blocks[0]].result()

    def forget(self, file: BlockFile) -> None:
        """The file is about to be closed."""
        for key in [key for key in self._reads if key[0] is file]:
            self._free.append(self._reads.pop(key).cancelled())

    def close(self) -> None:
        """End all reads. Idempotent."""
        self._workers.close()


class BlockFile:
    """A file whose bytes are handed out once their block is known to be what was written. Close it.

    Raises:
        DamagedError: it cannot be opened or read, or is another one than was written.
    """

    def __init__(self, path: Path, seal: Seal, ahead: ReadAhead) -> None:
        """``ahead``: what it is read with."""
        self.path = path
        self.seal = seal
        self._ahead = ahead
        with reading(path):
            self.descriptor = open_direct(path)

    def block(self, index: int, stop: int | None = None) -> _Memory:
        """Return bytes ``[index, index + 1) * BLOCK_BYTES``, those that there are; the blocks after it, up to
        ``stop``, are read meanwhile. Valid until the next block of any file is asked for."""
        return self._ahead.block(self, range(index, len(self.seal.blocks) if stop is None else stop))

    def head(self, num_bytes: int) -> bytes:
        """Return the first bytes, reading nothing ahead."""
        found = []
        for begin in range(0, num_bytes, BLOCK_BYTES):
            index = begin // BLOCK_BYTES
            found.append(self._ahead.block(self, range(index, index + 1))[: num_bytes - begin].tobytes())
        return b"".join(found)

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._ahead.forget(self)
            os.close(descriptor)


class _Read:
    """A block on its way to memory."""

    def __init__(self, workers: Workers, file: BlockFile, index: int, memory: _Memory) -> None:
        self._memory = memory
        self._file = file
        self._descriptor = file.descriptor
        self._offset = index * BLOCK_BYTES
        self._num_bytes = min(BLOCK_BYTES, file.seal.num_bytes - self._offset)
        self._crc32c = file.seal.blocks[index]
        self._damage = ""  # a text: an error would keep the memory
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        self._damage = self._read_and_compare()

    def _read_and_compare(self) -> str:
        """Return what is wrong with the block."""
        try:
            count = self._read()
        except OSError as error:
            return f"cannot read {self._file.path}: {error.strerror}"
        if count < self._num_bytes:
            return f"{self._file.path} is damaged: it ends at byte {self._offset + count}"
        # Here, not where it is used: both threads compute without the interpreter's lock.
        if crc32c(self._memory[: self._num_bytes].data) == self._crc32c:
            return ""
        end = self._offset + self._num_bytes
        return f"{self._file.path} is damaged: bytes {self._offset} to {end} are not those that were written"

    def _read(self) -> int:
        """Return how many bytes of the block the file has."""
        count = 0
        while count < self._num_bytes:
            rest = self._memory[count:]
            got = os.preadv(self._descriptor, [rest.data], self._offset + count)
            count += got
            if got == 0 or count % _ALIGN:  # the file ends here
                break
        return count

    def result(self) -> _Memory:
        """Return what was read. Raises DamagedError."""
        self._done.result()
        if self._damage:
            raise DamagedError(self._damage)
        return self._memory[: self._num_bytes]

    def cancelled(self) -> _Memory:
        """Return the memory, once nothing is read into it any more."""
        self._done.exception()
        return self._memory


def open_direct(path: Path) -> int:
    """Return a descriptor for reading past the page cache, or through it where that cannot be.

    Raises OSError, also for links and what else is no regular file.
    """
    with suppress(OSError):
        descriptor = open_regular(path, os.O_DIRECT | os.O_NOFOLLOW)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, _ALIGN)], 0)  # some can be opened, but not read
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return open_regular(path, os.O_NOFOLLOW)
