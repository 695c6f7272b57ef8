"""Lion: an optimizer that steps by the sign of a moving average, with one state per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemini.optim.kernels import betas_of, floats_of, require_betas, require_non_negative
from gemini.optim.self_managed import SelfManaged


@dataclass(frozen=True)
class LionHyper:
    """The settings of one step of Lion. Raises ConfigError if one is out of range."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float

    def __post_init__(self) -> None:
        require_non_negative(lr=self.lr, weight_decay=self.weight_decay)
        require_betas(self.betas)

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> LionHyper:
        """Read the settings from a parameter group; one-element tensors count as numbers."""
        return cls(**floats_of(group, "lr", "weight_decay"), betas=betas_of(group))


class Lion(SelfManaged):
    """Lion (Chen et al., 2023): ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``, then
    ``m = beta2 * m + (1 - beta2) * g``.

    Also works for unmanaged parameters; under management ``GeminiOptimizer(Lion(...), model)`` gives the same
    bits. ``state`` has ``exp_avg``, in the parameter's dtype.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        for group in self.param_groups:
            LionHyper.from_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Raises ConfigError for a sparse one."""
        if self.driver() is not None:
            return self.step_managed(closure)
        return self.step_plain(closure, LionHyper.from_group, self._update)

    def _update(self, param: torch.Tensor, state: dict[str, Any], hyper: LionHyper) -> None:
        assert param.grad is not None
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        lion_update(param, param.grad, state["exp_avg"], hyper)


def lion_update(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, hyper: LionHyper) -> None:
    """Update ``param`` and ``exp_avg`` in place, element by element. Extra memory: two tensors of the
    gradient's size.
    """
    first, second = hyper.betas
    direction = exp_avg.mul(first).add_(grad, alpha=1 - first).sign_()
    if hyper.weight_decay:
        param.mul_(1 - hyper.lr * hyper.weight_decay)
    param.add_(direction, alpha=-hyper.lr)
    exp_avg.mul_(second).add_(grad, alpha=1 - second)
