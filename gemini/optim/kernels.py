"""The Adam kernel on torch tensors: one call updates one flat or dense tensor in place.

Addresses go to C++ directly: autograd's version counters do not move. Whoever updates tensors that
autograd may have saved bumps them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemini import _C
from gemini.errors import ConfigError

_TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

# Elements of a 16-bit parameter whose fp32 cast is held at one time: 4 MiB.
_CAST_NUMEL = 2**20


@dataclass(frozen=True)
class AdamHyper:
    """What one step of Adam needs to know besides the tensors.

    Raises:
        ConfigError: for a value outside its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    adamw_mode: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not value >= 0.0:
                raise ConfigError(f"{name} is {value!r}; it must be 0 or more")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"betas are {self.betas!r}; they must be two numbers in [0, 1)")

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> AdamHyper:
        """Read an optimizer's parameter group; one-element tensors count as numbers."""
        betas = tuple(float(beta) for beta in group["betas"])
        if len(betas) != 2:
            raise ConfigError(f"betas are {betas!r}; they must be two numbers in [0, 1)")
        return cls(
            lr=float(group["lr"]),
            betas=(betas[0], betas[1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            bias_correction=bool(group["bias_correction"]),
            adamw_mode=bool(group["adamw_mode"]),
        )


@dataclass(frozen=True)
class GradScale:
    """What happens to a gradient first: ``clamp(g * pre_scale, -clip_value, clip_value) * post_scale``."""

    pre_scale: float = 1.0
    clip_value: float = math.inf
    post_scale: float = 1.0


@dataclass(frozen=True)
class AdamArrays:
    """Addresses of one flat piece of a tensor: fp32 but for ``grad`` and ``half_out`` (0: none)."""

    param: int
    grad: int
    exp_avg: int
    exp_avg_sq: int
    numel: int
    grad_dtype: torch.dtype
    half_out: int = 0
    half_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class AdamStep:
    """One step of one tensor: its hyper-parameters, its number (from 1), the gradient's scaling."""

    hyper: AdamHyper
    number: int
    scale: GradScale = GradScale()


def adam_step(arrays: AdamArrays, step: AdamStep) -> None:
    """Update ``arrays`` in place with at most ``torch.get_num_threads()`` threads, without the GIL.

    The caller owns the memory and keeps it alive.

    Raises:
        StateError: for a null or misaligned address or a step below 1; nothing has changed.
    """
    hyper, scale = step.hyper, step.scale
    _C.adam_step(
        arrays.param,
        arrays.grad,
        arrays.exp_avg,
        arrays.exp_avg_sq,
        arrays.numel,
        grad_dtype=_TYPE_NAMES[arrays.grad_dtype],
        half_out=arrays.half_out,
        half_dtype=_TYPE_NAMES[arrays.half_dtype],
        lr=hyper.lr,
        beta1=hyper.betas[0],
        beta2=hyper.betas[1],
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        step=step.number,
        bias_correction=hyper.bias_correction,
        adamw_mode=hyper.adamw_mode,
        pre_scale=scale.pre_scale,
        clip_value=scale.clip_value,
        post_scale=scale.post_scale,
        threads=torch.get_num_threads(),
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Say whether the elements fill one stretch of memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two dense tensors of equal shape keep their elements in the same order."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    pairs = zip(one.shape, one.stride(), other.stride(), strict=True)
    return all(size == 1 or left == right for size, left, right in pairs)


def ordered_like(value: torch.Tensor, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``value`` in the memory order of ``like``, as ``dtype`` on the CPU; a copy only if needed."""
    if value.shape != like.shape:
        raise ConfigError(f"a tensor of shape {tuple(value.shape)} belongs to one of {tuple(like.shape)}")
    plain = value.dtype == dtype and value.device.type == "cpu" and not value.is_neg()
    if plain and is_dense(value) and same_order(value, like):
        return value
    copy = torch.empty_strided(like.size(), like.stride(), dtype=dtype)
    return copy.copy_(value.detach())


def adam_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    hyper: AdamHyper,
    step: int,
    *,
    half_out: torch.Tensor | None = None,
    pre_scale: float = 1.0,
    clip_value: float = math.inf,
    post_scale: float = 1.0,
) -> None:
    """Update ``param`` and its fp32 moments in place by step number ``step`` (from 1).

    All are dense CPU tensors of one shape and memory order; only the gradient is copied when its order
    differs. ``param`` is fp32, or 16-bit: then the update is computed on its fp32 cast and rounded back.
    ``half_out`` receives a 16-bit copy of the new fp32 parameter; it may be the gradient itself.

    Raises:
        ConfigError: naming the tensor that does not fit; nothing has changed.
    """
    _check("param", param, param, tuple(_TYPE_NAMES))
    if grad.dtype not in _TYPE_NAMES:
        raise ConfigError(f"grad is {grad.dtype}; it must be fp32, bf16 or fp16")
    grad = ordered_like(grad, param, grad.dtype)
    _check("exp_avg", exp_avg, param, (torch.float32,))
    _check("exp_avg_sq", exp_avg_sq, param, (torch.float32,))
    if half_out is not None:
        _check("half_out", half_out, param, (torch.bfloat16, torch.float16))
        if param.dtype != torch.float32:
            raise ConfigError(f"half_out goes with an fp32 param, not one of {param.dtype}")
    update_piece(
        param,
        grad,
        (exp_avg.data_ptr(), exp_avg_sq.data_ptr()),
        AdamStep(hyper, step, GradScale(pre_scale, clip_value, post_scale)),
        half_out=half_out,
    )


def update_piece(
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[int, int],
    step: AdamStep,
    *,
    half_out: torch.Tensor | None = None,
    start: int = 0,
    numel: int | None = None,
) -> None:
    """Update elements ``start .. start + numel`` in memory order; ``moments`` are addresses of that piece.

    The unchecked core of ``adam_update``: tensors are dense, in one order, of the right types.
    """
    count = param.numel() - start if numel is None else numel
    if count == 0:
        return
    if param.dtype != torch.float32:
        _update_16bit(param, grad, moments, step, start, count)
        return
    arrays = AdamArrays(
        param.data_ptr() + 4 * start,
        grad.data_ptr() + grad.element_size() * start,
        *moments,
        count,
        grad.dtype,
        half_out=0 if half_out is None else half_out.data_ptr() + 2 * start,
        half_dtype=torch.bfloat16 if half_out is None else half_out.dtype,
    )
    adam_step(arrays, step)


def _update_16bit(
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[int, int],
    step: AdamStep,
    start: int,
    count: int,
) -> None:
    flat = param.detach().as_strided((param.numel(),), (1,), param.storage_offset())
    for at in range(0, count, _CAST_NUMEL):
        numel = min(_CAST_NUMEL, count - at)
        master = flat.narrow(0, start + at, numel).float()
        arrays = AdamArrays(
            master.data_ptr(),
            grad.data_ptr() + grad.element_size() * (start + at),
            moments[0] + 4 * at,
            moments[1] + 4 * at,
            numel,
            grad.dtype,
            half_out=param.data_ptr() + 2 * (start + at),
            half_dtype=param.dtype,
        )
        adam_step(arrays, step)


def _check(name: str, tensor: torch.Tensor, param: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ConfigError(f"{name} is {tensor.dtype}; it must be {' or '.join(str(d) for d in dtypes)}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not is_dense(tensor):
        raise ConfigError(
            f"{name} ({tensor.layout} on {tensor.device}, strides as given) must be a CPU tensor without gaps"
        )
    if tensor.shape != param.shape or not same_order(tensor, param):
        raise ConfigError(
            f"{name} of shape {tuple(tensor.shape)} and param of shape {tuple(param.shape)} "
            "must agree in shape and memory order"
        )
