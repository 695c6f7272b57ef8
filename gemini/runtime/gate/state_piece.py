"""StatePiece: a part of a parameter chunk's optimizer state; and which parameters user code has written to
since their fp32 masters were made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from gemini.chunk import Chunk, ChunkKind, TensorIds

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


class WrittenTensors:
    """A set of tensors of the chunk table."""

    def __init__(self) -> None:
        self._tensors: set[int] = set()
        self._times: Counter[int] = Counter()

    def note(self, tensors: TensorIds) -> None:
        """Remember that user code wrote to ``tensors``."""
        self._times.update(tensors)
        self._tensors.update(tensors)

    def times(self, tensors: Iterable[int] | None = None) -> int:
        """Return how often ``tensors``, or any, have been written to."""
        return self._times.total() if tensors is None else sum(self._times[tensor] for tensor in tensors)

    def take(self, tensor: int) -> bool:
        """Say whether user code wrote to ``tensor`` since the last call for it."""
        if tensor in self._tensors:
            self._tensors.discard(tensor)
            return True
        return False
