"""The learning rate of a run: linear warmup, then a cosine down to a tenth."""

from __future__ import annotations

import math
from functools import partial

import torch

_FLOOR = 0.1
_MAX_WARMUP_STEPS = 100


def lr_factor(step: int, *, steps: int) -> float:
    """Return what the base learning rate is multiplied with at 0-based ``step`` of ``steps``."""
    warmup = max(1, min(_MAX_WARMUP_STEPS, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def shaped_factor(step: int, *, steps: int, warmup: int, shape: str) -> float:
    """Return the factor at 0-based ``step``: it rises over ``warmup`` steps, then falls to 0 as a
    ``"cosine"`` or a line (``"linear"``), or stays (``"constant"``)."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    if shape == "constant":
        return 1.0
    return 1 - progress if shape == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def lr_schedule(optimizer: torch.optim.Optimizer, *, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a plain torch scheduler over ``optimizer``; step it once after every optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(lr_factor, steps=steps))
