"""Keyword arguments of a plugin that belong to the classes it builds."""

from __future__ import annotations

from typing import Any

from gemini.errors import ConfigError
from gemini.parallel.booster.mixed_precision import (
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Precision,
)

_SCALER = frozenset(
    (
        "initial_scale",
        "min_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "max_scale",
        "log_num_zeros_in_grad",
    )
)


def with_precision(
    plugin: str, key: str, options: dict[str, Any], scaler: dict[str, Any], precision: Precision | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``options`` and ``scaler`` with the booster's ``precision`` in them, for a plugin that casts the
    whole model. ``key`` is the plugin's own argument for it.

    Raises:
        ConfigError: plugin and booster were told different things, or something that a cast model has not.
    """
    if precision is None:
        return options, scaler
    settings = precision.settings
    if isinstance(settings, FP16TorchMixedPrecision):
        raise ConfigError(
            f"FP16TorchMixedPrecision is autocast, and {plugin} casts the whole model: pass "
            "mixed_precision='fp16', or FP16NaiveMixedPrecision(...) for the loss scale"
        )
    name = "bf16" if precision.name == "bf16" else "fp16"
    if options.get(key) not in (None, name, precision.dtype):
        raise ConfigError(
            f"{plugin} was told {key}={options[key]!r} and the booster mixed_precision={precision.name!r}; "
            "give it to one of them"
        )
    if isinstance(settings, FP16NaiveMixedPrecision):
        if twice := sorted(scaler.keys() & _SCALER):
            raise ConfigError(
                f"{', '.join(twice)} were given to {plugin} and to FP16NaiveMixedPrecision; "
                "give them to one of them"
            )
        scaler = {**scaler, **vars(settings)}
    return {**options, key: name}, scaler
