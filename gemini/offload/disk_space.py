"""DiskSpace: allocates extents in files that are added as needed."""

from __future__ import annotations

import errno
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gemini.errors import IoError
from gemini.offload.async_file import AsyncFile, Backend, round_to_block

_MIN_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Extent:
    """A range of one file; ``nbytes`` is a multiple of the block size."""

    file: AsyncFile
    offset: int
    nbytes: int


class Holes:
    """The free ranges of an address space: first-fit allocation; freed ranges are merged."""

    def __init__(self, nbytes: int) -> None:
        self._holes = [(0, nbytes)]  # sorted (offset, nbytes); none are adjacent

    def take(self, nbytes: int) -> int | None:
        """Allocate ``nbytes`` and return the offset; None if no hole is large enough."""
        for index, (offset, size) in enumerate(self._holes):
            if size >= nbytes:
                rest = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                self._holes[index : index + 1] = rest
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range that ``take`` allocated, or a part of it."""
        first = last = bisect(self._holes, (offset, 0))
        end = offset + nbytes
        if first > 0 and sum(self._holes[first - 1]) == offset:
            first -= 1
            offset = self._holes[first][0]
        if last < len(self._holes) and self._holes[last][0] == end:
            end = sum(self._holes[last])
            last += 1
        self._holes[first:last] = [(offset, end - offset)]


class DiskSpace:
    """First-fit allocation in files. Files are never shrunk; each new file doubles the space, so there are
    few."""

    def __init__(
        self, directories: Sequence[str], *, backend: Backend | None = None, checksums: bool = False
    ) -> None:
        self._directories = list(directories)
        self._backend = backend
        self._checksums = checksums
        self._holes: dict[AsyncFile, Holes] = {}
        # May be freed at any time, even by the garbage collector: merged at the next allocation.
        self._returned: deque[Extent] = deque()

    @property
    def reserved_bytes(self) -> int:
        """Disk space held, used or not."""
        return sum(file.size for file in self._holes)

    def allocate(self, nbytes: int) -> Extent:
        """Return an extent of at least ``nbytes``, which must be positive.

        Raises:
            IoError: the disk is full; nothing has changed.
        """
        need = round_to_block(nbytes)
        self._merge_returned()
        for file, holes in self._holes.items():
            offset = holes.take(need)
            if offset is not None:
                return Extent(file, offset, need)
        file = self._new_file(need)
        holes = self._holes[file] = Holes(file.size)
        offset = holes.take(need)
        assert offset is not None
        return Extent(file, offset, need)

    def free(self, extent: Extent) -> None:
        """Free an extent or a part of one; safe in a finalizer. Its last request must be done."""
        self._returned.append(extent)

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._holes:
            file.close()
        self._holes.clear()
        self._returned.clear()

    def _new_file(self, need: int) -> AsyncFile:
        generous = max(need, self.reserved_bytes, _MIN_FILE_BYTES)
        try:
            return self._open(generous)
        except IoError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or generous == need:
                raise
        return self._open(need)

    def _open(self, nbytes: int) -> AsyncFile:
        return AsyncFile(self._directories, nbytes, backend=self._backend, checksums=self._checksums)

    def _merge_returned(self) -> None:
        while self._returned:
            extent = self._returned.popleft()
            holes = self._holes.get(extent.file)
            if holes is not None:  # None: closed meanwhile
                holes.give(extent.offset, extent.nbytes)
