"""Operators of a cut model that get several types: what 16-bit parameters and fp32 buffers make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode

from gemini.runtime.intercept.nested import map_tensors
from gemini.runtime.intercept.precision import run_in_one_type


class InOneType(TorchFunctionMode):
    """Run an operator with parameters that torch refuses for its types once more, in theirs, as a managed
    model does (docs/notes/precision.md)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as refusal:
            params = _params(args, kwargs)
            if not params:
                raise
            return run_in_one_type(func, args, kwargs, params, refusal)


def run_backward(
    tensor: torch.Tensor, grad: torch.Tensor | None, inputs: Sequence[torch.Tensor], retain_graph: bool
) -> None:
    """Run ``torch.autograd.backward``; activations that are computed again get one type, too.

    That one is a torch function itself, so that no mode is left within it.
    """
    grads = torch.autograd._make_grads((tensor,), (grad,), is_grads_batched=False)
    with InOneType():
        graph._engine_run_backward(
            (tensor,), grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=True
        )


def _params(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            found.append(tensor)
        return tensor

    map_tensors((args, kwargs), look)
    return found


def mixes_types(module: nn.Module) -> bool:
    """Say whether floating-point parameters and buffers of ``module`` have several types."""
    tensors = (*module.parameters(), *module.buffers())
    return len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) > 1
