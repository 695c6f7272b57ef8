"""The mixed-precision settings of a booster: dtypes and loss scaling."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini.errors import ConfigError


@dataclass(frozen=True)
class FP16TorchMixedPrecision:
    """torch's automatic mixed precision: fp32 weights, and fp16 for operators that torch considers safe.

    The loss scale starts at ``init_scale``. It is multiplied by ``backoff_factor`` when a gradient overflows,
    and by ``growth_factor`` after ``growth_interval`` steps without overflow. Without ``enabled`` the loss is
    not scaled.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(frozen=True)
class FP16NaiveMixedPrecision:
    """The whole model in fp16 with fp32 masters, for the plugins that save memory.

    ``hysteresis`` is the number of overflows before the scale backs off. With ``log_num_zeros_in_grad``,
    after a step ``get_num_zeros_in_grad()`` of the optimizer returns how many gradient elements were 0.
    """

    initial_scale: float = 2.0**32
    min_scale: float = 1
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    log_num_zeros_in_grad: bool = False


@dataclass(frozen=True)
class FP16ApexMixedPrecision:
    """apex's options, restricted to the values that torch's automatic mixed precision implements.

    ``opt_level`` is O1, which is :class:`FP16TorchMixedPrecision`, or O0, which is fp32. apex limits its
    scale to 2**24; torch's grows until a gradient overflows.

    Raises:
        ConfigError: any other value; the message names the option.
    """

    opt_level: str = "O1"
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str | None = None
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for name, same in _APEX.items():
            value = getattr(self, name)
            if value not in same:
                raise ConfigError(
                    f"apex's {name}={value!r} has no equivalent in torch's automatic mixed precision; leave "
                    "it out, or use FP16NaiveMixedPrecision (AMP_TYPE.NAIVE) to keep the whole model in fp16"
                )


# The values of apex's options with which torch does the same; verbosity may have any value.
_APEX: dict[str, tuple[object, ...]] = {
    "opt_level": ("O1", "O0"),
    "cast_model_type": (None,),
    "patch_torch_functions": (None, True),
    "keep_batchnorm_fp32": (None,),
    "master_weights": (None,),
    "loss_scale": (None, "dynamic"),
    "cast_model_outputs": (None,),
    "num_losses": (1,),
    "min_loss_scale": (None,),
    "max_loss_scale": (2.0**24,),
}


@dataclass(frozen=True)
class BF16MixedPrecision:
    """bf16 without a loss scale, which it does not need."""


@dataclass(frozen=True)
class FP8MixedPrecision:
    """Importable by name only: fp8 is not supported.

    Raises:
        ConfigError: always; the message says what to use instead.
    """

    def __post_init__(self) -> None:
        raise ConfigError(f"FP8MixedPrecision: {_REFUSED['fp8']}")


MixedPrecision = (
    FP16TorchMixedPrecision | FP16NaiveMixedPrecision | FP16ApexMixedPrecision | BF16MixedPrecision
)

_REFUSED = {
    "fp8": "fp8 is not supported: training in 8 bits needs a scale for every tensor, which no recipe here "
    "sets; use 'bf16' (BF16MixedPrecision), the smallest type with the range of fp32",
}
_NAMES = ("fp16", "bf16", "fp16_naive", "fp16_apex")


@dataclass(frozen=True)
class Precision:
    """The requested mixed precision: its name, and the settings if an object was given instead of a name."""

    name: str
    settings: MixedPrecision | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit dtype."""
        return torch.bfloat16 if self.name == "bf16" else torch.float16


def choose_precision(asked: str | MixedPrecision | None) -> Precision | None:
    """Return the precision that ``asked`` stands for; None for fp32.

    Raises:
        ConfigError: the mixed precision is unknown.
    """
    if asked is None:
        return None
    if asked == "fp16_apex":
        asked = FP16ApexMixedPrecision()
    if isinstance(asked, FP16ApexMixedPrecision):
        if asked.opt_level == "O0":
            return None
        asked = FP16TorchMixedPrecision()
    if isinstance(asked, FP16TorchMixedPrecision):
        return Precision("fp16", asked)
    if isinstance(asked, FP16NaiveMixedPrecision):
        return Precision("fp16_naive", asked)
    if isinstance(asked, BF16MixedPrecision):
        return Precision("bf16", asked)
    if isinstance(asked, str) and asked in _NAMES:
        return Precision(asked)
    reason = _REFUSED.get(asked, "") if isinstance(asked, str) else ""
    raise ConfigError(
        f"mixed_precision is {asked!r}; "
        + (f"{reason}; " if reason else "")
        + f"pass None (fp32), one of {', '.join(map(repr, _NAMES))}, or an object of "
        "gemini.parallel.booster.mixed_precision"
    )
