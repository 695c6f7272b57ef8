"""The disk side of DiskOffloader: moves bytes of tensors to extents of files and back.

O_DIRECT needs whole pages, but torch's tensors may start anywhere. A large CPU tensor has the same offset
within a block on disk as within a page in memory, so that all its whole pages are transferred directly; only
the blocks at its ends are staged. All other tensors (small, or on a GPU) are staged as a whole, adjacent ones
together.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.offload.async_file import BLOCK_BYTES, AsyncFile, Backend, round_to_block
from gemini.offload.disk_space import DiskSpace, Extent
from gemini.offload.staging import STAGING_BYTES, Staging

# Below this size, copying is cheaper than staging the two ends.
DIRECT_FROM_BYTES = 128 * 2**10
# Staged bytes are transferred in requests of this size, several at a time.
PART_BYTES = 2 * 2**20


@dataclass(eq=False)
class StoredExtents:
    """The place of one tensor's bytes on disk; ``skew`` is the offset of the first byte in its block."""

    extent: Extent
    nbytes: int
    direct: bool
    skew: int = 0

    def lie_as(self, address: int) -> None:
        """Set the offset in blocks to that of memory at ``address`` in pages; call it before writing."""
        self.skew = address % BLOCK_BYTES


@dataclass(frozen=True, eq=False)
class Move:
    """A tensor's memory and its place on disk."""

    storage: torch.UntypedStorage
    stored: StoredExtents


def goes_direct(storage_bytes: int, device: torch.device) -> bool:
    """Whether the disk can read and write the memory directly."""
    return device.type == "cpu" and storage_bytes >= DIRECT_FROM_BYTES


def extent_bytes(nbytes: int, *, direct: bool) -> int:
    """Return the disk space of a tensor: one block more if it may start anywhere in its first block."""
    return round_to_block(nbytes) + (BLOCK_BYTES if direct else 0)


@dataclass(frozen=True)
class BlockCut:
    """The ``blocks`` of a tensor on disk; those in [first, last) each correspond to a whole page of its
    memory."""

    blocks: int
    first: int
    last: int


