"""Chunks: layout, size search, memory windows and the manager that moves them between tiers."""

from gemini.chunk.chunk import Chunk, ChunkKind, ChunkSpec, CutChunk, TensorIds, host_tensor
from gemini.chunk.cpu_memory import CPU, CpuDevice
from gemini.chunk.layout import ChunkLayout, SearchResult, TensorSlot, search_chunk_size
from gemini.chunk.manager import ChunkManager, ChunkObserver, init_chunk_manager
from gemini.chunk.memory import ComputeDevice, TierBudgets

__all__ = [
    "CPU",
    "Chunk",
    "ChunkKind",
    "ChunkLayout",
    "ChunkManager",
    "ChunkObserver",
    "ChunkSpec",
    "ComputeDevice",
    "CpuDevice",
    "CutChunk",
    "SearchResult",
    "TensorIds",
    "TensorSlot",
    "TierBudgets",
    "host_tensor",
    "init_chunk_manager",
    "search_chunk_size",
]
