"""ChunkPool: chunks for tensors whose sizes show only while a model runs."""

from __future__ import annotations

import heapq

import torch

from gemini.chunk import Chunk, ChunkKind, ChunkManager, ChunkSpec
from gemini.chunk.chunk import whole_blocks
from gemini.errors import OutOfBudgetError
from gemini.system.config import format_bytes

_SIZES_PER_OCTAVE = 8  # at most an eighth of a chunk is padding


class ChunkPool:
    """Chunks of a few sizes, made when they are needed first and used again and again.

    Of the free chunks of a size the one made first is taken: steps that take and give back alike use the same
    chunks for the same tensors, which is what a trace records.
    """

    def __init__(self, chunks: ChunkManager) -> None:
        self._chunks = chunks
        self._block_bytes = chunks.device.block_bytes
        self._free: dict[int, list[int]] = {}  # size in bytes -> heap of chunk ids
        self._tensors: dict[int, int] = {}  # chunk id -> its tensor in the table

    def take(self, nbytes: int) -> tuple[Chunk, int]:
        """Return a chunk of at least ``nbytes`` without content, and its tensor in the table.

        Raises:
            OutOfBudgetError: it is more than DEVICE may hold, or the DISK file has no place for another one.
        """
        size = rounded_bytes(nbytes, self._block_bytes)
        device_bytes = self._chunks.budgets.device_bytes
        if size > device_bytes:
            raise OutOfBudgetError(
                f"an activation of {nbytes} bytes ({format_bytes(nbytes)}), which activation_offload stores "
                f"in one piece of {size} bytes, is more than DEVICE with {device_bytes} bytes holds; raise "
                "device_bytes above that, lower the batch size, or put torch.utils.checkpoint around the "
                "layers that save it; the chunk size does not matter here"
            )
        if not self._free.get(size) and not self._chunks.has_place(size):
            size = self._larger(size)
        free = self._free.setdefault(size, [])
        if free:
            chunk = self._chunks.chunks[heapq.heappop(free)]
            return chunk, self._tensors[chunk.id]
        chunk = self._chunks.add_chunk(ChunkSpec(ChunkKind.ACTIVATION, size, torch.uint8, self._block_bytes))
        tensor = self._tensors[chunk.id] = self._chunks.add_tensor(chunk)
        return chunk, tensor

    def _larger(self, nbytes: int) -> int:
        """Return the smallest size above ``nbytes`` of which a chunk is free: after batches of many shapes
        there may be no place for further chunks."""
        larger = [size for size, free in self._free.items() if free and size > nbytes]
        if not larger:
            raise OutOfBudgetError(
                f"no place on DISK for a further chunk of {nbytes} bytes of activations; raise disk_bytes "
                "or use fewer different batch shapes"
            )
        return min(larger)

    def give_back(self, chunk: Chunk) -> None:
        """Give up the content of ``chunk``, which no operator uses; it may be taken again."""
        self._chunks.free((self._tensors[chunk.id],))
        heapq.heappush(self._free[chunk.spec.nbytes], chunk.id)


def too_large_now(chunks: ChunkManager, chunk: Chunk) -> OutOfBudgetError | None:
    """Return the error of an activation that does not fit DEVICE beside what is pinned; None: it would."""
    pinned = [other for other in chunks.chunks if other is not chunk and chunks.table.pins(other.id)]
    pinned_bytes = sum(other.spec.nbytes for other in pinned)
    saved_bytes = sum(other.spec.nbytes for other in pinned if other.spec.kind is ChunkKind.ACTIVATION)
    needed_bytes, device_bytes = pinned_bytes + chunk.spec.nbytes, chunks.budgets.device_bytes
    if needed_bytes <= device_bytes:
        return None
    return OutOfBudgetError(
        f"an activation in one piece of {chunk.spec.nbytes} bytes ({format_bytes(chunk.spec.nbytes)}), which "
        f"activation_offload stores, does not fit DEVICE with {device_bytes} bytes beside what the operator "
        f"that saves or uses it has pinned: {pinned_bytes - saved_bytes} bytes of model data and "
        f"{saved_bytes} bytes of other activations; raise device_bytes to {needed_bytes} or more, lower the "
        "batch size, or put torch.utils.checkpoint around the layers that save it"
    )


def rounded_bytes(nbytes: int, block_bytes: int) -> int:
    """Return the size of the chunk for ``nbytes``: whole blocks, ``_SIZES_PER_OCTAVE`` sizes to a
    doubling."""
    octave: int = 1 << max(nbytes - 1, 1).bit_length() - 1
    return whole_blocks(nbytes, max(block_bytes, octave // _SIZES_PER_OCTAVE))