def cut(address: int, nbytes: int, skew: int) -> BlockCut:
    """Match the blocks on disk with the pages in memory, beginning with the first of each."""
    place = address % BLOCK_BYTES
    blocks = round_to_block(skew + nbytes) // BLOCK_BYTES
    first = 1 if place else 0
    last = max(first, min(blocks, (place + nbytes) // BLOCK_BYTES))
    return BlockCut(blocks, first, last)


class DirectPart:
    """One large CPU tensor: its whole pages are transferred directly, the blocks at its ends through the
    staging memory."""

    def __init__(self, move: Move) -> None:
        self._storage, self._stored = move.storage, move.stored
        self.file: AsyncFile = self._stored.extent.file
        self.pinned = False
        self._address = self._storage.data_ptr()
        self._cut = cut(self._address, self._stored.nbytes, self._stored.skew)
        self._head_bytes = self._cut.first * BLOCK_BYTES
        self.staged_bytes = self._head_bytes + (self._cut.blocks - self._cut.last) * BLOCK_BYTES

    def write(self, staging: Staging, at: int) -> int:
        """Start writing, with the staging slice at offset ``at``; return the ticket."""
        for offset, start, nbytes in self._ends():
            staging.fill(at + offset, self._storage, start, nbytes)
        return self.file.writev(self._areas(staging, at), self._stored.extent.offset)

    def read(self, staging: Staging, at: int) -> int:
        """Start reading; return the ticket."""
        return self.file.readv(self._areas(staging, at), self._stored.extent.offset)

    def arrive(self, staging: Staging, at: int) -> None:
        """Move the bytes that were read to their places. The pages first: they may have landed where the ends
        belong."""
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
        """Return the range of the tensor's bytes in the blocks [first, last)."""
        start = max(0, first * BLOCK_BYTES - self._stored.skew)
        stop = min(self._stored.nbytes, last * BLOCK_BYTES - self._stored.skew)
        return start, max(start, stop)

    def _ends(self) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the slice, first byte of the tensor, count) for the staged ends."""
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
    """Consecutive blocks of a file that belong to one or several tensors."""

    file: AsyncFile
    offset: int
    pinned: bool
    staged_bytes: int = 0
    segments: list[Segment] = field(default_factory=list)  # (offset in the slice, storage, first byte, count)

    def takes(self, extent: Extent, start: int, pinned: bool) -> bool:
        """Whether the bytes from ``start`` of an extent can be added."""
        follows = self.file is extent.file and self.offset + self.staged_bytes == extent.offset + start
        return follows and self.pinned == pinned and self.staged_bytes < PART_BYTES

    def add(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> int:
        """Add at most ``nbytes`` from ``start`` of a storage; return how many were added, in whole blocks."""
        took = min(PART_BYTES - self.staged_bytes, round_to_block(nbytes))
        self.segments.append((self.staged_bytes, storage, start, min(took, nbytes)))
        self.staged_bytes += took
        return took

    def write(self, staging: Staging, at: int) -> int:
        """Start writing, with the staging slice at offset ``at``; return the ticket."""
        for offset, storage, start, nbytes in self.segments:
            staging.fill(at + offset, storage, start, nbytes)
        return self.file.write(staging.address + at, self.staged_bytes, self.offset)

    def read(self, staging: Staging, at: int) -> int:
        """Start reading; return the ticket."""
        return self.file.read(staging.address + at, self.staged_bytes, self.offset)

    def arrive(self, staging: Staging, at: int) -> None:
        """Copy the bytes that were read to their places."""
        for offset, storage, start, nbytes in self.segments:
            staging.drain(at + offset, storage, start, nbytes)


Part: TypeAlias = DirectPart | StagedPart


def parts_of(moves: Sequence[Move]) -> Iterator[Part]:
    """Yield the parts, each one request, into which ``moves`` are split."""
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


@dataclass(eq=False)
class _Flight:
    """A part under way and its slice of the staging memory."""

    part: Part
    ticket: int
    staging: Staging
    at: int


@dataclass(eq=False)
class Transfer:
    """Tensors in transit, all in one direction; it has failed if one of its parts has."""

    is_write: bool
    flights: dict[_Flight, None] = field(default_factory=dict)  # in order of submission
    failure: Exception | None = None


class ExtentFile:
    """Keeps a place on disk for every tensor that it has written, as long as the tensor lives.

    The caller keeps tensors alive, allocated and unchanged during transfers.
    """

    def __init__(self, directories: Sequence[str], *, backend: Backend | None, checksums: bool) -> None:
        self._space = DiskSpace(directories, backend=backend, checksums=checksums)
        self._stored = WeakTensorKeyDictionary()
        self._staging: dict[bool, Staging] = {}  # by whether the memory is pinned
        self._staged: dict[_Flight, Transfer] = {}  # parts that hold a slice, oldest first

    @property
    def disk_bytes(self) -> int:
        """Disk space held, used or not."""
        return self._space.reserved_bytes

    def write(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start writing. If the staging memory is full, waits for earlier transfers.

        Raises:
            IoError: the disk is full; no transfer was started.
        """
        self._reserve(tensors)
        moves = self._moves(tensors)
        for move in moves:
            if move.stored.direct:
                move.stored.lie_as(move.storage.data_ptr())
        return self._start(moves, is_write=True)

    def read(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start reading tensors that were written; their memory must be allocated again."""
        return self._start(self._moves(tensors), is_write=False)

    def wait(self, transfer: Transfer) -> None:
        """Block until no part of the transfer is under way.

        Raises:
            IoError: a part of it failed.
        """
        for flight in list(transfer.flights):
            self._land(flight, transfer)
        if transfer.failure is not None:
            raise transfer.failure

    def close(self) -> None:
        """Return the disk space. Idempotent."""
        self._space.close()

    def _moves(self, tensors: Sequence[torch.Tensor]) -> list[Move]:
        return [Move(one.untyped_storage(), self._stored[one]) for one in tensors if one.numel() > 0]

    def _reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate disk space for tensors that have none; adjacent tensors get adjacent extents."""
        for batch in _batches([one for one in tensors if one.numel() > 0 and self._needs_space(one)]):
            sizes = [_space_of(one) for one in batch]
            whole = self._space.allocate(sum(sizes))
            offset = whole.offset
            for tensor, size in zip(batch, sizes, strict=True):
                self._keep(tensor, Extent(whole.file, offset, size))
                offset += size

    def _needs_space(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        stored: StoredExtents | None = self._stored.get(tensor)
        kind = (storage.nbytes(), goes_direct(storage.nbytes(), storage.device))
        return stored is None or (stored.nbytes, stored.direct) != kind

    def _keep(self, tensor: torch.Tensor, extent: Extent) -> None:
        storage = tensor.untyped_storage()
        stored = StoredExtents(extent, storage.nbytes(), goes_direct(storage.nbytes(), storage.device))
        weakref.finalize(stored, self._space.free, extent).atexit = False
        self._stored[tensor] = stored

    def _start(self, moves: Sequence[Move], *, is_write: bool) -> Transfer:
        transfer = Transfer(is_write)
        try:
            for part in parts_of(moves):
                if transfer.failure is not None:
                    break  # an earlier part has already failed: ``wait`` raises it
                self._launch(part, transfer)
        except BaseException:
            for flight in list(transfer.flights):
                self._land(flight, transfer)
            raise
        return transfer

    def _launch(self, part: Part, transfer: Transfer) -> None:
        staging = self._staging_for(part)
        at = self._slice(staging, part.staged_bytes)
        try:
            ticket = part.write(staging, at) if transfer.is_write else part.read(staging, at)
        except BaseException:
            self._give_slice(staging, at, part)
            raise
        flight = _Flight(part, ticket, staging, at)
        transfer.flights[flight] = None
        if part.staged_bytes > 0:
            self._staged[flight] = transfer

    def _land(self, flight: _Flight, transfer: Transfer) -> None:
        """Wait for one part; its failure is kept for the ``wait`` of its transfer, which may be another
        one."""
        try:
            flight.part.file.wait(flight.ticket)
            if not transfer.is_write and transfer.failure is None:
                flight.part.arrive(flight.staging, flight.at)
        except Exception as error:
            transfer.failure = transfer.failure or error
        del transfer.flights[flight]
        self._staged.pop(flight, None)
        self._give_slice(flight.staging, flight.at, flight.part)

    def _staging_for(self, part: Part) -> Staging:
        found = self._staging.get(part.pinned)
        if found is None:
            found = self._staging[part.pinned] = Staging(STAGING_BYTES, pinned=part.pinned)
        return found

    def _slice(self, staging: Staging, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        while (at := staging.take(nbytes)) is None:
            oldest = next(iter(self._staged))
            self._land(oldest, self._staged[oldest])
        return at

    def _give_slice(self, staging: Staging, at: int, part: Part) -> None:
        if part.staged_bytes > 0:
            staging.give(at, part.staged_bytes)


def _space_of(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return extent_bytes(storage.nbytes(), direct=goes_direct(storage.nbytes(), storage.device))


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of tensors that fit one request, or single larger tensors."""
    batch: list[torch.Tensor] = []
    total = 0
    for tensor in tensors:
        size = _space_of(tensor)
        if batch and total + size > PART_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(tensor)
        total += size
    if batch:
        yield batch
