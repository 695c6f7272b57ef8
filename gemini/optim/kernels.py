"""The Adam kernels on torch tensors: one call updates the tensors of many rows in place.

Addresses go to C++ directly, from rows that own their tensors (``adam_rows.py``): autograd's version counters
do not move. A caller that updates tensors which autograd may have saved bumps them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini import _C
from gemini.chunk.dense import is_dense, ordered_like, same_order
from gemini.errors import ConfigError
from gemini.optim.adam_rows import AdamRow, AdamTable
from gemini.optim.settings import betas_of, numbers_of, require_betas, require_non_negative
from gemini.system.device import launching

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def has_cuda_kernel() -> bool:
    """Say whether this build can update CUDA tensors."""
    return _C.build_info()["cuda"] is not None


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
        require_non_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        require_betas(self.betas)

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> AdamHyper:
        """Read an optimizer's parameter group; one-element tensors count as numbers."""
        return cls(
            **numbers_of(group, "lr", "eps", "weight_decay"),
            betas=betas_of(group),
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
class AdamStep:
    """One step: its hyper-parameters, its number (from 1), the gradient's scaling.

    ``check_finite`` has the kernel look at every gradient, before any scaling.
    """

    hyper: AdamHyper
    number: int
    scale: GradScale = GradScale()
    check_finite: bool = False

    def options(self) -> _C.AdamOptions:
        """Return the step as the kernel takes it."""
        hyper, scale = self.hyper, self.scale
        return _C.AdamOptions(
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=self.number,
            bias_correction=hyper.bias_correction,
            adamw_mode=hyper.adamw_mode,
            pre_scale=scale.pre_scale,
            clip_value=scale.clip_value,
            post_scale=scale.post_scale,
            check_finite=self.check_finite,
        )


def run_rows(
    rows: Sequence[AdamRow],
    steps: Sequence[AdamStep],
    device: torch.device | str = "cpu",
    processors: Sequence[int] = (),
) -> bool:
    """Update the tensors of ``rows`` in place; each row says which of ``steps`` it takes.

    On the CPU at most ``torch.get_num_threads()`` threads work, without the GIL, on ``processors`` where they
    are given; on a GPU one launch goes to the current stream.

    Returns:
        Whether all gradients were finite, where ``check_finite`` asks; else True.

    Raises:
        StateError: for a null or misaligned address or a step below 1; nothing has changed.
    """
    if not rows:
        return True
    options = [step.options() for step in steps]
    return run_table(AdamTable(rows), options, torch.device(device), processors)


def run_table(
    table: AdamTable,
    options: list[_C.AdamOptions],
    device: torch.device,
    processors: Sequence[int] = (),
) -> bool:
    """Update the tensors of a table's rows in place; see :func:`run_rows`."""
    if device.type == "cpu":
        return table.run_on_cpu(options, threads=torch.get_num_threads(), processors=processors)
    with launching(device) as stream:
        return table.launch(options, stream=stream)


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
    check_finite: bool = False,
) -> bool:
    """Update ``param`` and its fp32 moments in place by step number ``step`` (from 1).

    All are dense CPU tensors of one shape and memory order; only the gradient is copied when its order
    differs. ``param`` is fp32, or 16-bit: then the update is computed on its fp32 cast and rounded back.
    ``half_out`` receives a 16-bit copy of the new fp32 parameter; it may be the gradient itself.

    Returns:
        Whether the gradient was finite; True without ``check_finite``.

    Raises:
        ConfigError: naming the tensor that does not fit; nothing has changed.
    """
    _check("param", param, param, tuple(TYPE_NAMES))
    if grad.dtype not in TYPE_NAMES:
        raise ConfigError(f"grad is {grad.dtype}; it must be fp32, bf16 or fp16")
    grad = ordered_like(grad, param, grad.dtype)
    _check("exp_avg", exp_avg, param, (torch.float32,))
    _check("exp_avg_sq", exp_avg_sq, param, (torch.float32,))
    if half_out is not None:
        _check("half_out", half_out, param, (torch.bfloat16, torch.float16))
        if param.dtype != torch.float32:
            raise ConfigError(f"half_out goes with an fp32 param, not one of {param.dtype}")
    row = AdamRow(param, grad, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, half_out=half_out)
    scale = GradScale(pre_scale, clip_value, post_scale)
    return run_rows([row], [AdamStep(hyper, step, scale, check_finite)])


def sum_of_squares(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of a dense tensor of floats, added in double in one read.

    NaN or infinite exactly when an element is not finite. On the CPU the bits do not depend on threads or
    the instruction set; on a GPU they are those of torch's norm. The square root is the 2-norm; over several
    tensors, add first.

    Raises:
        ConfigError: a tensor of another kind.
    """
    on_gpu = tensor.device.type == "cuda"
    if not (on_gpu or tensor.device.type == "cpu") or tensor.dtype not in TYPE_NAMES or not is_dense(tensor):
        raise ConfigError(
            f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}; sum_of_squares takes dense "
            "fp32, bf16 and fp16 tensors of the CPU or a GPU"
        )
    if on_gpu:
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64).square())
    if tensor._is_zerotensor():  # of torch's, without memory
        return 0.0
    return _C.sum_squares(
        tensor.data_ptr(), tensor.numel(), TYPE_NAMES[tensor.dtype], threads=torch.get_num_threads()
    )


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
