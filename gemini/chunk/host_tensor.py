"""Chunks as the CPU uses them where they lie on HOST."""

from __future__ import annotations

import ctypes

import torch

from gemini.chunk.chunk import Chunk
from gemini.chunk.manager import ChunkManager


def host_tensor(chunks: ChunkManager, chunk: Chunk, *, wait: bool = True) -> torch.Tensor:
    """Return the flat tensor over a chunk that is pinned on HOST, shape ``(numel,)``; wait until nothing
    copies from or to it, unless the caller does. Its memory is another one the next time: it is valid while
    the chunk is pinned."""
    if wait:
        chunks.wait_host(chunk)
    memory = (ctypes.c_char * chunk.spec.nbytes).from_address(chunk.host.address)
    return torch.frombuffer(memory, dtype=chunk.spec.dtype, count=chunk.spec.numel)
