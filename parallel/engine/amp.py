"""The types of automatic mixed precision in a configuration, and their meaning for a booster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.booster import Booster, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MixedPrecision,
)
from gemini.parallel.booster.plugin.base import Criterion
from gemini.system.config import keyword_names, refuse_unknown


class AMP_TYPE(Enum):
    """The ways to train a model in 16 bits."""

    TORCH = "torch"
    APEX = "apex"
    NAIVE = "naive"


Converted = tuple[nn.Module, Any, Any]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Amp:
    """The settings for a booster. ``precision``: None for fp32; ``casts``: the model is cast to fp16."""

    precision: MixedPrecision | None
    casts: bool


def read_amp(mode: object, options: Options | None = None) -> Amp:
    """Return the settings for a type of mixed precision with its ``options``. Missing options have the
    defaults of its class in :mod:`gemini.parallel.booster.mixed_precision`.

    Raises:
        ConfigError: there is no such mode, or an option has an unsupported value.
        TypeError: the mode has no such option.
    """
    said = dict(options or {})
    if mode is AMP_TYPE.TORCH:
        refuse_unknown("AMP_TYPE.TORCH", said, keyword_names(FP16TorchMixedPrecision))
        return Amp(FP16TorchMixedPrecision(**said), casts=False)
    if mode is AMP_TYPE.APEX:
        enabled = said.pop("enabled", True)
        refuse_unknown("AMP_TYPE.APEX", said, keyword_names(FP16ApexMixedPrecision))
        apex = FP16ApexMixedPrecision(**said)
        return Amp(apex if enabled and apex.opt_level == "O1" else None, casts=False)
    if mode is AMP_TYPE.NAIVE:
        said.pop("verbose", None)
        refuse_unknown("AMP_TYPE.NAIVE", said, keyword_names(FP16NaiveMixedPrecision))
        return Amp(FP16NaiveMixedPrecision(**said), casts=True)
    raise ConfigError(f"mode is {mode!r}; pass AMP_TYPE.TORCH or AMP_TYPE.NAIVE")


def convert_to_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None,
    mode: AMP_TYPE,
    amp_config: Options | None = None,
) -> Converted:
    """Return the three objects in mixed precision. TORCH is autocast with a loss scale; NAIVE casts the whole
    model to fp16 with fp32 masters; APEX is the torch equivalent of apex's level O1. Ranks of
    torch.distributed share their gradients, as with a Booster.

    Raises:
        ConfigError, TypeError: as :func:`read_amp`.
    """
    amp = read_amp(mode, amp_config)
    plugin = LowLevelZeroPlugin(stage=1) if amp.casts else TorchDDPPlugin()
    return Booster(amp.precision, plugin).boost(model, optimizer, criterion)[:3]


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Options | None = None,
) -> Converted:
    """Convert to AMP_TYPE.TORCH; see :func:`convert_to_amp`."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.TORCH, amp_config)


def convert_to_naive_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Options | None = None,
) -> Converted:
    """Convert to AMP_TYPE.NAIVE; see :func:`convert_to_amp`."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.NAIVE, amp_config)


def convert_to_apex_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion | None = None,
    amp_config: Options | None = None,
) -> Converted:
    """Convert to AMP_TYPE.APEX; see :func:`convert_to_amp`."""
    return convert_to_amp(model, optimizer, criterion, AMP_TYPE.APEX, amp_config)
