"""A chunk manager for a model's parameters, for those who compose their own runtime."""

from __future__ import annotations

from torch import nn

from gemini.chunk.chunk import ChunkKind, ChunkSpec
from gemini.chunk.layout import ChunkLayout
from gemini.chunk.manager import ChunkManager
from gemini.chunk.memory import TierBudgets
from gemini.chunk.search import search_chunk_size
from gemini.system.device import default_budget_bytes


def init_chunk_manager(
    model: nn.Module,
    *,
    hidden_dim: int | None = None,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
    budgets: TierBudgets | None = None,
    verbose: bool = True,
) -> tuple[ChunkManager, ChunkLayout]:
    """Search the chunk size for ``model``, lay its parameters out and reserve their chunks; nothing is
    copied.

    The parameters must have one dtype. ``budgets`` defaults to DEVICE alone, with the memory that is free.
    ``verbose`` prints the result of the search, which is logged in any case. The caller closes the manager.

    Raises:
        ConfigError: a size allows no chunk; see :func:`search_chunk_size`.
    """
    named = list(model.named_parameters())
    dtype = named[0][1].dtype
    found = search_chunk_size(
        [param for _, param in named],
        search_range_mb=search_range_mb,
        min_chunk_size_mb=min_chunk_size_mb,
        hidden_dim=hidden_dim,
        itemsize=dtype.itemsize,
    )
    found.report(printed=verbose)
    layout = ChunkLayout.build(named, found.chunk_numel, itemsize=dtype.itemsize)
    specs = [ChunkSpec(ChunkKind.PARAM, numel, dtype) for numel in layout.chunk_numels]
    return ChunkManager(specs, budgets or TierBudgets(default_budget_bytes())), layout
