"""Learning rate schedulers for runs of known length: warmup, then linear or cosine decay."""

from __future__ import annotations

import math

import torch
from torch.optim.lr_scheduler import LRScheduler

from gemini.errors import ConfigError


class _OfLength(LRScheduler):
    """Base of schedulers over ``total_steps`` calls of :meth:`step`.

    The first ``warmup_steps`` rise linearly to the optimizer's own rate. After ``total_steps`` the rate stays
    constant.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        for name, value, least in (("total_steps", total_steps, 1), ("warmup_steps", warmup_steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} is {value!r}; give a whole number, {least} or more")
        self.total_steps, self.warmup_steps, self.eta_min = total_steps, warmup_steps, eta_min
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each group after ``last_epoch`` steps; :meth:`step` sets it."""
        if self.last_epoch < self.warmup_steps:
            return [base * (self.last_epoch + 1) / (self.warmup_steps + 1) for base in self.base_lrs]
        done = self.last_epoch - self.warmup_steps
        share = min(1.0, done / max(1, self.total_steps - self.warmup_steps))
        return [self.eta_min + (base - self.eta_min) * self._left(share) for base in self.base_lrs]

    def _left(self, share: float) -> float:
        """Return the remaining factor of the rate after the fraction ``share`` of the steps after warmup."""
        raise NotImplementedError


class LinearWarmupLR(_OfLength):
    """Rise over ``warmup_steps``, then decay linearly to 0 at ``total_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, warmup_steps, 0.0, last_epoch)

    def _left(self, share: float) -> float:
        return 1 - share


class CosineAnnealingWarmupLR(_OfLength):
    """Rise over ``warmup_steps``, then decay along half a cosine to ``eta_min`` at ``total_steps``."""

    def _left(self, share: float) -> float:
        return (1 + math.cos(math.pi * share)) / 2


class CosineAnnealingLR(CosineAnnealingWarmupLR):
    """Decay along half a cosine to ``eta_min`` at ``total_steps`` and stay there. torch's class of this name
    rises again afterwards.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, 0, eta_min, last_epoch)
