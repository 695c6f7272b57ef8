"""Managed models with the defaults of ColossalAI's documentation: fp16, and a printed chunk search."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

import gemini
from gemini.compat.adapters.chunk_adapters import GeminiManager
from gemini.parallel import colo as ours
from gemini.parallel.colo.tensor import DistSpec
from gemini.parallel.launch import global_context
from gemini.parallel.partition import Partition
from gemini.parallel.tensor.nn import partition_of
from gemini.parallel.tensor.nn.grid_layer import GridLayer
from gemini.parallel.zero import LowLevelZeroModel
from gemini.placement import PlacementPolicy


class GeminiDDP(ours.GeminiDDP):
    """:class:`gemini.parallel.colo.GeminiDDP` that by default computes in fp16 and prints its chunk search. A
    model with layers of the launched tensor parallelism is wrapped as one of several parts.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | int | None = None,
        placement_policy: str | PlacementPolicy = "auto",
        **options: Any,
    ) -> None:
        """Arguments and errors as for :class:`gemini.GeminiDDP`."""
        defaults: dict[str, Any] = {}
        if options.get("config") is None:
            defaults = {"mixed_precision": "fp16", "verbose": True}
        parts = _parts_over_grid(module)
        if parts is not None:
            defaults |= {"process_group": global_context.mesh["dp"], "model_ranks": parts.model_ranks}
        super().__init__(module, device=device, placement_policy=placement_policy, **{**defaults, **options})
        self.partition = parts or self.partition


class ZeroDDP(GeminiDDP):
    """:class:`GeminiDDP` with the options of a :class:`GeminiManager`."""

    def __init__(
        self,
        module: nn.Module,
        gemini_manager: GeminiManager,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
    ) -> None:
        chunks = gemini_manager.chunk_manager
        group = chunks.process_group
        mesh = None if group is None else group.mesh
        ranks: dict[str, Any] = {} if mesh is None else {"process_group": mesh["dp"]}
        super().__init__(
            module,
            placement_policy=gemini_manager.placement_policy,
            memstats=gemini_manager.memstats,
            min_chunk_size_mb=chunks.chunk_size * torch.float16.itemsize / 2**20,
            search_range_mb=0,
            pin_memory=pin_memory,
            force_outputs_fp32=force_outputs_fp32,
            strict_ddp_mode=strict_ddp_mode,
            **ranks,
        )


def zero_model_wrapper(
    model: nn.Module, zero_stage: int = 1, gemini_config: dict[str, Any] | None = None
) -> GeminiDDP | gemini.GeminiDDP | LowLevelZeroModel:
    """Wrap like :func:`gemini.zero_model_wrapper`; stage 3 gives the :class:`GeminiDDP` of this module."""
    if zero_stage == 3:
        return GeminiDDP(model, **(gemini_config or {}))
    ours.apply_specs(model)
    return gemini.zero_model_wrapper(model, zero_stage, gemini_config)


def autoparallelize(model: nn.Module, meta_input_samples: Any, **options: Any) -> nn.Module:
    """Return only the model of :func:`gemini.autoparallelize`, for a plain training loop: parameters in
    chunks (ZeRO 3), layers divided among ranks, no pipeline stages. Make the optimizer afterwards, such as
    GeminiAdamOptimizer(model).
    """
    pins = ("pp=1", "sp=1", "zero=3", *options.pop("pins", ()))
    found: nn.Module = gemini.autoparallelize(model, meta_input_samples, pins=pins, **options).model
    return found


class ColoInitContext(AbstractContextManager["ColoInitContext"]):
    """:func:`gemini.parallel.colo.ColoInitContext`, by default on the CPU and in fp32. One object may be
    entered any number of times.
    """

    def __init__(
        self,
        device: torch.device | str | int = "cpu",
        dtype: torch.dtype = torch.float32,
        default_pg: ours.ProcessGroup | None = None,
        default_dist_spec: DistSpec | None = None,
    ) -> None:
        self._arguments = (device, dtype)
        self._records: dict[str, Any] = {"default_pg": default_pg, "default_dist_spec": default_dist_spec}
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> ColoInitContext:
        context = ours.ColoInitContext(*self._arguments, **self._records)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _parts_over_grid(module: nn.Module) -> Partition | None:
    """Return the partition of a model with layers over the launched grid; None if it has no such layers."""
    if global_context.tensor_parallel_size == 1:
        return None
    return partition_of(module) if any(isinstance(layer, GridLayer) for layer in module.modules()) else None
