"""StatePiece: a part of a parameter chunk's optimizer state."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gemini.chunk import Chunk, ChunkKind

MASTER = ChunkKind.MASTER.value  # the name of fp32 masters among the states of a piece


@dataclass
class StatePiece:
    """Elements ``[start, stop)`` of a parameter chunk: the part of its optimizer state that moves as one.

    By name: :data:`MASTER`, where there are fp32 masters, and what optimizers keep.
    """

    start: int
    stop: int
    chunks: dict[str, Chunk] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the parameter chunk as they stand in the state ``name``."""
        return self.chunks[name].tensor[start - self.start : stop - self.start]

    def has(self, name: str) -> bool:
        """Say whether there is a state of this name."""
        return name in self.chunks
