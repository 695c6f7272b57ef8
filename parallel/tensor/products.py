"""Products of matrices in tiles over a grid of ranks: SUMMA on a square, and on a cube.

The tile at (row index, column index) is on the rank with these coordinates. On a square no rank holds more
than its tiles and one received tile of each operand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.region import gather_and_use, reduce_scatter


@dataclass(frozen=True)
class Square:
    """q x q ranks, possibly several times.

    Attributes:
        rows: the ranks in this rank's row; None for this rank only, as for the others.
        columns: the ranks in its column.
        layers: the ranks at this position in the other squares, which have the same weights and other rows.
    """

    rows: Axis | None
    columns: Axis | None
    layers: Axis | None = None

    @property
    def size(self) -> int:
        """The side length q."""
        return 1 if self.rows is None else self.rows.size


def product_ab(a: torch.Tensor, b: torch.Tensor, square: Square) -> torch.Tensor:
    """Return this rank's tile of ``A B``: A (m, k), B (k, n), all in tiles."""
    total: torch.Tensor | None = None
    for step in range(square.size):
        left, right = _sent(a, square.rows, step), _sent(b, square.columns, step)
        total = left @ right if total is None else total.addmm_(left, right)
    assert total is not None
    return total


def product_abt(a: torch.Tensor, b: torch.Tensor, square: Square) -> torch.Tensor:
    """Return this rank's tile of ``A B^T``: A (m, n), B (k, n)."""
    return _collected(square.rows, square.size, lambda step: a @ _sent(b, square.columns, step).t())


def product_atb(a: torch.Tensor, b: torch.Tensor, square: Square) -> torch.Tensor:
    """Return this rank's tile of ``A^T B``: A (m, k), B (m, n)."""
    return _collected(square.columns, square.size, lambda step: _sent(a, square.rows, step).t() @ b)


def _sent(tile: torch.Tensor, axis: Axis | None, step: int) -> torch.Tensor:
    """Return the tile of rank ``step`` along ``axis``, contiguous."""
    if axis is None:
        return tile
    if axis.rank == step:
        # Copy: a collective is no operator, so it would not fetch a managed weight.
        found = tile.clone(memory_format=torch.contiguous_format)
    else:
        found = torch.empty(tile.shape, dtype=tile.dtype, device=tile.device)
    axis.broadcast_from(found, step)
    return found


def _collected(axis: Axis | None, size: int, product: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Sum the products of all steps along ``axis``; the product of a step is reduced to the rank of that
    number. Return this rank's sum.
    """
    own: torch.Tensor | None = None
    for step in range(size):
        found = product(step).contiguous()
        if axis is not None:
            axis.reduce_to(found, step)
        if axis is None or axis.rank == step:
            own = found
    assert own is not None
    return own


class _SquareProduct(torch.autograd.Function):
    """``X W``, or ``X W^T`` with ``transposes``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, square: Square, transposes: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.square, ctx.transposes = square, transposes
        return (product_abt if transposes else product_ab)(x, weight, square)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        square: Square = ctx.square
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (product_ab if ctx.transposes else product_abt)(grad, weight, square)
        if ctx.needs_input_grad[1]:
            left, right = (grad, x) if ctx.transposes else (x, grad)
            grad_weight = product_atb(left, right, square)
            if square.layers is not None:
                square.layers.all_reduce(grad_weight)
        return grad_x, grad_weight, None, None


@dataclass(frozen=True)
class Cube:
    """q x q x q ranks: X is gathered along ``inputs``, the weight along ``weights``, and the product is
    reduce-scattered along ``outputs``. None: this rank only.
    """

    inputs: Axis | None
    weights: Axis | None
    outputs: Axis | None


class _CubeProductAgain(torch.autograd.Function):
    """``X W``; keeps its tiles for backward and gathers them again there."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, cube: Cube, transposes: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cube, ctx.transposes = cube, transposes
        return _cube_product(x, weight, cube, transposes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        cube: Cube = ctx.cube
        given = [x.detach(), weight.detach().clone()]
        needed = [
            tensor.requires_grad_()
            for tensor, needs in zip(given, ctx.needs_input_grad[:2], strict=True)
            if needs
        ]
        with torch.enable_grad():  # the reduction of forward is not repeated
            out = _gathered_product(given[0], given[1], cube, ctx.transposes)
        whole = grad if cube.outputs is None else torch.cat(cube.outputs.all_gather(grad))
        grads = iter(torch.autograd.grad(out, needed, whole))
        grad_x, grad_weight = (next(grads) if needs else None for needs in ctx.needs_input_grad[:2])
        return grad_x, grad_weight, None, None


def _gathered_product(x: torch.Tensor, weight: torch.Tensor, cube: Cube, transposes: bool) -> torch.Tensor:
    weight = weight.clone().t() if transposes else weight.clone()
    if cube.inputs is not None:
        x = gather_and_use(x, cube.inputs, 0)
    if cube.weights is not None:
        weight = gather_and_use(weight, cube.weights, 1)
    return x @ weight


def _cube_product(x: torch.Tensor, weight: torch.Tensor, cube: Cube, transposes: bool) -> torch.Tensor:
    out = _gathered_product(x, weight, cube, transposes)
    return out if cube.outputs is None else reduce_scatter(out, cube.outputs, 0)


def multiply_on_square(
    x: torch.Tensor, weight: torch.Tensor, square: Square, *, transposes: bool = False
) -> torch.Tensor:
    """Return ``x`` (rows, k) times ``weight`` (k, n), or (n, k) with ``transposes``, in tiles.

    Sends 3 (q - 1) / q^2 (|X| + |W|) bytes in forward and backward together, and the gradient of the weight
    once along ``square.layers``.
    """
    found: torch.Tensor = _SquareProduct.apply(x, weight, square, transposes)  # type: ignore[no-untyped-call]
    return found


def multiply_on_cube(
    x: torch.Tensor,
    weight: torch.Tensor,
    cube: Cube,
    *,
    transposes: bool = False,
    gathers_again: bool = False,
) -> torch.Tensor:
    """Return ``x`` (rows, ..., k) times ``weight`` (k, n), or (n, k) with ``transposes``, in tiles.

    Sends 2 (q - 1) / q^3 (|X| + |W| + |Y|) bytes in forward and backward together. For backward it keeps
    gathered X and W, 1 / q^2 of each; with ``gathers_again`` only their tiles, and sends (q - 1) / q^3 of X
    and W once more.
    """
    if not gathers_again:
        return _cube_product(x, weight, cube, transposes)
    found: torch.Tensor = _CubeProductAgain.apply(x, weight, cube, transposes)  # type: ignore[no-untyped-call]
    return found
