"""Sizes and layout of the chunks that a pipeline stage holds under ZeRO 3, computed by the runtime itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from gemini.chunk.cpu_memory import CPU
from gemini.comm.peers import Share
from gemini.placement.policies import ModelDataSize, TierCapacity, missing_bytes
from gemini.runtime.build import draw_blueprint
from gemini.runtime.config import GeminiConfig
from gemini.runtime.storage.data_sizes import GroupPlan, plan_groups


@dataclass(frozen=True)
class StageCapacity:
    """The budget of each rank on every tier, in bytes."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def lower_bytes(self) -> int:
        """Bytes that fit below DEVICE."""
        return self.host_bytes + self.disk_bytes


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of a rank.

    Attributes:
        place_of: index into ``groups``, by parameter name.
        gather_bytes: limit on the chunks that are whole at the same time; it matters only over several ranks.
    """

    groups: tuple[GroupPlan, ...]
    place_of: Mapping[str, int]
    gather_bytes: int


@dataclass(frozen=True)
class ChunkSizes:
    """Bytes of a rank's chunks.

    Attributes:
        total_bytes: all chunks, including those that are whole for a while.
        working_bytes: the most that must be on DEVICE at once.
        data: the sizes that the runtime checks budgets with.
    """

    total_bytes: int
    working_bytes: int
    table: ChunkTable | None = None
    data: ModelDataSize | None = None

    def missing_bytes(self, capacity: StageCapacity) -> int:
        """Return what the runtime would miss on all tiers together."""
        if self.data is None:
            return 0
        tiers = TierCapacity(capacity.device_bytes, capacity.host_bytes, capacity.disk_bytes)
        return missing_bytes(self.data, tiers)


def chunk_sizes(model: nn.Module, names: frozenset[str], copies: int, capacity: StageCapacity) -> ChunkSizes:
    """Return the chunk sizes of a rank that holds the parameters ``names``, cut over ``copies`` ranks.

    Raises:
        ConfigError: a parameter cannot be managed.
        OutOfBudgetError: the layout would need too many pieces, because DEVICE is far too small for the
            model.
    """
    narrow = {param.dtype for param in model.parameters() if param.is_floating_point()} - {torch.float32}
    config = GeminiConfig(
        precision=next(iter(narrow & {torch.bfloat16, torch.float16}), None),
        device_bytes=capacity.device_bytes,
        host_bytes=capacity.host_bytes,
        disk_dir="DIR" if capacity.disk_bytes else None,
        disk_bytes=capacity.disk_bytes or None,
    )
    share = Share(0, copies) if copies > 1 else None
    with _only(model, names):
        blueprint = draw_blueprint(model, config, share, cuts=share is None and CPU.cuts_chunks)
    size, chunk_numel = blueprint.context.size, blueprint.search.chunk_numel
    # Experts of one array move together here: at most, what a pass takes of them.
    groups = [replace(each, parts=1) for each in plan_groups(blueprint.groups, chunk_numel, share)]
    place_of: dict[str, int] = {}
    first = 0
    for spec in blueprint.groups:
        place_of |= {slot.name: first + slot.chunk for slot in spec.layout.slots}
        first += len(spec.layout.chunk_numels)
    table = ChunkTable(tuple(groups), place_of, blueprint.gather_bytes)
    return ChunkSizes(size.total_bytes, size.working_set_bytes, table, size)


@contextmanager
def _only(model: nn.Module, names: frozenset[str]) -> Iterator[None]:
    """Context manager that temporarily removes all parameters except ``names`` from the model."""
    taken: list[tuple[nn.Module, str, nn.Parameter]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            if param is not None and f"{prefix}.{name}".lstrip(".") not in names:
                taken.append((module, name, param))
    for module, name, _ in taken:
        module._parameters[name] = None
    try:
        yield
    finally:
        for module, name, param in taken:
            module._parameters[name] = param
