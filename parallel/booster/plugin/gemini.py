"""GeminiPlugin: ZeRO-3 in chunks that move between tiers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.comm.groups import group_of
from gemini.errors import ConfigError, GeminiError
from gemini.model.ddp import GeminiDDP
from gemini.model.handle import handle_of
from gemini.optim.gemini_optimizer import GeminiOptimizer
from gemini.optim.kernel_adam import CPUAdam
from gemini.optim.kernels import StateFormat
from gemini.optim.rule_choice import rule_of
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, Plugin, with_precision
from gemini.parallel.expert_ranks import checked_ep_size
from gemini.placement import PlacementPolicy
from gemini.system.config import keyword_names, refuse_unknown

_MODEL = keyword_names(GeminiDDP) - {"module"}
_OPTIMIZER = keyword_names(GeminiOptimizer) - {"optim", "model"}


class GeminiPlugin(Plugin):
    """Train with :class:`gemini.GeminiDDP` and :class:`gemini.GeminiOptimizer`.

    ::

        GeminiPlugin(placement_policy="auto", device_bytes="4GiB", disk_dir="/nvme", max_norm=1.0)

    Over several processes every chunk is cut among them (ZeRO-3). The model may be on ``meta``. The optimizer
    is one that GeminiOptimizer drives, made before :meth:`Booster.boost` over the model's parameters. With a
    16-bit ``mixed_precision`` here or in the booster, all parameters are cast and fp32 masters are kept.

    Args:
        device, placement_policy: see GeminiDDP.
        ep_size: 1: chunks are cut over ranks, those of experts too, and no rank has experts of its own.
        options: further keywords of GeminiDDP (budgets, chunk search, ``mixed_precision``, ``process_group``)
            and of GeminiOptimizer (``max_norm``, ``initial_scale`` and the others of the loss scale,
            ``overlap``, ``elementwise``, ``whole``).

    Raises:
        TypeError: a keyword that neither has. ConfigError: ``ep_size`` above 1.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        placement_policy: str | PlacementPolicy = "auto",
        *,
        ep_size: int = 1,
        **options: Any,
    ) -> None:
        if checked_ep_size(ep_size) > 1:
            raise ConfigError(
                f"ep_size {ep_size}: GeminiPlugin cuts chunks over all ranks, which would have different "
                "experts; choose LowLevelZeroPlugin(ep_size=...), or leave it out: every chunk is cut anyway"
            )
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
        if optimizer is not None:
            said = {name: optimizer_options.get(name, False) for name in ("elementwise", "whole")}
            rule_of(optimizer, **said)  # refuses before anything
        if optimizer is not None and model_options.get("config") is None:
            # What cannot train is refused at once: where the rule is known before chunks are, by wrapping.
            is_adam = isinstance(optimizer, CPUAdam) and optimizer.state_format == StateFormat()
            model_options = {"optimizer_rule": "adam" if is_adam else "none", **model_options}
        managed = GeminiDDP(model, **model_options)
        if optimizer is None:
            return Boosted(managed, None, criterion)
        try:
            boosted = GeminiOptimizer(optimizer, managed, **optimizer_options)
        except GeminiError:
            handle = handle_of(managed)
            if handle.peers is None:  # what one rank alone was refused would keep the others waiting
                handle.release()
            raise
        return Boosted(managed, boosted, criterion)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; the optimizer is not needed."""
        assert isinstance(model, GeminiDDP)
        return model.no_sync()
