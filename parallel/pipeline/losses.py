"""The loss of a micro-batch: what a criterion makes of the model's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from gemini.errors import ConfigError

Criterion = Callable[[Any, Any], torch.Tensor]


def loss_of(criterion: Criterion, output: Any, batch: Any) -> torch.Tensor:
    """Return the loss of ``batch``, for which the model has returned ``output``; fp32 of one in 16 bits.

    Raises:
        ConfigError: it is not one number, or leads to nothing that trains.
    """
    loss = criterion(output, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigError(f"the criterion returned {_described(loss)}; it is to return one number")
    is_led_to = any(each.requires_grad for each in _tensors(output))
    if torch.is_grad_enabled() and is_led_to and not loss.requires_grad:
        raise ConfigError("the criterion returned a loss without a gradient: it has left autograd (detach())")
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def without_weight(output: Any, loss: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients are zero in the place of one that counts nothing: that of no tokens is
    NaN, and so is nothing times it."""
    tensors = (each for each in _tensors(output) if not isinstance(each, FakeTensor))
    leaves = [each for each in tensors if each.dim() and each.is_floating_point()]
    found = [each.float().sum() for each in leaves if each.requires_grad]
    return torch.stack(found).sum() * 0 if found else loss


def _tensors(output: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]


def _described(value: object) -> str:
    return (
        f"a tensor of {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"a {type(value).__name__}"
    )
