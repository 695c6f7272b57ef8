"""StatePiece: a part of a parameter chunk's optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini.chunk import Chunk, ChunkKind


@dataclass
class StatePiece:
    """Elements ``[start, stop)`` of a parameter chunk: the part of its optimizer state that moves as one."""

    start: int
    stop: int
    chunks: dict[ChunkKind, Chunk]
    tensors: dict[ChunkKind, int]

    def flat(self, kind: ChunkKind, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the parameter chunk as they stand in the state of ``kind``."""
        return self.chunks[kind].tensor[start - self.start : stop - self.start]

    def has(self, kind: ChunkKind) -> bool:
        return kind in self.chunks
