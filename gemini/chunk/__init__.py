"""Chunks: layout, size search, memory windows and the manager that moves them between tiers."""

from gemini.chunk.chunk import Chunk
from gemini.chunk.layout import search_chunk_size
from gemini.chunk.manager import ChunkManager, init_chunk_manager
from gemini.chunk.memory import TierBudgets

__all__ = [
    "Chunk",
    "ChunkManager",
    "TierBudgets",
    "init_chunk_manager",
    "search_chunk_size",
]
