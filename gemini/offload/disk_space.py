"""Extents of disk space, given out and taken back, in files that are added as needed."""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass

from gemini.errors import IoError

from .async_file import AsyncFile, round_to_block

_MIN_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Extent:
    """A range of one file; ``nbytes`` is a multiple of the block."""

    file: AsyncFile
    offset: int
    nbytes: int


class DiskSpace:
    """First-fit allocation. Files are never shrunk; each new one doubles the space, so there are few."""

    def __init__(self, directory: str, *, threads: int) -> None:
        self._directory = directory
        self._threads = threads
        self._files: list[AsyncFile] = []
        self._free: dict[AsyncFile, list[tuple[int, int]]] = {}  # sorted (offset, nbytes) that do not touch
        # Freed while something else is under way, perhaps by the garbage collector: merged at the next call.
        self._returned: deque[Extent] = deque()

    @property
    def reserved_bytes(self) -> int:
        """Disk space held, used or not."""
        return sum(file.size for file in self._files)

    def allocate(self, nbytes: int) -> Extent:
        """Return an extent of at least ``nbytes``, which must be positive.

        Raises:
            IoError: the disk is full; nothing has changed.
        """
        need = round_to_block(nbytes)
        self._merge_returned()
        for file in self._files:
            for index, (offset, size) in enumerate(self._free[file]):
                if size >= need:
                    return self._cut(file, index, offset, need)
        file = self._add_file(need)
        return self._cut(file, 0, 0, need)

    def free(self, extent: Extent) -> None:
        """Give an extent back; safe in a finalizer. Its last request must be done."""
        self._returned.append(extent)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._free.clear()
        self._returned.clear()

    def _add_file(self, need: int) -> AsyncFile:
        generous = max(need, self.reserved_bytes, _MIN_FILE_BYTES)
        try:
            file = AsyncFile(self._directory, generous, depth=self._threads, direct=False)
        except IoError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or generous == need:
                raise
            file = AsyncFile(self._directory, need, depth=self._threads, direct=False)
        self._files.append(file)
        self._free[file] = [(0, file.size)]
        return file

    def _cut(self, file: AsyncFile, index: int, offset: int, need: int) -> Extent:
        holes = self._free[file]
        _, size = holes[index]
        holes[index : index + 1] = [(offset + need, size - need)] if size > need else []
        return Extent(file, offset, need)

    def _merge_returned(self) -> None:
        while self._returned:
            extent = self._returned.popleft()
            if extent.file not in self._free:
                continue  # closed meanwhile
            merged: list[tuple[int, int]] = []
            for offset, size in sorted([*self._free[extent.file], (extent.offset, extent.nbytes)]):
                if merged and sum(merged[-1]) == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((offset, size))
            self._free[extent.file] = merged
