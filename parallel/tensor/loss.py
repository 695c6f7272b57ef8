"""Cross-entropy of logits if each rank has a part of the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.families import Loss, family_of
from gemini.parallel.mesh import Axis


class _CrossEntropy(torch.autograd.Function):
    """The fp32 losses of rows of logits (rows, part of the vocabulary). Ranks exchange a maximum and two sums
    per row; no rank gets a row of the whole vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, axis: Axis, whole: int) -> torch.Tensor:
        first = axis.rank * logits.size(1)
        values = logits.float().clone()
        if first + logits.size(1) > whole:  # padded
            values[:, max(0, whole - first) :] = -torch.inf
        largest = values.amax(1)
        axis.all_reduce(largest, largest=True)
        values.sub_(largest.unsqueeze(1))
        local = labels - first
        is_here = (local >= 0) & (local < logits.size(1))
        local = local.masked_fill(~is_here, 0)
        own = values.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0.0)
        values.exp_()
        sums = torch.stack([values.sum(1), own])
        axis.all_reduce(sums)
        ctx.save_for_backward(values.div_(sums[0].unsqueeze(1)), local, is_here)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, is_here = ctx.saved_tensors
        found = softmax.clone()
        found.scatter_add_(1, local.unsqueeze(1), -is_here.to(found.dtype).unsqueeze(1))
        return found.mul_(grad.unsqueeze(1)).to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: Axis,
    vocabulary: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Return the cross-entropy of ``logits`` (..., this rank's part) and ``labels`` (...), in fp32 and equal
    on all ranks. Collective.

    Args:
        vocabulary: the number of classes, without padding.
        reduction: mean, sum or none.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction is {reduction!r}; choose mean, sum or none")
    flat, wanted = logits.flatten(0, -2), labels.flatten()
    counted = wanted != ignore_index
    if wanted.device.type == "cpu" and bool(((wanted < 0) | (wanted >= vocabulary))[counted].any()):
        raise IndexError(
            f"a label is out of bounds: it is not one of the {vocabulary} classes, nor ignore_index "
            f"({ignore_index})"
        )
    losses: torch.Tensor = _CrossEntropy.apply(flat, wanted.masked_fill(~counted, 0), axis, vocabulary)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(~counted, 0.0)
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def install_parts_loss(model: nn.Module, axis: Axis) -> None:
    """Make a causal language model of transformers compute its loss from the ranks' parts of the logits."""
    model.loss_function = partial(_causal_loss, axis)  # type: ignore[assignment]


def refuse_unknown_loss(model: nn.Module) -> None:
    """Raise ConfigError unless ``model`` is a causal language model of transformers, which computes its loss
    by a replaceable function.
    """
    if family_of(model).loss is not Loss.CAUSAL:
        raise ConfigError(
            f"gather_logits=False: {type(model).__name__} is not a causal language model of transformers; "
            "give its head the style Head(gathers=False) in a plan, and compute its loss with "
            "vocabulary_cross_entropy"
        )


def _causal_loss(
    axis: Axis,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """Return the loss of a causal language model, from the arguments of transformers' loss function."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = vocabulary_cross_entropy(
        logits, shift_labels, axis, vocab_size, ignore_index=ignore_index, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
