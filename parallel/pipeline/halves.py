"""The halves of a backward pass: gradients of a stage's input first, those of its weights later."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from gemini.errors import ConfigError

Unfinished = list[dict[str, Any]]  # where the weights' half begins, and with which gradients


def backward_input(
    output: torch.Tensor, grad: torch.Tensor, received: torch.Tensor, weights: Iterable[nn.Parameter]
) -> tuple[torch.Tensor, Unfinished]:
    """Return the gradient of ``received``, and what :func:`backward_weights` needs.

    Raises:
        ConfigError: ``output`` does not depend on ``received``.
    """
    # Not at the top: it takes a second to import, and gemini.parallel is used without pipelines.
    from torch.distributed.pipelining._backward import stage_backward_input

    try:
        (found,), rest = stage_backward_input([output], [grad], [received], iter(list(weights)))
    except RuntimeError as error:
        raise error.__cause__ or error from None  # torch wraps it in a description of the tensors
    received.grad = None
    if found is None:
        raise ConfigError(
            "the output of a stage does not depend on what it received, so backward cannot go on to the "
            "stage before it; choose a schedule that does not split backward (1f1b, interleaved)"
        )
    return found, rest


def backward_weights(unfinished: Unfinished) -> None:
    """Run the other half. It goes through autograd's accumulators, so that hooks of gradients are called."""
    for group in unfinished:
        edges, grads = [], []
        for node, incoming in zip(group["intermediates"], group.get("grads") or (), strict=False):
            for index, grad in enumerate(incoming or ()):
                if grad is not None:
                    edges.append(GradientEdge(node, index))
                    grads.append(grad)
        if not edges:
            continue
        with ExitStack() as hooks:
            if len(group["intermediates"]) > 1:
                # One of them may lie behind another: what flows into it is in its own gradient already.
                for node, incoming in zip(group["intermediates"], group["grads"], strict=True):
                    hooks.callback(node.register_prehook(lambda _, own=incoming: own).remove)
            weights = tuple(GradientEdge(node, 0) for node in group["params"])
            torch.autograd.backward(edges, grads, inputs=weights)
        group.clear()
