"""The mean loss over the tokens of all ranks, if each rank has some of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis

IGNORED = -100  # the label to ignore, as in torch


class _Mean(torch.autograd.Function):
    """The gradient is that of the mean, times the number of ranks: data parallelism divides by it."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, count: torch.Tensor, axis: Axis | None) -> torch.Tensor:
        sums = torch.stack([total.double(), count.double()])
        if axis is not None:
            axis.all_reduce(sums)
        size = 1 if axis is None else axis.size
        ctx.share = torch.where(sums[1] > 0, size / sums[1], 0.0)
        return (sums[0] / sums[1]).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grad * ctx.share).to(grad.dtype), None, None


def mean_of(total: torch.Tensor, count: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """Return the sum of all ranks' ``total`` over the sum of their ``count``, the same on all; NaN, with a
    gradient of zero, if nothing counts. The gradient is correct if gradients are averaged over the ranks of
    ``axis``. Collective.
    """
    found: torch.Tensor = _Mean.apply(total, count, axis)  # type: ignore[no-untyped-call]
    return found


def mean_loss(loss: torch.Tensor, labels: torch.Tensor, axis: Axis | None, ignore_index: int) -> torch.Tensor:
    """Return the mean loss over all ranks. ``loss`` is the mean over this rank's ``labels`` that count; it
    may be NaN if none does. Collective.
    """
    count = (labels != ignore_index).sum()
    total = torch.where(count > 0, loss, 0.0) * count
    return mean_of(total, count, axis)


def install_mean_loss(model: Any, axis: Axis | None) -> None:
    """Make a causal language model of transformers return the mean loss over all ranks."""
    model.loss_function = partial(_causal_loss, model.loss_function, axis)


def _causal_loss(
    own: Callable[..., torch.Tensor],
    axis: Axis | None,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """Return the loss of a causal language model, from the arguments of transformers' loss function;
    ``num_items_in_batch`` counts the items of all ranks.
    """
    if shift_labels is None:
        raise ConfigError(
            "the labels belong to a part of a sequence, and the model would shift them within the part; cut "
            "batches with SequenceParallel.cut, which shifts labels first and passes them on as shift_labels"
        )
    total = own(
        logits=logits,
        labels=labels,
        vocab_size=vocab_size,
        num_items_in_batch=1,
        ignore_index=ignore_index,
        shift_labels=shift_labels,
        **others,
    )
    count = (shift_labels != ignore_index).sum()
    if num_items_in_batch is None:
        return mean_of(total, count, axis)
    items = torch.as_tensor(num_items_in_batch, device=total.device)
    return mean_of(total, items / (1 if axis is None else axis.size), axis)
