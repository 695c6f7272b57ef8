"""Chunks as the CPU uses them where they lie on HOST."""

from __future__ import annotations

import ctypes

import torch

from gemini.chunk.chunk import Chunk


def host_tensor(chunk: Chunk) -> torch.Tensor:
    """Return the flat tensor over a chunk that is pinned on HOST, shape ``(numel,)``, to be used once
    :meth:`ChunkManager.wait_host` has returned. Its memory is another one the next time: it is valid while
    the chunk is pinned."""
    memory = (ctypes.c_char * chunk.spec.nbytes).from_address(chunk.host.address)
    return torch.frombuffer(memory, dtype=chunk.spec.dtype, count=chunk.spec.numel)
