"""Plugins with the default of ColossalAI's documentation: fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel import booster as ours
from gemini.parallel.booster.mixed_precision import Precision, choose_precision
from gemini.parallel.booster.plugin.base import Boosted, Criterion
from gemini.parallel.colo import apply_specs
from gemini.placement import PlacementPolicy

_NAMES = {"fp16": "fp16_naive", "bf16": "bf16", "fp32": None}


class GeminiPlugin(ours.GeminiPlugin):
    """:class:`gemini.parallel.GeminiPlugin` that computes in fp16 and prints its chunk search, unless the
    plugin or the booster is configured otherwise. ``precision``: fp16, bf16 or fp32.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        placement_policy: str | PlacementPolicy = "auto",
        *,
        precision: str = "fp16",
        **options: Any,
    ) -> None:
        said = options.get("mixed_precision") is not None or options.get("config") is not None
        self._default = None if said else _checked("GeminiPlugin", precision)
        verbose = {} if options.get("config") is not None else {"verbose": True}
        super().__init__(device, placement_policy, **{**verbose, **options})

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`gemini.parallel.GeminiPlugin`. Also raises ConfigError if parameters are to be divided
        among ranks of tensor parallelism.
        """
        if apply_specs(model).model_ranks is not None:
            raise ConfigError(
                "parameters of the model are cut over ranks of tensor parallelism: take, not a booster, but "
                "nn.parallel.GeminiDDP(model) and GeminiAdamOptimizer(model, ...)"
            )
        return super().configure(model, optimizer, criterion, precision or self._default)


class LowLevelZeroPlugin(ours.LowLevelZeroPlugin):
    """:class:`gemini.parallel.LowLevelZeroPlugin` that computes in fp16 unless the plugin or the booster is
    configured otherwise.
    """

    def __init__(self, stage: int = 1, precision: str = "fp16", **options: Any) -> None:
        self._default = _checked("LowLevelZeroPlugin", precision)
        super().__init__(stage, None, **options)

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        criterion: Criterion | None,
        precision: Precision | None,
    ) -> Boosted:
        """See :class:`gemini.parallel.LowLevelZeroPlugin`."""
        return super().configure(model, optimizer, criterion, precision or self._default)


def _checked(plugin: str, precision: str) -> Precision | None:
    """Return the precision with this name; None for fp32."""
    if precision not in _NAMES:
        raise ConfigError(f"{plugin}: precision is {precision!r}; it may be {', '.join(_NAMES)}")
    return choose_precision(_NAMES[precision])
