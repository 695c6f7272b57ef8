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
from gemini.optim.muon import Muon
from gemini.optim.rule_choice import rule_of
from gemini.parallel.booster.mixed_precision import Precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion, with_precision
from gemini.parallel.booster.plugin.parts_plugin import PartsPlugin
from gemini.parallel.expert_ranks import checked_ep_size
from gemini.placement import PlacementPolicy
from gemini.system.config import keyword_names, refuse_unknown

_MODEL = keyword_names(GeminiDDP) - {"module", "experts"}
_OPTIMIZER = keyword_names(GeminiOptimizer) - {"optim", "model"}


class GeminiPlugin(PartsPlugin):
    """Train with :class:`gemini.GeminiDDP` and :class:`gemini.GeminiOptimizer`.

    ::

        GeminiPlugin(placement_policy="auto", device_bytes="4GiB", disk_dir="/nvme", max_norm=1.0)

    Over several processes each chunk is divided among them (ZeRO-3). The model may be on ``meta``. The
    optimizer must be one that GeminiOptimizer drives, made over the model's parameters before
    :meth:`Booster.boost`. With a 16-bit ``mixed_precision`` here or in the booster, all parameters are cast
    and fp32 masters are kept.

    Args:
        device, placement_policy: see GeminiDDP.
        ep_size: the number of neighbouring ranks that divide the experts of a mixture, each with chunks of
            its own experts; see docs/experts.md. This enables ``strict_ddp_mode`` unless that is given. With
            1, chunks of experts are divided among all ranks.
        options: further keywords of GeminiDDP (budgets, chunk search, ``mixed_precision``, ``process_group``)
            and of GeminiOptimizer (``max_norm``, ``initial_scale`` and the others of the loss scale,
            ``overlap``, ``elementwise``, ``whole``).

    Raises:
        TypeError: neither class has such a keyword.
        ConfigError: ``ep_size`` is invalid.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        placement_policy: str | PlacementPolicy = "auto",
        *,
        ep_size: int = 1,
        **options: Any,
    ) -> None:
        refuse_unknown("GeminiPlugin", options, _MODEL | _OPTIMIZER)
        super().__init__()
        self._ep_size = checked_ep_size(ep_size)
        self.divides_experts = ep_size > 1
        self._model_options = {key: value for key, value in options.items() if key in _MODEL}
        self._model_options.update(device=device, placement_policy=placement_policy)
        self._optimizer_options = {key: value for key, value in options.items() if key in _OPTIMIZER}
        if self.divides_experts:
            self._prepare_for_experts(options)
        group = options.get("process_group")
        self.process_group = group_of(group) if isinstance(group, DeviceMesh) else group

    def _prepare_for_experts(self, options: dict[str, Any]) -> None:
        """Enable the check for ranks that run different operators; without it they would wait for each
        other's tokens. Raises ConfigError for options that divided experts do not support.
        """
        group = options.get("process_group")
        if options.get("model_ranks") is not None:
            raise ConfigError(
                f"ep_size {self._ep_size} with model_ranks: the model was cut before boost(), so its experts "
                "cannot be divided; use HybridParallelPlugin(zero_stage=3, tp_size=..., ep_size=...), which "
                "does both"
            )
        if isinstance(group, DeviceMesh) and group.ndim > 1:
            raise ConfigError(
                f"ep_size {self._ep_size} with a DeviceMesh of shape {tuple(group.shape)}: each of its rows "
                "holds a copy of the model, and experts are divided within one row; pass one dimension of "
                "the mesh"
            )
        if options.get("config") is None:
            self._model_options.setdefault("strict_ddp_mode", True)

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`Plugin`. Raises OutOfBudgetError if the model cannot fit; nothing was changed, except
        that experts may have been divided.
        """
        model_options, optimizer_options = with_precision(
            "GeminiPlugin", "mixed_precision", self._model_options, self._optimizer_options, precision
        )
        if optimizer is not None:
            said = {name: optimizer_options.get(name, False) for name in ("elementwise", "whole")}
            rule_of(optimizer, **said)  # raises before anything is changed
        if optimizer is not None and model_options.get("config") is None:
            # With a known rule, wrapping refuses a model that cannot be trained within the budgets.
            is_adam = isinstance(optimizer, CPUAdam) and optimizer.state_format == StateFormat()
            rule = "muon" if isinstance(optimizer, Muon) else "adam" if is_adam else "none"
            model_options = {"optimizer_rule": rule, **model_options}
        parts = self.divide_experts(model, optimizer, self._ep_size)
        experts = None if parts is None or parts.experts is None else parts.experts.own
        managed, boosted = GeminiDDP(model, experts=experts, **model_options), None
        try:
            if optimizer is not None:
                boosted = GeminiOptimizer(optimizer, managed, **optimizer_options)
        except GeminiError:
            handle = handle_of(managed)
            if handle.peers is None:  # alone, one rank must not release: the others would wait for it
                handle.release()
            raise
        if parts is not None:
            parts.refuse_as_whole(managed)
            self.note_parts(parts, managed, boosted)
        return Boosted(managed, boosted, criterion)

    def no_sync(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> AbstractContextManager[Any]:
        """See :class:`Plugin`; ``optimizer`` is not needed."""
        assert isinstance(model, GeminiDDP)
        return model.no_sync()
