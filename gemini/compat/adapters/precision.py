"""Automatic mixed precision by type, as a Booster has it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from gemini.parallel.booster.plugin.base import Criterion
from gemini.system.config import keyword_names, refuse_unknown


class AMP_TYPE(Enum):
    """How a model trains in 16 bits."""

    TORCH = "torch"
    APEX = "apex"
    NAIVE = "naive"


Amp = tuple[nn.Module, Any, Any]


def convert_to_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None,
    mode: AMP_TYPE,
    amp_config: Mapping[str, Any] | None = None,
) -> Amp:
    """Return the three in mixed precision: TORCH is autocast with a loss scale, NAIVE the whole model in fp16
    with fp32 masters. Ranks of torch.distributed share their gradients, as with a Booster.

    Raises:
        ConfigError: there is no such mode. TypeError: ``amp_config`` has what the mode has not.
    """
    convert = {
        AMP_TYPE.TORCH: convert_to_torch_amp,
        AMP_TYPE.NAIVE: convert_to_naive_amp,
        AMP_TYPE.APEX: convert_to_apex_amp,
    }
    if mode not in convert:
        raise ConfigError(f"mode is {mode!r}; pass AMP_TYPE.TORCH or AMP_TYPE.NAIVE")
    return convert[mode](model, optimizer, criterion, amp_config)


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Mapping[str, Any] | None = None,
) -> Amp:
    """Convert to AMP_TYPE.TORCH; ``amp_config``: as FP16TorchMixedPrecision, and ``enabled``."""
    options = dict(amp_config or {})
    enabled = options.pop("enabled", True)
    refuse_unknown("AMP_TYPE.TORCH", options, keyword_names(FP16TorchMixedPrecision))
    precision = FP16TorchMixedPrecision(**options) if enabled else None
    return Booster(precision, TorchDDPPlugin()).boost(model, optimizer, criterion)[:3]


def convert_to_naive_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Mapping[str, Any] | None = None,
) -> Amp:
    """Convert to AMP_TYPE.NAIVE; ``amp_config``: as FP16NaiveMixedPrecision. Raises ConfigError where zeros
    of gradients are to be counted, which is not done."""
    options = dict(amp_config or {})
    options.pop("verbose", None)
    if options.pop("log_num_zeros_in_grad", False):
        raise ConfigError("AMP_TYPE.NAIVE: log_num_zeros_in_grad=True is not supported; leave it out")
    refuse_unknown("AMP_TYPE.NAIVE", options, keyword_names(FP16NaiveMixedPrecision))
    booster = Booster(FP16NaiveMixedPrecision(**options), LowLevelZeroPlugin(stage=1))
    return booster.boost(model, optimizer, criterion)[:3]


def convert_to_apex_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Mapping[str, Any] | None = None,
) -> Amp:
    """Convert to what apex's level O1 with a dynamic loss scale, its default, is in torch. Raises ConfigError
    for anything else of apex."""
    options = {name: value for name, value in (amp_config or {}).items() if value is not None}
    enabled = options.pop("enabled", True)
    for name, same in (("opt_level", ("O1",)), ("loss_scale", ("dynamic",)), ("num_losses", (1,))):
        if options.pop(name, same[0]) not in same:
            raise ConfigError(
                f"AMP_TYPE.APEX: {name} may only be {same[0]!r}, which AMP_TYPE.TORCH does; for the whole "
                "model in fp16 take AMP_TYPE.NAIVE"
            )
    options.pop("verbosity", None)
    if options:
        unknown = ", ".join(options)
        raise ConfigError(f"AMP_TYPE.APEX: there is no apex here, nor its {unknown}; use AMP_TYPE.TORCH")
    return convert_to_torch_amp(model, optimizer, criterion, {"enabled": enabled})
