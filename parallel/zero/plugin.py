"""LowLevelZeroPlugin: a model and its optimizer made ready for ZeRO 1 or 2 in one call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError

from .collectives import Collectives
from .model import LowLevelZeroModel
from .optimizer import LowLevelZeroOptimizer
from .options import parse_precision


class LowLevelZeroPlugin:
    """Hold the options of ZeRO stage 1 or 2; :meth:`configure` applies them.

    Args:
        reduce_bucket_size_in_m: millions (2**20) of elements that are sent at a time.
        cast_inputs: whether floating-point inputs of the model are cast to ``precision``.
        max_norm: the optimizer's ``clip_grad_norm``.

    The others are arguments of :class:`LowLevelZeroOptimizer`. The loss scale starts higher than there, as it
    always has under this name; the first steps find the right one.

    Raises:
        ConfigError: an unknown precision.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str | torch.dtype = "fp16",
        *,
        initial_scale: float = 2**32,
        min_scale: float = 1,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: int = 12,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        cast_inputs: bool = True,
        dp_process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.stage = stage
        self.precision = parse_precision(precision)
        self.cast_inputs = cast_inputs
        self._group = dp_process_group
        self._options: dict[str, Any] = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
            "clip_grad_norm": max_norm,
            "norm_type": norm_type,
            "reduce_bucket_size": reduce_bucket_size_in_m * 2**20,
            "communication_dtype": communication_dtype,
            "overlap_communication": overlap_communication,
            "cpu_offload": cpu_offload,
        }

    def configure(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[LowLevelZeroModel, LowLevelZeroOptimizer | None]:
        """Return model and optimizer for ZeRO; both are changed in place.

        Every rank gets the first one's weights and buffers. Without an optimizer the model is only cast.
        """
        wrapped = None
        if optimizer is not None:
            wrapped = LowLevelZeroOptimizer(
                optimizer,
                stage=self.stage,
                precision=self.precision,
                dp_process_group=self._group,
                **self._options,
            )
        self._spread_rest(model, wrapped)
        ready = LowLevelZeroModel(model, self.precision, cast_inputs=self.cast_inputs, stage=self.stage)
        return ready, wrapped

    def no_sync(
        self, model: nn.Module | None = None, optimizer: LowLevelZeroOptimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return the optimizer's :meth:`LowLevelZeroOptimizer.no_sync`."""
        if not isinstance(optimizer, LowLevelZeroOptimizer):
            raise ConfigError("no_sync needs the optimizer that configure() returned")
        return optimizer.no_sync()

    def _spread_rest(self, model: nn.Module, optimizer: LowLevelZeroOptimizer | None) -> None:
        """Give all ranks the first one's buffers, and parameters that no optimizer has spread."""
        done = set() if optimizer is None else {shard.param for shard in optimizer.sharded.shards}
        tensors = [*model.buffers(), *(param for param in model.parameters() if param not in done)]
        for tensor in tensors:
            Collectives(self._group, tensor.device).spread(tensor)
