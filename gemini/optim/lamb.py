"""Lamb: Adam with a step length that is scaled by each parameter's norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemini.optim.kernels import betas_of, floats_of, require_betas, require_non_negative
from gemini.optim.self_managed import SelfManaged


@dataclass(frozen=True)
class LambHyper:
    """The settings of one step of Lamb. Raises ConfigError if one is out of range."""

    lr: float
    eps: float
    weight_decay: float
    betas: tuple[float, float]
    bias_correction: bool

    def __post_init__(self) -> None:
        require_non_negative(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        require_betas(self.betas)

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> LambHyper:
        """Read the settings from a parameter group; one-element tensors count as numbers."""
        numbers = floats_of(group, "lr", "eps", "weight_decay")
        return cls(**numbers, betas=betas_of(group), bias_correction=bool(group["bias_correction"]))


class Lamb(SelfManaged):
    """Lamb (You et al., 2020): with ``u = m / (sqrt(v) + eps) + weight_decay * p`` of Adam's moments,
    ``p -= lr * norm(p) / norm(u) * u``; if either norm is 0, ``p -= lr * u``.

    Also works for unmanaged parameters. Under management ``GeminiOptimizer(Lamb(...), model)`` gives the same
    bits; it needs whole parameters, which ranks gather for it. ``state`` has ``step``, an int, and
    ``exp_avg`` and ``exp_avg_sq``, in the parameter's dtype.

    Args:
        bias_correction: correct the bias of the moments in the first steps, as Adam does.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        for group in self.param_groups:
            LambHyper.from_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Raises ConfigError for a sparse one."""
        if self.driver() is not None:
            return self.step_managed(closure)
        return self.step_plain(closure, LambHyper.from_group, self._update)

    def _update(self, param: torch.Tensor, state: dict[str, Any], hyper: LambHyper) -> None:
        assert param.grad is not None
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        lamb_update(param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], hyper)


def lamb_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    hyper: LambHyper,
) -> None:
    """Update ``param`` and its moments in place; ``step`` counts from 1. Extra memory: three tensors of the
    gradient's size.
    """
    first, second = hyper.betas
    exp_avg.lerp_(grad, 1 - first)
    exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
    size, root = 1.0, 1.0
    if hyper.bias_correction:
        size, root = 1 - first**step, (1 - second**step) ** 0.5
    update = exp_avg.div(size).div_(exp_avg_sq.sqrt().div_(root).add_(hyper.eps))
    if hyper.weight_decay:
        update.add_(param, alpha=hyper.weight_decay)
    lengths = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
    ratio = torch.where((lengths[0] > 0) & (lengths[1] > 0), lengths[0] / lengths[1], 1.0)
    param.sub_(update.mul_(ratio), alpha=hyper.lr)
