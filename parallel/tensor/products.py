"""Products of matrices that lie in tiles over a grid of ranks: SUMMA on a square, and the cube.

A tile of a matrix lies at (index of its rows, index of its columns). On a square no rank holds more than its
tiles and one of each operand that it is sent.
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
    """q x q ranks, maybe several times: ``rows`` are those in this rank's row, ``columns`` those in its
    column, and ``layers`` those at this place of the other squares, which have the same weights and other
    rows. None: this rank alone."""

    rows: Axis | None
    columns: Axis | None
    layers: Axis | None = None

    @property
    def size(self) -> int:
        """q."""
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
    """Return the tile of the ``step``-th rank along ``axis``, contiguous."""
    if axis is None:
        return tile
    if axis.rank == step:
        # In other memory: a collective is no operator, so it would not fetch a managed weight.
        found = tile.clone(memory_format=torch.contiguous_format)
    else:
        found = torch.empty(tile.shape, dtype=tile.dtype, device=tile.device)
    axis.broadcast_from(found, step)
    return found


def _collected(axis: Axis | None, size: int, product: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return the sum along ``axis`` of the product that is this rank's; that of each step is of another."""
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
    """``X W``, or ``X W^T`` where ``transposes``."""

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
    """q x q x q ranks: X is put together along ``inputs``, the weight along ``weights``, and the product is
    added up along ``outputs``. None: this rank alone."""

    inputs: Axis | None
    weights: Axis | None
    outputs: Axis | None


class _CubeProductAgain(torch.autograd.Function):
    """``X W``, which keeps its tiles for backward and puts them together again there."""

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
        with torch.enable_grad():  # what was added up in forward is not added up again
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
    """Return ``x`` (rows, k) times ``weight`` (k, n), or (n, k) where it ``transposes``, in tiles.

    Sends 3 (q - 1) / q^2 (|X| + |W|) bytes forward and backward together, and the gradient of the weight once
    among layers.
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
    """Return ``x`` (rows, ..., k) times ``weight`` (k, n), or (n, k) where it ``transposes``, in tiles.

    Sends 2 (q - 1) / q^3 (|X| + |W| + |Y|) bytes forward and backward together. Backward keeps X and W put
    together, 1 / q^2 of each; ``gathers_again``: their tiles, which costs X and W (q - 1) / q^3 once more.
    """
    if not gathers_again:
        return _cube_product(x, weight, cube, transposes)
    found: torch.Tensor = _CubeProductAgain.apply(x, weight, cube, transposes)  # type: ignore[no-untyped-call]
    return found
