"""One chunk: a fixed-size piece of model data with a window of stable addresses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from gemini import _C
from gemini.errors import StateError


class ChunkKind(Enum):
    """What a chunk holds."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    ACTIVATION = "activation"
    SHARD = "shard"
    GRAD_SHARD = "grad_shard"
    EXCHANGE = "exchange"

    @property
    def starts_at_zero(self) -> bool:
        """Whether a chunk of this kind must read as zeros before its first write."""
        return self in (ChunkKind.EXP_AVG, ChunkKind.EXP_AVG_SQ)


@dataclass(frozen=True)
class ChunkSpec:
    """What to build a chunk from; ``numel * itemsize`` is a multiple of 4 KiB."""

    kind: ChunkKind
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Chunk:
    """A chunk and its addresses. The window lives as long as any tensor that views it.

    ``tensor`` is the flat view of the window, shape ``(numel,)``. Its memory may be read or written only
    while the chunk is pinned on DEVICE; elsewhere the address range holds nothing.
    """

    __slots__ = ("disk_offset", "host_window", "id", "spec", "tensor", "window")

    def __init__(
        self,
        chunk_id: int,
        spec: ChunkSpec,
        window: _C.Window,
        host_window: _C.Window | None,
        disk_offset: int,
    ) -> None:
        self.id = chunk_id
        self.spec = spec
        self.window = window
        self.host_window = host_window
        self.disk_offset = disk_offset
        self.tensor: torch.Tensor = torch.frombuffer(window, dtype=spec.dtype, count=spec.numel)

    @property
    def host(self) -> _C.Window:
        """The window of the HOST copy. Raises StateError where there is no HOST tier."""
        if self.host_window is None:
            raise StateError(f"chunk {self.id} has no HOST window: the HOST tier is absent")
        return self.host_window
