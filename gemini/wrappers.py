"""The seeds' helper functions: a model and an optimizer wrapped by stage."""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.ddp import GeminiDDP
from gemini.errors import ConfigError
from gemini.optim import CPUAdam, GeminiOptimizer, HybridAdam


def zero_model_wrapper(
    model: nn.Module, zero_stage: int = 1, gemini_config: dict[str, Any] | None = None
) -> GeminiDDP:
    """Wrap ``model`` for ZeRO stage 3, which is Gemini; ``gemini_config`` holds keywords of GeminiDDP.

    Raises:
        ConfigError: for stages 1 and 2, which shard over processes; this release runs one.
    """
    if zero_stage != 3:
        raise ConfigError(
            f"zero_stage={zero_stage} shards over processes and this release runs one; use zero_stage=3"
        )
    return GeminiDDP(model, **(gemini_config or {}))


def zero_optim_wrapper(
    model: GeminiDDP, optimizer: CPUAdam | HybridAdam, *, max_norm: float = 0.0, **scaler: Any
) -> GeminiOptimizer:
    """Wrap ``optimizer`` for a model from :func:`zero_model_wrapper`; ``scaler`` holds GeminiOptimizer's
    loss-scale keywords."""
    return GeminiOptimizer(optimizer, model, max_norm=max_norm, **scaler)
