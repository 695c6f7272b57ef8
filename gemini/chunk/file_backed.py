"""File-backed chunks: they are in memory only while pinned; between uses their content is in a file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from gemini import _C
from gemini.chunk.chunk import Chunk, TensorIds
from gemini.offload.buffered_file import BufferedFile, Range

_NUM_AHEAD = 4  # number of chunks to read ahead


class Tiers(Protocol):
    """The tiers that hold chunks during use; implemented by ChunkManager."""

    table: _C.ChunkTable

    def acquire(self, tensors: TensorIds, *, traced: bool) -> None:
        """Fetch the tensors' chunks to DEVICE and pin them."""

    def release(self, tensors: TensorIds, *, dirty: bool) -> None:
        """Unpin the tensors' chunks."""

    def free(self, tensors: TensorIds) -> None:
        """Discard the tensors' content."""

    def wait_host(self, chunk: Chunk) -> None:
        """Wait until the CPU may use a chunk that is pinned on HOST."""


class _BackedChunk:
    """One chunk, its only tensor, and its place in the file."""

    def __init__(self, chunk: Chunk, tensor: int, file: BufferedFile, offset: int) -> None:
        self.chunk = chunk
        self.tensor = tensor
        self.file = file
        self.range: Range = (offset, chunk.spec.numel * chunk.spec.dtype.itemsize)
        self.has_place = False  # the file has content of it
        self.is_here = False  # read or created since it got memory
        self.is_dirty = False  # and written to since
        self.next: _BackedChunk | None = None  # the chunk that was used after it


