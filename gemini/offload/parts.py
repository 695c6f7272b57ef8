"""How the bytes of tensors and blocks of a file meet: what goes straight, what is staged.

O_DIRECT wants memory in whole pages; torch's tensors start anywhere. A large CPU tensor keeps on disk the
place in a block that it has in a page, so that all its whole pages go straight; only the blocks at its ends
are staged. Everything else (small, or on a GPU) is staged as a whole, neighbours together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from gemini.offload.async_file import BLOCK_BYTES, AsyncFile, round_to_block
from gemini.offload.disk_space import Extent
from gemini.offload.staging import Staging

# Below this a copy is cheaper than what the ends of a tensor cost.
DIRECT_FROM_BYTES = 128 * 2**10
# What is staged goes in requests of this size, several at a time.
PART_BYTES = 2 * 2**20


@dataclass(eq=False)
class Stored:
    """Where the bytes of one tensor are on disk; ``skew`` is the place of the first in its block."""

    extent: Extent
    nbytes: int
    direct: bool
    skew: int = 0

    def lie_as(self, address: int) -> None:
        """Have the bytes lie in blocks as memory at ``address`` does, before they are written."""
        self.skew = address % BLOCK_BYTES


@dataclass(frozen=True, eq=False)
class Move:
    """A tensor's memory and its place on disk."""

    storage: torch.UntypedStorage
    stored: Stored


def goes_direct(storage_bytes: int, device: torch.device) -> bool:
    """Whether the memory can be read and written by the disk itself."""
    return device.type == "cpu" and storage_bytes >= DIRECT_FROM_BYTES


def extent_bytes(nbytes: int, *, direct: bool) -> int:
    """Return the disk space of a tensor: one block more where it may start anywhere in its first."""
    return round_to_block(nbytes) + (BLOCK_BYTES if direct else 0)


@dataclass(frozen=True)
class Cut:
    """The ``blocks`` of a tensor on disk; those in [first, last) have a whole page of its memory each."""

    blocks: int
    first: int
    last: int


def cut(address: int, nbytes: int, skew: int) -> Cut:
    """Lay the blocks over the pages of memory, first over first."""
    place = address % BLOCK_BYTES
    blocks = round_to_block(skew + nbytes) // BLOCK_BYTES
    first = 1 if place else 0
    last = max(first, min(blocks, (place + nbytes) // BLOCK_BYTES))
    return Cut(blocks, first, last)


class DirectPart:
    """One large CPU tensor: its whole pages straight, the blocks at its ends through the staging memory."""

    def __init__(self, move: Move) -> None:
        self._storage, self._stored = move.storage, move.stored
        self.file: AsyncFile = self._stored.extent.file
        self.pinned = False
        self._address = self._storage.data_ptr()
        self._cut = cut(self._address, self._stored.nbytes, self._stored.skew)
        self._head_bytes = self._cut.first * BLOCK_BYTES
        self.staged_bytes = self._head_bytes + (self._cut.blocks - self._cut.last) * BLOCK_BYTES

    def write(self, staging: Staging, at: int) -> int:
        """Start writing, ``at`` being the slice; return the ticket."""
        for offset, start, nbytes in self._ends():
            staging.fill(at + offset, self._storage, start, nbytes)
        return self.file.writev(self._areas(staging, at), self._stored.extent.offset)

    def read(self, staging: Staging, at: int) -> int:
        """Start reading; return the ticket."""
        return self.file.readv(self._areas(staging, at), self._stored.extent.offset)

    def arrive(self, staging: Staging, at: int) -> None:
        """Put what was read into its place. The pages first: they may have landed where the ends belong."""
        landed = self._page + self._head_bytes
        start, stop = self._span(self._cut.first, self._cut.last)
        source = landed + start - (self._cut.first * BLOCK_BYTES - self._stored.skew)
        if source != self._address + start and stop > start:
            ctypes.memmove(self._address + start, source, stop - start)
        for offset, start, nbytes in self._ends():
            staging.drain(at + offset, self._storage, start, nbytes)

    @property
    def _page(self) -> int:
        return self._address - self._address % BLOCK_BYTES

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Return which bytes of the tensor the blocks [first, last) hold."""
        start = max(0, first * BLOCK_BYTES - self._stored.skew)
        stop = min(self._stored.nbytes, last * BLOCK_BYTES - self._stored.skew)
        return start, max(start, stop)

    def _ends(self) -> Iterator[tuple[int, int, int]]:
        """Yield (place in the slice, first byte of the tensor, count) of what is staged."""
        skipped = 0
        for first, last in ((0, self._cut.first), (self._cut.last, self._cut.blocks)):
            start, stop = self._span(first, last)
            if stop > start:
                yield skipped + start + self._stored.skew - first * BLOCK_BYTES, start, stop - start
            skipped += (last - first) * BLOCK_BYTES

    def _areas(self, staging: Staging, at: int) -> list[tuple[int, int]]:
        slice_address = staging.address + at
        areas = [
            (slice_address, self._head_bytes),
            (self._page + self._head_bytes, (self._cut.last - self._cut.first) * BLOCK_BYTES),
            (slice_address + self._head_bytes, self.staged_bytes - self._head_bytes),
        ]
        return [area for area in areas if area[1] > 0]


Segment: TypeAlias = tuple[int, torch.UntypedStorage, int, int]


@dataclass(eq=False)
class StagedPart:
    """Consecutive blocks of a file that belong to one tensor or several."""

    file: AsyncFile
    offset: int
    pinned: bool
    staged_bytes: int = 0
    segments: list[Segment] = field(default_factory=list)  # (place in the slice, storage, first byte, count)

    def takes(self, extent: Extent, start: int, pinned: bool) -> bool:
        """Whether the bytes from ``start`` of an extent can be added."""
        follows = self.file is extent.file and self.offset + self.staged_bytes == extent.offset + start
        return follows and self.pinned == pinned and self.staged_bytes < PART_BYTES

    def add(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> int:
        """Add bytes from ``start`` of a storage, at most ``nbytes``; return how many, in whole blocks."""
        took = min(PART_BYTES - self.staged_bytes, round_to_block(nbytes))
        self.segments.append((self.staged_bytes, storage, start, min(took, nbytes)))
        self.staged_bytes += took
        return took

    def write(self, staging: Staging, at: int) -> int:
        """Start writing, ``at`` being the slice; return the ticket."""
        for offset, storage, start, nbytes in self.segments:
            staging.fill(at + offset, storage, start, nbytes)
        return self.file.write(staging.address + at, self.staged_bytes, self.offset)

    def read(self, staging: Staging, at: int) -> int:
        """Start reading; return the ticket."""
        return self.file.read(staging.address + at, self.staged_bytes, self.offset)

    def arrive(self, staging: Staging, at: int) -> None:
        """Put what was read into its place."""
        for offset, storage, start, nbytes in self.segments:
            staging.drain(at + offset, storage, start, nbytes)


Part: TypeAlias = DirectPart | StagedPart


def parts_of(moves: Sequence[Move]) -> Iterator[Part]:
    """Yield the requests that ``moves`` take."""
    open_part: StagedPart | None = None
    for move in moves:
        if move.stored.direct:
            yield DirectPart(move)
            continue
        extent, nbytes = move.stored.extent, move.stored.nbytes
        pinned = move.storage.device.type != "cpu"
        start = 0
        while start < nbytes:
            if open_part is None or not open_part.takes(extent, start, pinned):
                if open_part is not None:
                    yield open_part
                open_part = StagedPart(extent.file, extent.offset + start, pinned)
            start += open_part.add(move.storage, start, nbytes - start)
    if open_part is not None:
        yield open_part
