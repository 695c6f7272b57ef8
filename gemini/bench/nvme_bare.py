"""What the disk can do: the same bytes through the same ring, without computing."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gemini.bench.io_own import page_aligned
from gemini.offload import AsyncFile
from gemini.offload.async_file import round_to_block

SETTLE_SECONDS = 0.3  # for what a step left to do in the background: it is no part of the next measurement


class BareDisk:
    """A file of its own whose every byte is read and written back, batch by batch, in turn."""

    def __init__(
        self, directory: str | os.PathLike[str], nbytes: int, batch_bytes: int, ring_bytes: int
    ) -> None:
        """Make the file and write it once; what was never written would be read without the disk."""
        self.nbytes = round_to_block(nbytes)
        batch_bytes = min(batch_bytes, self.nbytes)
        self._batches = [
            (offset, min(batch_bytes, self.nbytes - offset)) for offset in range(0, self.nbytes, batch_bytes)
        ]
        count = max(2, ring_bytes // batch_bytes)
        self._memory = page_aligned(count * batch_bytes)
        first = self._memory.data_ptr()
        self._buffers = [first + number * batch_bytes for number in range(count)]
        self._file = AsyncFile(directory, self.nbytes)
        self._file.register(first, self._memory.numel())
        for offset, size in self._batches:
            self._file.wait(self._file.write(first, size, offset))
        self.run()

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
        """Give the disk space back."""
        self._file.close()

    def _buffer(self, index: int) -> int:
        return self._buffers[index % len(self._buffers)]

    def _read(self, index: int) -> int:
        offset, size = self._batches[index]
        return self._file.read(self._buffer(index), size, offset)


def process_io() -> dict[str, float]:
    """Return the bytes that this process has had read from and written to disks, page cache or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = dict(line.split(": ") for line in lines)
    return {name: float(found[name]) for name in ("read_bytes", "write_bytes")}
