"""Rows of a parameter that trains as leaves of the graph: their gradient goes straight to its place, and the
gradient of all rows, nearly all zeros, is never made.

A node hands the rows to the operators that use them. In a backward pass it takes their gradient, and gives
nothing to the nodes before it. It passes the gradient on where somebody is to see the whole (hooks,
``torch.autograd.grad``, ``create_graph``), and where several operators use the same rows, since autograd then
adds up their gradients first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from gemini.runtime.gate.gate import CutRef
from gemini.runtime.gate.gradients import RowGradient
from gemini.runtime.gate.guards import span_bytes


def row_gradient_of(weight: torch.Tensor) -> RowGradient | None:
    """Return what takes gradients of rows of a managed tensor; None: they are not taken by themselves."""
    ref = getattr(weight, "_ref", None)
    if type(ref) is not CutRef or ref.row_gradient is None or ref.manager.resident:
        return None
    with PlainTensors():
        trains = weight.requires_grad and torch.is_grad_enabled() and forward_ad._current_level < 0
    return ref.row_gradient if trains else None


def leaves_of(weight: torch.Tensor, func: Any, views: Any) -> Any:
    """Return ``views`` that ``func`` made of ``weight``, a tensor or a sequence: of rows, as leaves. A view
    of a leaf stays as it is, and one of all rows that is no slice. Call it with plain tensors."""
    gradient = row_gradient_of(weight)
    if gradient is None:
        return views
    least = 0 if func is torch.Tensor.__getitem__ else 1  # rows that are not in the view
    if isinstance(views, torch.Tensor):
        return _leaf(weight, views, gradient, weight.numel() - least)
    return type(views)([_leaf(weight, view, gradient, weight.numel() - least) for view in views])


def _leaf(weight: torch.Tensor, view: torch.Tensor, gradient: RowGradient, most: int) -> torch.Tensor:
    overlaps = any(not step and size > 1 for size, step in zip(view.shape, view.stride(), strict=True))
    if overlaps or not 0 < view.numel() <= most:
        return view
    collector = _collector(weight)
    if collector is None:
        return view
    first = (view.data_ptr() - collector.variable.data_ptr()) // view.itemsize
    use = gradient.row_use(first, span_bytes(view) // view.itemsize)
    return _Leaf.apply(view, _Taker(gradient, collector, weight, first, use))  # type: ignore[no-any-return, no-untyped-call]


def _collector(weight: torch.Tensor) -> Any:
    """Return the node that collects the gradient of the parameter that ``weight`` is, or is one view of; None
    if there are more nodes between them: of ours, or with hooks that nobody knows of."""
    node: Any = get_gradient_edge(weight).node
    if type(node).__name__ != "AccumulateGrad" and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node if type(node).__name__ == "AccumulateGrad" else None


def count_whole_uses(
    operands: Sequence[Any], by_rows: CutRef | None, results: Iterable[torch.Tensor]
) -> None:
    """Note that an operator used all rows of ``operands`` that train, except for the one ``by_rows``, as long
    as the nodes of its ``results`` live. Call it with plain tensors."""
    for operand in operands:
        gradient = row_gradient_of(operand) if operand._ref is not by_rows else None
        collector = _collector(operand) if gradient is not None else None
        if gradient is None or collector is None:
            continue
        first = (operand.data_ptr() - collector.variable.data_ptr()) // operand.itemsize
        use = gradient.row_use(first, span_bytes(operand) // operand.itemsize)
        for result in results:
            if result.grad_fn is not None:
                metadata: Any = result.grad_fn.metadata
                metadata.setdefault("gemini: rows used", []).append(use)


@dataclass(frozen=True)
class _Taker:
    """Where the gradient of some rows goes. ``collector``: the node of the parameter; ``weight``: what the
    rows are a view of; ``first``: their first element in the parameter."""

    gradient: RowGradient
    collector: Any
    weight: torch.Tensor
    first: int
    use: Any

    def take(self, grad: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """Take the gradient of rows of this shape, or say that autograd is to hand it on."""
        if not self.gradient.takes_rows(self.use, grad) or self._is_seen():
            return False
        try:
            is_collected = torch._C._will_engine_execute_node(self.collector)
        except RuntimeError:  # torch.autograd.grad of the parameter
            return False
        if is_collected:
            self.gradient.collect_rows(self.first, shape, stride, grad)
        return bool(is_collected)

    def _is_seen(self) -> bool:
        """Whether hooks of the user are to see the gradient of the parameter, or of ``weight``."""
        param = self.collector.variable
        with PlainTensors():
            hooks = param._backward_hooks, self.weight._backward_hooks, self.weight.retains_grad
            return any(hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


class _Leaf(torch.autograd.Function):
    """The same memory and version."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor, taker: _Taker) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.taker, ctx.place = taker, (view.shape, view.stride())
        return view.view_as(view)  # a view, so that torch refuses to write to rows that train

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        taken = grad is None or ctx.taker.take(grad, *ctx.place)
        return None if taken else grad, None
