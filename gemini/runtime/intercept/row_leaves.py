"""Makes rows of a trained parameter leaves of the graph: their gradient is added directly to its place, and
the gradient of all rows, nearly all zeros, is never created.

An autograd node passes the rows on to the operators that use them. In backward it takes their gradient, and
passes nothing to earlier nodes. It passes the gradient on if the whole gradient must be visible (hooks,
``torch.autograd.grad``, ``create_graph``), or if several operators use the same rows, because autograd then
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
    """Return the collector for gradients of single rows of a managed tensor; None if rows are not collected
    separately."""
    ref = getattr(weight, "_ref", None)
    if type(ref) is not CutRef or ref.row_gradient is None or ref.manager.resident:
        return None
    with PlainTensors():
        trains = weight.requires_grad and torch.is_grad_enabled() and forward_ad._current_level < 0
    return ref.row_gradient if trains else None


def leaves_of(weight: torch.Tensor, func: Any, views: Any) -> Any:
    """Return ``views``, a tensor or a sequence that ``func`` made of ``weight``, with views of rows turned
    into leaves. A view of a leaf stays as it is, and so does a view of all rows unless it is a slice. Call it
    with torch functions disabled."""
    gradient = row_gradient_of(weight)
    if gradient is None:
        return views
    least = 0 if func is torch.Tensor.__getitem__ else 1  # elements that the view must leave out
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
    """Return the AccumulateGrad node of the parameter that ``weight`` is, or is one view of; None if there
    are more nodes in between: ours, or with unknown hooks."""
    node: Any = get_gradient_edge(weight).node
    if type(node).__name__ != "AccumulateGrad" and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node if type(node).__name__ == "AccumulateGrad" else None


def count_whole_uses(
    operands: Sequence[Any], by_rows: CutRef | None, results: Iterable[torch.Tensor]
) -> None:
    """Count a use of all rows of the ``operands`` that train, except the one ``by_rows``, as long as the
    nodes of its ``results`` live. Call it with torch functions disabled."""
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
    """The destination of some rows' gradient. ``collector``: the node of the parameter; ``weight``: the
    tensor that the rows view; ``first``: their first element in the parameter."""

    gradient: RowGradient
    collector: Any
    weight: torch.Tensor
    first: int
    use: Any

    def take(self, grad: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """Take the gradient of rows of this shape. Returns False if autograd must pass it on instead."""
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
        """Whether hooks of the user see the gradient of the parameter, or of ``weight``."""
        param = self.collector.variable
        with PlainTensors():
            hooks = param._backward_hooks, self.weight._backward_hooks, self.weight.retains_grad
            return any(hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


class _Leaf(torch.autograd.Function):
    """Identity over the same memory and version; takes the rows' gradient in backward."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor, taker: _Taker) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.taker, ctx.place = taker, (view.shape, view.stride())
        return view.view_as(view)  # a view, so that torch refuses to write to rows that train

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        taken = grad is None or ctx.taker.take(grad, *ctx.place)
        return None if taken else grad, None
