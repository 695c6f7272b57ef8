"""Files read block by block past the page cache, a few blocks ahead; each is compared with its checksum."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gemini.checkpoint.checksum import crc32c
from gemini.checkpoint.part import BLOCK_BYTES
from gemini.checkpoint.sealed_file import DamagedError, Seal, reading
from gemini.checkpoint.workers import Workers
from gemini.offload.direct_memory import direct_memory
from gemini.system.files import open_regular

_NUM_BLOCKS = 4  # the one that is used, and those being read
_NUM_THREADS = 2
_ALIGN = 4096

_Memory = npt.NDArray[np.uint8]


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
