"""What the disk can do: the same bytes through the same ring, without computing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from gemini.offload import AsyncFile
from gemini.offload.async_file import direct_memory, round_to_block
from gemini.optim.kernel_adam import KernelAdam

SETTLE_SECONDS = 0.3  # for what a step left to do in the background: it is no part of the next measurement


class BareDisk:
    """Reads every byte of a file and writes it back as it was, batch by batch."""

    def __init__(
        self, file: AsyncFile, batches: Sequence[tuple[int, int]], ring_bytes: int, *, owned: bool
    ) -> None:
        """Prepare for batches of (offset, bytes) that have been written; one run does not count."""
        self._file = file
        self._owned = owned
        self._batches = batches
        self.nbytes = sum(size for _offset, size in batches)
        largest = max(size for _offset, size in batches)
        count = max(2, ring_bytes // largest)
        self._memory = direct_memory(count * largest)
        first = self._memory.data_ptr()
        self._buffers = [first + number * largest for number in range(count)]
        file.register(first, self._memory.numel())
        self.run()

    @classmethod
    def of_new_file(
        cls, directory: str | os.PathLike[str], nbytes: int, batch_bytes: int, ring_bytes: int
    ) -> BareDisk:
        """Use a file made for it, written once: what was never written would be read without the disk."""
        nbytes = round_to_block(nbytes)
        file = AsyncFile(directory, nbytes)
        starts = range(0, nbytes, batch_bytes)
        batches = [(offset, min(batch_bytes, nbytes - offset)) for offset in starts]
        zeros = direct_memory(batches[0][1])
        for offset, size in batches:
            file.wait(file.write(zeros.data_ptr(), size, offset))
        return cls(file, batches, ring_bytes, owned=True)

    @classmethod
    def of_states(cls, optimizer: KernelAdam, ring_bytes: int) -> BareDisk:
        """Use the file that ``optimizer`` has its states in: two files on one disk may differ twofold.

        To be run between steps, after a pause: nothing of a step may be under way.
        """
        time.sleep(SETTLE_SECONDS)
        extents = optimizer.disk_extents
        batches = [(one.offset, one.nbytes) for one in extents]
        return cls(extents[0].file, batches, ring_bytes, owned=False)

    def run(self) -> float:
        """Read and write back every byte; return the seconds.

        One half of the ring is reading ahead while the other is being written.
        """
        begin = time.perf_counter()
        count, behind = len(self._buffers), len(self._buffers) // 2
        reads = {index: self._read(index) for index in range(min(count, len(self._batches)))}
        writes: dict[int, int] = {}
        for index, (offset, size) in enumerate(self._batches):
            self._file.wait(reads.pop(index))
            writes[index] = self._file.write(self._buffer(index), size, offset)
            free = index - behind
            if free >= 0 and free + count < len(self._batches):
                self._file.wait(writes.pop(free))
                reads[free + count] = self._read(free + count)
        self._file.wait_all()
        return time.perf_counter() - begin

    def settled_run(self) -> float:
        """Do as ``run``, after a pause."""
        time.sleep(SETTLE_SECONDS)
        return self.run()

    def close(self) -> None:
        """Let the file go, or close one that was made for this."""
        if self._owned:
            self._file.close()
        else:
            self._file.unregister(self._memory.data_ptr())

    def _buffer(self, index: int) -> int:
        return self._buffers[index % len(self._buffers)]

    def _read(self, index: int) -> int:
        offset, size = self._batches[index]
        return self._file.read(self._buffer(index), size, offset)


def leave_page_cache(path: Path) -> None:
    """Ask the kernel to forget what it holds of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def process_io() -> dict[str, float]:
    """Return the bytes that this process has had read from and written to disks, page cache or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = dict(line.split(": ") for line in lines)
    return {name: float(found[name]) for name in ("read_bytes", "write_bytes")}
