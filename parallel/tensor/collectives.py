"""Collectives along the axis of tensor parallelism, as operators that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gemini.parallel.mesh import Axis

# Autograd gives a gradient to several operators at once: what sums in place sums a copy.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_of(grad, ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        if not x.is_contiguous():
            return sum_of(x, axis)
        ctx.mark_dirty(x)
        axis.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.size(dim)
        return torch.cat(axis.all_gather(x), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(ctx.dim, ctx.axis.rank * ctx.length, ctx.length).contiguous(), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(ctx.axis.all_gather(grad), ctx.dim), None, None


class _GatherAndUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return torch.cat(axis.all_gather(x), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.axis.reduce_scatter(list(grad.chunk(ctx.axis.size, ctx.dim))), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(list(x.chunk(axis.size, dim)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.cat(ctx.axis.all_gather(grad), ctx.dim), None, None


def sum_of(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks, in memory of its own; no operator of autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total)
    return total


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return ``x``, which is the same on all ranks and which each uses for its part: gradients are summed."""
    found: torch.Tensor = _Copy.apply(x, axis)  # type: ignore[no-untyped-call]
    return found


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of ``x`` over the ranks, which all go on with; ``x`` is used up."""
    found: torch.Tensor = _Reduce.apply(x, axis)  # type: ignore[no-untyped-call]
    return found


def gather(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Return the parts of all ranks side by side, which all go on with: each part gets its gradient."""
    found: torch.Tensor = _Gather.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def split(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Return this rank's part of ``x``, which is the same on all ranks: its gradient is put together."""
    found: torch.Tensor = _Split.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def gather_and_use(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return the parts of all ranks side by side, which each uses for its part: gradients are summed, and
    each part gets its own."""
    found: torch.Tensor = _GatherAndUse.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's part, along ``dim``, of the sum of ``x`` over the ranks."""
    found: torch.Tensor = _ReduceScatter.apply(x, axis, dim)  # type: ignore[no-untyped-call]
    return found
