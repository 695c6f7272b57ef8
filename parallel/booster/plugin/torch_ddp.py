"""TorchDDPPlugin: a replica of the model on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from gemini.comm.peers import ModelRanks
from gemini.errors import ConfigError
from gemini.parallel.booster.data_parallel import AutocastCriterion, DataParallel, SingleProcess
from gemini.parallel.booster.mixed_precision import FP16TorchMixedPrecision, Precision
from gemini.parallel.booster.optimizer import BoostedOptimizer
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Plugin
from gemini.system.device import current_device


class TorchDDPPlugin(Plugin):
    """Train with :class:`torch.nn.parallel.DistributedDataParallel`; the arguments are passed to it.

    With one rank the model trains in this process without DDP, and its arguments have no effect. The model is
    moved to the current GPU if there is one. Any torch optimizer may be used.

    Args:
        broadcast_buffers: copy buffers from rank 0 before every forward pass.
        bucket_cap_mb: size of the buckets in which gradients are reduced.
        find_unused_parameters: look for parameters that a forward pass did not use; needed if there are any.
        check_reduction, gradient_as_bucket_view, static_graph: see DistributedDataParallel.
        process_group: the ranks that share gradients; None means all.
        model_ranks: the ranks with the other parts of the model, as in :class:`gemini.GeminiDDP`: they clip
            by one norm and skip steps together.
    """

    def __init__(
        self,
        *,
        broadcast_buffers: bool = True,
        bucket_cap_mb: int = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        process_group: dist.ProcessGroup | None = None,
        model_ranks: ModelRanks | None = None,
    ) -> None:
        self.process_group = process_group
        self._model_ranks = model_ranks
        options = {
            "broadcast_buffers": (broadcast_buffers, True),
            "bucket_cap_mb": (bucket_cap_mb, 25),
            "find_unused_parameters": (find_unused_parameters, False),
            "check_reduction": (check_reduction, False),
            "gradient_as_bucket_view": (gradient_as_bucket_view, False),
            "static_graph": (static_graph, False),
        }
        # Pass only changed options: torch renames some, but keeps the defaults.
        self._options = {name: value for name, (value, default) in options.items() if value != default}

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Mixed precision is torch's: fp32 weights under autocast."""
        device = current_device()
        _check_model(model, precision)
        dtype = precision.dtype if precision is not None else None
        model.to(device)  # parameters keep their identity: the optimizer still holds them
        boosted = self.wrap(model, device, dtype)
        if criterion is not None and dtype is not None:
            criterion = AutocastCriterion(criterion, device, dtype)
        if isinstance(criterion, nn.Module):
            criterion.to(device)
        optim = None
        if optimizer is not None:
            optim = BoostedOptimizer(optimizer, _scaler(precision, device), self._model_ranks)
        return Boosted(boosted, optim, criterion)

    def wrap(self, model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return the model in the wrapper that trains it; ``dtype`` is that of autocast, None for fp32."""
        if self.ranks.size > 1 and any(param.requires_grad for param in model.parameters()):
            options = {"process_group": self.process_group, **self._options}
            return DataParallel(model, device, dtype, **options)
        return SingleProcess(model, device, dtype)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; ``optimizer`` is not needed."""
        assert isinstance(model, (DataParallel, SingleProcess))
        return model.no_sync()


def _check_model(model: nn.Module, precision: Precision | None) -> None:
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ConfigError(
            "the model is on 'meta', but every rank of TorchDDPPlugin holds the whole model; build it on "
            "'cpu', or use GeminiPlugin"
        )
    if precision is None:
        return
    if precision.name == "fp16_naive":
        raise ConfigError(
            "TorchDDPPlugin keeps fp32 weights, so mixed_precision='fp16_naive' works only with "
            "GeminiPlugin and LowLevelZeroPlugin; use 'fp16' or 'bf16'"
        )
    half = [
        name for name, param in model.named_parameters() if param.dtype in (torch.float16, torch.bfloat16)
    ]
    if half:
        raise ConfigError(
            f"mixed_precision={precision.name!r} needs fp32 weights, but {len(half)} parameters (first "
            f"{half[0]!r}) are 16-bit; call model.float() first, or leave mixed_precision out"
        )


def _scaler(precision: Precision | None, device: torch.device) -> GradScaler | None:
    """Return the loss scaler, which only fp16 needs; else None."""
    if precision is None or precision.name != "fp16":
        return None
    settings = precision.settings or FP16TorchMixedPrecision()
    assert isinstance(settings, FP16TorchMixedPrecision)
    if not settings.enabled:
        return None
    return GradScaler(
        device.type,
        init_scale=settings.init_scale,
        growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor,
        growth_interval=settings.growth_interval,
    )
