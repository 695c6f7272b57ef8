"""The sharded tensors of low-level ZeRO as sources of whole tensors. Every rank must run each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini.checkpoint.tensor_file import TensorSpec
from gemini.parallel.booster.checkpoint.tensor_source import Sink, TensorSource
from gemini.parallel.zero import LowLevelZeroOptimizer
from gemini.parallel.zero.params import ParamShard


def master_sources(optimizer: LowLevelZeroOptimizer, names: Mapping[torch.Tensor, str]) -> list[TensorSource]:
    """Return the fp32 masters of 16-bit parameters, under the names of the parameters."""
    return [
        _gathered(names[shard.param], shard, shard.master_dtype, shard.master.detach().reshape(-1))
        for shard in optimizer.sharded.shards
        if shard.has_master
    ]


def state_sources(
    optimizer: LowLevelZeroOptimizer, names: Mapping[torch.Tensor, str]
) -> tuple[list[TensorSource], dict[str, dict[str, Any]]]:
    """Return the states that are tensors, as sources named ``<parameter>/<state>``, and the other states."""
    parts = {part.index: part for part in optimizer.state_shards()}
    # The first rank has a part of every parameter that has elements; others may have none.
    described = optimizer.collectives.first(
        {
            index: ({key: tensor.dtype for key, tensor in part.tensors.items()}, part.values)
            for index, part in parts.items()
        }
    )
    sources: list[TensorSource] = []
    values: dict[str, dict[str, Any]] = {}
    for index, shard in enumerate(optimizer.sharded.shards):
        name = names[shard.param]
        types, others = described.get(index, ({}, {}))
        if others:
            values[name] = dict(others)
        own = parts[index].tensors if index in parts else {}
        for key, dtype in types.items():
            sources.append(_gathered(f"{name}/{key}", shard, dtype, own.get(key)))
    return sources, values


def copy_to_masters(
    optimizer: LowLevelZeroOptimizer, names: Mapping[torch.Tensor, str], state: Mapping[str, torch.Tensor]
) -> None:
    """Copy weights that were loaded into the parameters to the masters, at the precision before any cast."""
    for shard in optimizer.sharded.shards:
        values = state.get(names[shard.param])
        if values is None:
            continue
        shard.refresh_master()
        if shard.has_master:
            with torch.no_grad():
                shard.master.copy_(shard.own_part(values))


def _gathered(
    name: str,
    shard: ParamShard,
    dtype: torch.dtype,
    own: torch.Tensor | None,
) -> TensorSource:
    """Return the source of a tensor; ``own`` is this rank's part of it."""

    def stream(sink: Sink) -> None:
        if shard.numel == 0:
            return
        padded = torch.zeros(shard.width, dtype=dtype, device=shard.home)
        if own is not None:
            padded[: own.numel()].copy_(own.detach())
        rows = shard.ranks.gather_anywhere(padded)
        sink(rows.reshape(-1)[: shard.numel].cpu())

    return TensorSource(TensorSpec(name, dtype, tuple(shard.shape)), stream)
