"""ChunkManager and GeminiManager of ColossalAI's documentation, as carriers of options for GeminiDDP."""

from __future__ import annotations

import torch
from torch import nn

from gemini.chunk import search_chunk_size
from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.parallel.colo import ProcessGroup
from gemini.placement import PlacementPolicy
from gemini.system.device import current_device

_ITEMSIZE = torch.float16.itemsize
_MEGA = 2**20


class ChunkManager:
    """The size of chunks, in elements, and the ranks that share them.

    ``init_device`` has no effect: the placement policy decides where chunks begin.
    """

    def __init__(
        self,
        chunk_size: int,
        process_group: ProcessGroup | None = None,
        enable_distributed_storage: bool = True,
        init_device: torch.device | str | int | None = None,
    ) -> None:
        """Raises ConfigError if every rank is to have whole chunks."""
        if not enable_distributed_storage:
            raise ConfigError(
                "enable_distributed_storage=False: chunks are always cut among ranks; to have the whole "
                "model on each rank, train with TorchDDPPlugin or ZeRO stage 1"
            )
        self.chunk_size = chunk_size
        self.process_group = process_group
        self.init_device = init_device

    @staticmethod
    def search_chunk_size(
        module: nn.Module, search_range: int, num_sizes: int = 32, min_chunk_size: int | None = None
    ) -> int:
        """Return the chunk size with the least waste, in elements, and print its cost. Tries ``num_sizes``
        sizes within ``search_range`` elements above the minimum (None: 16 * 2**20 elements).
        """
        lowest = 16 * _MEGA if min_chunk_size is None else min_chunk_size
        found = search_chunk_size(
            module,
            search_range_mb=search_range * _ITEMSIZE / _MEGA,
            min_chunk_size_mb=lowest * _ITEMSIZE / _MEGA,
            hidden_dim=max(search_range // num_sizes, 1),
            itemsize=_ITEMSIZE,
        )
        found.report()
        return found.chunk_numel


class GeminiManager:
    """The placement policy for the chunks of a :class:`ChunkManager`."""

    def __init__(
        self,
        placement_policy: str | PlacementPolicy,
        chunk_manager: ChunkManager,
        memstats: Trace | None = None,
    ) -> None:
        self.placement_policy = placement_policy
        self.chunk_manager = chunk_manager
        self.memstats = memstats

    @staticmethod
    def get_default_device(placement_policy: str) -> torch.device:
        """Return where a policy keeps unused chunks: the CPU for ``"cpu"``, else the computing device."""
        return torch.device("cpu") if placement_policy == "cpu" else current_device()


def init_chunk_manager(
    model: nn.Module,
    init_device: torch.device | str | int | None = None,
    hidden_dim: int | None = None,
    search_range_mb: float = 32,
    min_chunk_size_mb: float = 32,
) -> ChunkManager:
    """Search the chunk size for ``model`` and print its cost. Raises ConfigError like
    :func:`gemini.chunk.search_chunk_size`.
    """
    found = search_chunk_size(
        model,
        search_range_mb=search_range_mb,
        min_chunk_size_mb=min_chunk_size_mb,
        hidden_dim=hidden_dim,
        itemsize=_ITEMSIZE,
    )
    found.report()
    return ChunkManager(found.chunk_numel, init_device=init_device)
