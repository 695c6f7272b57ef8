"""The disk side of DiskOffloader: bytes of tensors to extents of files and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gemini.offload.async_file import Backend
from gemini.offload.disk_space import DiskSpace, Extent
from gemini.offload.parts import PART_BYTES, Move, Part, Stored, extent_bytes, goes_direct, parts_of
from gemini.offload.staging import STAGING_BYTES, Staging


@dataclass(eq=False)
class _Flight:
    """A part under way and its slice of the staging memory."""

    part: Part
    ticket: int
    staging: Staging
    at: int


@dataclass(eq=False)
class Transfer:
    """Tensors on their way, all in one direction; failed when one part of it failed."""

    is_write: bool
    flights: dict[_Flight, None] = field(default_factory=dict)  # in the order of submission
    failure: Exception | None = None


class TensorFile:
    """Keeps a place on disk for every tensor it has written, as long as the tensor lives.

    The caller keeps tensors alive, allocated and unchanged while they are on their way.
    """

    def __init__(self, directories: Sequence[str], *, backend: Backend | None, checksums: bool) -> None:
        self._space = DiskSpace(directories, backend=backend, checksums=checksums)
        self._stored = WeakTensorKeyDictionary()
        self._staging: dict[bool, Staging] = {}  # by whether it is pinned
        self._staged: dict[_Flight, Transfer] = {}  # those that hold a slice, oldest first

    @property
    def disk_bytes(self) -> int:
        """Disk space held, used or not."""
        return self._space.reserved_bytes

    def write(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start writing. What needs staging beyond its memory waits for earlier transfers.

        Raises:
            IoError: the disk is full; nothing is under way.
        """
        self._reserve(tensors)
        moves = self._moves(tensors)
        for move in moves:
            if move.stored.direct:
                move.stored.lie_as(move.storage.data_ptr())
        return self._start(moves, is_write=True)

    def read(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start reading into the memory of tensors that were written, which they have again."""
        return self._start(self._moves(tensors), is_write=False)

    def wait(self, transfer: Transfer) -> None:
        """Block until nothing of the transfer is under way.

        Raises:
            IoError: a part of it failed.
        """
        for flight in list(transfer.flights):
            self._land(flight, transfer)
        if transfer.failure is not None:
            raise transfer.failure

    def close(self) -> None:
        """Give the disk space back. Idempotent."""
        self._space.close()

    def _moves(self, tensors: Sequence[torch.Tensor]) -> list[Move]:
        return [Move(one.untyped_storage(), self._stored[one]) for one in tensors if one.numel() > 0]

    def _reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Find disk space for those that have none; neighbours get neighbouring extents."""
        for batch in _batches([one for one in tensors if one.numel() > 0 and self._needs_space(one)]):
            sizes = [_space_of(one) for one in batch]
            whole = self._space.allocate(sum(sizes))
            offset = whole.offset
            for tensor, size in zip(batch, sizes, strict=True):
                self._keep(tensor, Extent(whole.file, offset, size))
                offset += size

    def _needs_space(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        stored: Stored | None = self._stored.get(tensor)
        kind = (storage.nbytes(), goes_direct(storage.nbytes(), storage.device))
        return stored is None or (stored.nbytes, stored.direct) != kind

    def _keep(self, tensor: torch.Tensor, extent: Extent) -> None:
        storage = tensor.untyped_storage()
        stored = Stored(extent, storage.nbytes(), goes_direct(storage.nbytes(), storage.device))
        weakref.finalize(stored, self._space.free, extent).atexit = False
        self._stored[tensor] = stored

    def _start(self, moves: Sequence[Move], *, is_write: bool) -> Transfer:
        transfer = Transfer(is_write)
        try:
            for part in parts_of(moves):
                if transfer.failure is not None:
                    break  # an early part has landed and failed: ``wait`` raises it
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
        """Wait for one part; its failure is kept for the ``wait`` of its transfer, perhaps not this one."""
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
    """Yield runs that fit one request, or single larger tensors."""
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
