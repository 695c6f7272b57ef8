"""GeminiPlugin: ZeRO-3 in chunks that move between tiers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.comm.collectives import group_of
from gemini.errors import ConfigError
from gemini.model.ddp import GeminiDDP
from gemini.optim.cpu_adam import CPUAdam
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Plugin
from gemini.parallel.booster.plugin.options import with_precision
from gemini.placement import PlacementPolicy
from gemini.system.config import keyword_names, refuse_unknown

_MODEL = keyword_names(GeminiDDP) - {"module"}
_OPTIMIZER = keyword_names(GeminiOptimizer) - {"optim", "model"}


class GeminiPlugin(Plugin):
    """Train with :class:`gemini.GeminiDDP` and :class:`gemini.GeminiOptimizer`.

    ::

        GeminiPlugin(placement_policy="auto", device_bytes="4GiB", disk_dir="/nvme", max_norm=1.0)

    Over several processes every chunk is cut among them (ZeRO-3). The model may be on ``meta``. The optimizer
    is a CPUAdam or HybridAdam, made before :meth:`Booster.boost` over the model's parameters. With a 16-bit
    ``mixed_precision`` here or in the booster, all parameters are cast and fp32 masters are kept.

    Args:
        device, placement_policy: see GeminiDDP.
        options: further keywords of GeminiDDP (budgets, chunk search, ``mixed_precision``, ``process_group``)
            and of GeminiOptimizer (``max_norm``, ``initial_scale`` and the others of the loss scale,
            ``overlap``).

    Raises:
        TypeError: a keyword that neither has.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        placement_policy: str | PlacementPolicy = "auto",
        **options: Any,
    ) -> None:
        refuse_unknown("GeminiPlugin", options, _MODEL | _OPTIMIZER)
        self._model_options = {key: value for key, value in options.items() if key in _MODEL}
        self._model_options.update(device=device, placement_policy=placement_policy)
        self._optimizer_options = {key: value for key, value in options.items() if key in _OPTIMIZER}
        group = options.get("process_group")
        self.process_group = group_of(group) if isinstance(group, DeviceMesh) else group

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Raises OutOfBudgetError if the model cannot fit; nothing was changed."""
        model_options, optimizer_options = with_precision(
            "GeminiPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        if optimizer is not None and not isinstance(optimizer, CPUAdam):
            raise ConfigError(
                f"GeminiPlugin updates chunks with our Adam, not with {type(optimizer).__name__}: make the "
                "optimizer gemini.HybridAdam(model.parameters(), ...), or use TorchDDPPlugin"
            )
        if optimizer is not None and model_options.get("config") is None:
            model_options = {
                "optimizer_rule": "adam",
                **model_options,
            }  # what cannot train is refused at once
        managed = GeminiDDP(model, **model_options)
        if optimizer is None:
            return Boosted(managed, None, criterion)
        boosted = GeminiOptimizer(optimizer, managed, **optimizer_options)
        return Boosted(managed, boosted, criterion)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; the optimizer is not needed."""
        assert isinstance(model, GeminiDDP)
        return model.no_sync()
