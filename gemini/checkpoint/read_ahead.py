"""Files read block by block past the page cache, a few blocks ahead."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gemini.checkpoint.workers import Workers
from gemini.offload.direct_memory import direct_memory

BLOCK_BYTES = 4 * 2**20
_NUM_BLOCKS = 4  # the one that is used, and those being read
_NUM_THREADS = 2
_ALIGN = 4096

_Memory = npt.NDArray[np.uint8]


class ReadAhead:
    """16 MiB that any number of files are read through, one at a time. For one thread; close it."""

    def __init__(self) -> None:
        memory = direct_memory(_NUM_BLOCKS * BLOCK_BYTES).numpy()
        self._free = [memory[at : at + BLOCK_BYTES] for at in range(0, len(memory), BLOCK_BYTES)]
        self._reads: dict[tuple[int, int], _Read] = {}  # by descriptor and block
        self._workers = Workers(_NUM_THREADS)

    def block(self, descriptor: int, index: int, size: int) -> _Memory:
        """Return bytes ``[index, index + 1) * BLOCK_BYTES`` of a file of ``size`` bytes, those that there
        are; valid until the next call. Raises OSError."""
        ahead = range(index, min(index + _NUM_BLOCKS, -(-size // BLOCK_BYTES)))
        wanted = {(descriptor, block) for block in ahead}
        for key in self._reads.keys() - wanted:
            self._free.append(self._reads.pop(key).cancelled())
        for block in ahead:
            if (descriptor, block) not in self._reads:
                read = _Read(self._workers, descriptor, block * BLOCK_BYTES, self._free.pop())
                self._reads[descriptor, block] = read
        return self._reads[descriptor, index].result()

    def forget(self, descriptor: int) -> None:
        """The file is about to be closed."""
        for key in [key for key in self._reads if key[0] == descriptor]:
            self._free.append(self._reads.pop(key).cancelled())

    def close(self) -> None:
        """End all reads. Idempotent."""
        self._workers.close()


class _Read:
    """A block on its way to memory."""

    def __init__(self, workers: Workers, descriptor: int, offset: int, memory: _Memory) -> None:
        self._memory = memory
        self._count = 0
        self._descriptor = descriptor
        self._offset = offset
        self._done: Future[None] = workers.submit(self._run)

    def _run(self) -> None:
        while self._count < len(self._memory):
            rest = self._memory[self._count :]
            count = os.preadv(self._descriptor, [rest.data], self._offset + self._count)
            self._count += count
            if count == 0 or self._count % _ALIGN:  # the file ends here
                return

    def result(self) -> _Memory:
        """Return what was read."""
        self._done.result()
        return self._memory[: self._count]

    def cancelled(self) -> _Memory:
        """Return the memory, once nothing is read into it any more."""
        self._done.exception()
        return self._memory


def open_direct(path: Path) -> int:
    """Return a descriptor for reading past the page cache, or through it where that cannot be.

    Raises OSError.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.preadv(descriptor, [mmap.mmap(-1, _ALIGN)], 0)  # some can be opened, but not read
        except OSError:
            os.close(descriptor)
        else:
            return descriptor
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