class FileBackedChunks:
    """The file-backed chunks of one model.

    For the chunk table such a chunk is FREE between two uses: it takes nothing of any budget, and a use
    allocates it again. Not thread-safe, like the chunk manager.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._backed: dict[int, _BackedChunk] = {}  # by tensor
        self._by_chunk: dict[int, _BackedChunk] = {}
        self._files: list[BufferedFile] = []
        self.directory: str | None = None  # where the files are
        self._latest: _BackedChunk | None = None  # the last chunk that was read
        self.bytes = 0  # bytes of chunks in the files now
        self._peak_bytes = 0

    def __contains__(self, tensor: int) -> bool:
        return tensor in self._backed

    def holds(self, tensor: int) -> bool:
        """Say whether the file has the current content of this tensor's chunk."""
        return tensor in self._backed and self._backed[tensor].has_place

    def usage(self) -> dict[str, int]:
        """Return current, peak and reserved bytes, as ``stats()`` does for a tier."""
        reserved = sum(file.size for file in self._files)
        return {"bytes": self.bytes, "peak_bytes": self._peak_bytes, "budget_bytes": reserved}

    def traffic(self) -> tuple[int, int]:
        """Return the bytes read and written so far."""
        done = [file.traffic() for file in self._files]
        return sum(read for read, _ in done), sum(written for _, written in done)

    # -- which chunks ----------------------------------------------------------------------------

    def add(
        self, chunks: Sequence[tuple[Chunk, int]], directories: list[str] | None, *, checksums: bool
    ) -> None:
        """Add chunks, each with its only tensor; none may be pinned.

        Raises:
            ConfigError, IoError: there is no room for them; nothing has changed. IoError also if one cannot
                be written: it and those after it stay in memory until they are used.
        """
        new = [(chunk, tensor) for chunk, tensor in chunks if tensor not in self._backed]
        if not new:
            return
        file = BufferedFile(directories, sum(chunk.spec.nbytes for chunk, _ in new), checksums=checksums)
        self._files.append(file)
        self.directory = file.directory
        offset = 0
        for chunk, tensor in new:
            self._backed[tensor] = self._by_chunk[chunk.id] = _BackedChunk(chunk, tensor, file, offset)
            offset += chunk.spec.nbytes
        for _, tensor in new:
            if self._tiers.table.tensor_state(tensor) == _C.TensorState.HOLD:
                self._use(tensor)

    def remove(self, tensors: Iterable[int]) -> None:
        """Return chunks to the tiers, like all other chunks. Raises as :meth:`ChunkManager.acquire`; chunks
        not yet removed stay file-backed."""
        for tensor in tensors:
            if self._backed[tensor].has_place:
                self._tiers.acquire((tensor,), traced=False)
                backed = self._backed.pop(tensor)
                self.bytes -= backed.range[1]
                del self._by_chunk[backed.chunk.id]
                self._tiers.release((tensor,), dirty=True)
            else:
                del self._by_chunk[self._backed.pop(tensor).chunk.id]

    def close(self) -> None:
        """Delete the files and their content. Idempotent."""
        for file in self._files:
            file.close()
        for backed in self._backed.values():
            backed.has_place = False
        self.bytes = 0

    # -- called by the manager -------------------------------------------------------------------

    def fill(self, chunk: Chunk, tier: _C.Tier) -> None:
        """Read the content of a chunk that has just got memory on ``tier``. Raises IoError."""
        backed = self._by_chunk.get(chunk.id)
        if backed is None:
            return
        if self._latest is not None:
            self._latest.next = backed
        self._latest = backed
        if backed.has_place:
            following = [each.range for each in _after(backed) if each.file is backed.file]
            backed.file.read(backed.range[0], self._bytes_of(backed, tier), following)
        backed.is_here = True

    def released(self, tensors: TensorIds, *, dirty: bool) -> None:
        """Write those of ``tensors`` that are no longer pinned to the file. Raises IoError: the chunk stays
        in memory."""
        if self._backed.keys().isdisjoint(tensors):
            return
        for tensor in tensors:
            backed = self._backed.get(tensor)
            if backed is not None:
                backed.is_dirty |= dirty
                self._write_out(backed)

    def all_released(self) -> None:
        """Write all chunks in memory to the file after an exception: they may have been written to. Raises
        IoError."""
        for backed in self._backed.values():
            backed.is_dirty = True
            self._write_out(backed)

    # -- inside ----------------------------------------------------------------------------------

    def _write_out(self, backed: _BackedChunk) -> None:
        table = self._tiers.table
        if table.tensor_state(backed.tensor) != _C.TensorState.HOLD:
            return
        # A chunk with memory that was not read yet has no content worth writing.
        if not backed.has_place or (backed.is_here and backed.is_dirty):
            tiers = table.valid_tiers(backed.chunk.id)
            on_device = _C.Tier.DEVICE in tiers
            if not on_device and _C.Tier.HOST not in tiers:  # it was spilled before it was added
                self._use(backed.tensor)
                return
            values = self._bytes_of(backed, _C.Tier.DEVICE if on_device else _C.Tier.HOST)
            backed.file.write(backed.range[0], values)
            if not backed.has_place:
                backed.has_place = True
                self.bytes += backed.range[1]
                self._peak_bytes = max(self._peak_bytes, self.bytes)
        backed.is_here = backed.is_dirty = False
        self._tiers.free((backed.tensor,))

    def _use(self, tensor: int) -> None:
        self._tiers.acquire((tensor,), traced=False)
        self._tiers.release((tensor,), dirty=False)

    def _bytes_of(self, backed: _BackedChunk, tier: _C.Tier) -> torch.Tensor:
        chunk, nbytes = backed.chunk, backed.range[1]
        if tier == _C.Tier.DEVICE:
            return chunk.tensor.view(torch.uint8)
        self._tiers.wait_host(chunk)
        memory = (ctypes.c_char * nbytes).from_address(chunk.host.address)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _after(backed: _BackedChunk) -> list[_BackedChunk]:
    """Return the chunks that were used next after this one the last time, as far as only the file has their
    content."""
    found: list[_BackedChunk] = []
    following = backed.next
    while following is not None and len(found) < _NUM_AHEAD and following is not backed:
        if following.has_place and not following.is_here:
            found.append(following)
        following = following.next
    return found
