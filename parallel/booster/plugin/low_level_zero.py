"""LowLevelZeroPlugin: ZeRO stages 1 and 2."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, with_precision
from gemini.parallel.booster.plugin.parts_plugin import PartsPlugin
from gemini.parallel.expert_ranks import checked_ep_size
from gemini.parallel.zero import LowLevelZeroModel, LowLevelZeroOptimizer
from gemini.parallel.zero.model import kept_in_fp32, spread_rest
from gemini.parallel.zero.options import choose_stage, parse_precision
from gemini.system.config import keyword_names, refuse_unknown
from gemini.system.device import current_device

_OWN = frozenset(
    (
        "stage",
        "precision",
        "max_norm",
        "reduce_bucket_size_in_m",
        "cast_inputs",
        "keep_fp32",
        "dp_process_group",
        "model_ranks",
        "experts",
    )
)
_RENAMED = frozenset(("optimizer", "partition_grad", "clip_grad_norm", "reduce_bucket_size"))
_OPTIONS = keyword_names(LowLevelZeroOptimizer) - _OWN - _RENAMED
# Defaults of this class that differ from the optimizer's, for compatibility.
_DEFAULTS = {"overlap_communication": True}
_FP16_DEFAULTS = {"growth_interval": 1000, "max_scale": 2**32}


class LowLevelZeroPlugin(PartsPlugin):
    """Train with :class:`gemini.parallel.LowLevelZeroOptimizer`: ranks shard optimizer states, and with stage
    2 gradients too.

    Any element-wise torch optimizer may be used. The model is moved to the current GPU if there is one. Every
    rank gets the weights and buffers of the first rank.

    Args:
        stage: 1 or 2.
        precision: ``"fp16"``, ``"bf16"`` or ``"fp32"``; None takes the booster's, which defaults to fp32.
        max_norm: the optimizer's ``clip_grad_norm``.
        reduce_bucket_size_in_m: the number of elements sent at a time, in units of 2**20.
        cast_inputs: whether to cast the model's floating-point inputs to ``precision``.
        keep_fp32: parameters that stay in fp32, or modules that contain them, by name or a part of it, as in
            :class:`gemini.GeminiDDP`. Buffers keep their type.
        dp_process_group: the ranks; None means all.
        ep_size: the number of neighbouring ranks that divide the experts of a mixture; see docs/experts.md.
        options: ``norm_type``, ``communication_dtype``, ``overlap_communication``, ``cpu_offload`` and the
            options of the loss scale, as for LowLevelZeroOptimizer. By default gradients are sent during
            backward, and under fp16 the loss scale may grow to 2**32.

    Raises:
        TypeError: there is no such keyword.
        ConfigError: the stage or precision is invalid.
    """

    def __init__(
        self,
        stage: int = 1,
        precision: str | torch.dtype | None = None,
        *,
        max_norm: float = 0.0,
        reduce_bucket_size_in_m: int = 12,
        cast_inputs: bool = True,
        keep_fp32: Iterable[str] = (),
        dp_process_group: dist.ProcessGroup | None = None,
        ep_size: int = 1,
        **options: Any,
    ) -> None:
        refuse_unknown("LowLevelZeroPlugin", options, _OPTIONS | _OWN)
        if stage == 0:
            raise ConfigError(
                "stage is 0; LowLevelZeroPlugin takes 1 or 2; use TorchDDPPlugin, which cuts no state, for "
                "stage 0"
            )
        parse_precision(precision)
        self._precision = precision
        self._cast_inputs = cast_inputs
        self._keep_fp32 = tuple(keep_fp32)
        self._own: dict[str, Any] = {
            "stage": choose_stage(stage, None),
            "dp_process_group": dp_process_group,
            "clip_grad_norm": max_norm,
            "reduce_bucket_size": reduce_bucket_size_in_m * 2**20,
        }
        super().__init__()
        self._options = options
        self._ep_size = checked_ep_size(ep_size)
        self.divides_experts = ep_size > 1
        self.process_group = dp_process_group

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Model and optimizer are changed in place."""
        chosen, options = with_precision(
            "LowLevelZeroPlugin", "precision", {"precision": self._precision}, self._options, precision
        )
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise ConfigError(
                "the model is on 'meta', but every rank of LowLevelZeroPlugin holds the whole model; build "
                "it on 'cpu', or use GeminiPlugin"
            )
        model.to(current_device())
        parts = self.divide_experts(model, optimizer, self._ep_size)
        experts = None if parts is None else parts.experts
        dtype = parse_precision(chosen["precision"] or "fp32")
        cut = None
        if optimizer is not None:
            cut = LowLevelZeroOptimizer(
                optimizer,
                precision=dtype,
                keep_fp32=kept_in_fp32(model, dtype, self._keep_fp32),
                experts=experts,
                **self._own,
                **{**_DEFAULTS, **(_FP16_DEFAULTS if dtype == torch.float16 else {}), **options},
            )
        spread_rest(model, cut, self.process_group, apart=() if experts is None else experts.params)
        ready = LowLevelZeroModel(
            model,
            dtype,
            keep_fp32=self._keep_fp32,
            cast_inputs=self._cast_inputs,
            stage=self._own["stage"],
        )
        if parts is not None:
            parts.refuse_as_whole(ready)
            self.note_parts(parts, ready, cut)
        return Boosted(ready, cut, criterion)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`."""
        if not isinstance(optimizer, LowLevelZeroOptimizer):
            raise ConfigError(
                "no_sync() needs an optimizer, which keeps the gradients: the model was boosted without one"
            )
        return optimizer.no_sync()
