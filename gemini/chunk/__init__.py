"""Chunks: layout, size search, memory windows and the manager that moves them between tiers."""

from gemini.chunk.build import init_chunk_manager
from gemini.chunk.chunk import Chunk, ChunkKind, ChunkSpec, TensorIds
from gemini.chunk.cpu_memory import CPU, CpuDevice
from gemini.chunk.host_tensor import host_tensor
from gemini.chunk.layout import ChunkLayout, TensorSlot
from gemini.chunk.manager import ChunkManager
from gemini.chunk.memory import ComputeDevice, TierBudgets
from gemini.chunk.observer import ChunkObserver
from gemini.chunk.search import SearchResult, search_chunk_size

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
    "SearchResult",
    "TensorIds",
    "TensorSlot",
    "TierBudgets",
    "host_tensor",
    "init_chunk_manager",
    "search_chunk_size",
]
