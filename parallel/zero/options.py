"""Checks of the arguments of LowLevelZeroOptimizer."""

from __future__ import annotations

from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.optim.kernel_adam import KernelAdam
from gemini.optim.kernels import StateFormat
from gemini.optim.rule_choice import refuse_unlike

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Their update of an element depends on other elements, or on the shape of the whole parameter.
_OF_WHOLE = ("Adafactor", "Lamb", "Muon")
_OF_NONE = {
    "LBFGS": "evaluates the loss several times in a step, but a step here has the gradients of one only",
    "SparseAdam": "needs sparse gradients, but gradients in buckets are dense",
}
_UNCUT = "Use stage=0, which cuts nothing, or GeminiOptimizer over a GeminiDDP"
_UNPARTED = "Other ranks have parts of the model; use an optimizer that updates each element by itself"
_NO_SETTINGS = ("params", "param_names")  # entries of a group that are no settings


def choose_stage(stage: int | None, partition_grad: bool | None) -> int:
    """Return the stage that the two options give; 1 if neither is given."""
    if stage not in (None, 0, 1, 2):
        raise ConfigError(
            f"stage is {stage!r}; LowLevelZeroOptimizer takes stage 1 or 2, or 0 to cut nothing; use "
            "GeminiDDP for stage 3"
        )
    named = None if partition_grad is None else 2 if partition_grad else 1
    if stage is not None and named is not None and stage != named:
        raise ConfigError(
            f"stage={stage} and partition_grad={partition_grad} contradict each other; give one of them"
        )
    return next(chosen for chosen in (stage, named, 1) if chosen is not None)


def check_options(
    clip_grad_norm: float, norm_type: float, reduce_bucket_size: int, communication_dtype: torch.dtype | None
) -> None:
    """Raise ConfigError for a value out of range."""
    if clip_grad_norm != 0:
        check_norm(clip_grad_norm, norm_type)
    if reduce_bucket_size < 1:
        raise ConfigError(f"reduce_bucket_size is {reduce_bucket_size}; give a number of elements above 0")
    if communication_dtype is not None and not communication_dtype.is_floating_point:
        raise ConfigError(f"communication_dtype is {communication_dtype}; give a floating-point dtype")


def check_wire(
    communication_dtype: torch.dtype | None, precision: torch.dtype | None, optimizer: torch.optim.Optimizer
) -> None:
    """Raise ConfigError if gradients would be sent in fp16 without a loss scale to keep them in range."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    computed = {param.dtype for param in params} if precision is None else {precision}
    if communication_dtype == torch.float16 and computed - {torch.float16}:
        raise ConfigError(
            "communication_dtype=torch.float16 needs the loss scale of fp16 parameters (precision='fp16'), "
            "because without it small gradients become zero; choose torch.bfloat16"
        )


def check_norm(max_norm: float, norm_type: float) -> None:
    """Raise ConfigError for a norm or limit that is not positive."""
    if not max_norm > 0 or not norm_type > 0:
        raise ConfigError(f"max_norm is {max_norm} and norm_type {norm_type}; both must be above 0")


def whole_unless(*, cuts: bool, parted: bool) -> str:
    """Return the advice for an optimizer that needs whole parameters; "" if they are whole. ``cuts``: whether
    parameters are sharded here; ``parted``: whether they are parts of a cut model already.
    """
    return _UNPARTED if parted else _UNCUT if cuts else ""


def check_optimizer(optimizer: torch.optim.Optimizer, cut_unless: str) -> None:
    """Raise ConfigError for an optimizer that cannot update its parameters. ``cut_unless`` is the result of
    :func:`whole_unless`. An unknown class is tested by a trial step.
    """
    name = type(optimizer).__name__
    if name in _OF_NONE:
        raise ConfigError(
            f"{name} {_OF_NONE[name]}; use Adam, AdamW, SGD, CPUAdam or another element-wise optimizer"
        )
    if name in _OF_WHOLE and cut_unless:
        raise ConfigError(
            f"{name} does not update each element on its own, so parts of a parameter cannot be updated on "
            f"different ranks. {cut_unless}"
        )
    if isinstance(optimizer, KernelAdam) and optimizer.state_format != StateFormat():
        raise ConfigError(
            "compact states are scaled by blocks of a whole parameter, but each rank has only parts; pass "
            "state_dtype='fp32' and no master_remainders to the optimizer"
        )
    refuse_unlike(optimizer, cut_unless)


def parse_precision(precision: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that ``precision`` names; None stays None."""
    dtype = _PRECISIONS.get(precision) if isinstance(precision, str) else precision
    if precision is not None and dtype not in _PRECISIONS.values():
        raise ConfigError(f"precision is {precision!r}; choose from {', '.join(_PRECISIONS)}")
    return dtype


def described(groups: list[dict[str, Any]]) -> str:
    """Return the settings of all groups as text, which is equal on ranks with equal settings."""
    each = []
    for number, group in enumerate(groups):
        settings = {name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS}
        each.append(f"group {number}: " + ", ".join(f"{name}={value}" for name, value in settings.items()))
    return "; ".join(each)


def _plain(value: Any) -> str:
    """Return a value as text; one of an unknown kind by its type: its repr could contain an address."""
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_plain, value))})"
    return str(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
