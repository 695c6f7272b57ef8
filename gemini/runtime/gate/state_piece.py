"""StatePiece: a part of a parameter chunk's optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gemini.chunk import Chunk, ChunkKind

MASTER = ChunkKind.MASTER.value  # the name of fp32 masters among the states of a piece


@dataclass
class StatePiece:
    """Elements ``[start, stop)`` of a parameter chunk: the part of its optimizer state that moves as one.

    By key: :data:`MASTER`, where there are fp32 masters, and what optimizers keep. ``first_block``: the first
    block of it, of those of all parameters of the chunk.
    """

    start: int
    stop: int
    first_block: int
    chunks: dict[str, Chunk] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)

    def master(self, start: int, stop: int) -> torch.Tensor:
        """Return the masters of elements ``[start, stop)`` of the parameter chunk."""
        return self.chunks[MASTER].tensor[start - self.start : stop - self.start]

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 masters."""
        return MASTER in self.chunks
