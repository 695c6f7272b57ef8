"""LayerNorm and Dropout over a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.grid import Tile
from gemini.parallel.tensor.nn.grid_layer import GridLayer, divided


class _Normalized(torch.autograd.Function):
    """Normalize rows to mean 0 and standard deviation 1, in at least fp32, if each rank has a part of every
    row. Forward all-reduces one number per row twice; backward two numbers per row once.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, features: int, eps: float) -> torch.Tensor:
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = values.sum(-1, keepdim=True)
        axis.all_reduce(mean)
        found = values - mean.div_(features)
        variance = found.square().sum(-1, keepdim=True)
        axis.all_reduce(variance)
        scale = variance.div_(features).add_(eps).rsqrt_()
        found.mul_(scale)
        ctx.save_for_backward(found, scale)
        ctx.axis, ctx.features, ctx.dtype = axis, features, x.dtype
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        found, scale = ctx.saved_tensors
        sums = torch.stack([grad.sum(-1), (grad * found).sum(-1)])
        ctx.axis.all_reduce(sums)
        of_grad, of_product = sums.div_(ctx.features).unsqueeze(-1)
        return ((grad - of_grad - found * of_product) * scale).to(ctx.dtype), None, None, None


class LayerNorm(GridLayer):
    """nn.LayerNorm over the last dimension, which may be cut over ranks. ``inside``: whether its input is
    between the two Linear layers of a pair; None: by the layers built so far.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        inside: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ConfigError if the ranks do not divide the features, or there are several dimensions."""
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise ConfigError(f"LayerNorm over {shape}: over ranks it can normalize only the last dimension")
        self.normalized_shape, self.eps = shape, eps
        self.spread = self.grid.spread(inside=self.building.place(inside))
        divided(self.grid, "normalized_shape", shape[0], self.spread.columns)
        tile = Tile(self.grid.places, shape, (self.spread.columns,)) if elementwise_affine else None
        self.add_parameter("weight", tile, device, dtype)
        self.add_parameter("bias", tile if bias else None, device, dtype)
        self.reset_parameters()

    def draw(self, device: torch.device) -> Mapping[str, torch.Tensor | None]:
        whole = torch.ones(self.normalized_shape, device=device, dtype=self.weight.dtype)
        return {"weight": whole, "bias": torch.zeros_like(whole)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output for its part of the input (batch, ..., features)."""
        weight, bias = self.summed("weight", self.spread), self.summed("bias", self.spread)
        axis = self.grid.axis(*self.spread.columns)
        if axis is None:
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        out: torch.Tensor = _Normalized.apply(x, axis, self.normalized_shape[0], self.eps)  # type: ignore[no-untyped-call]
        if weight is not None:
            out = out * weight
        if bias is not None:
            out = out + bias
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}, mode={self.grid.mode!r}"


class Dropout(GridLayer):
    """nn.Dropout. If ranks have parts of an activation, each draws its own mask, seeded by a number that all
    ranks draw alike. So a recomputed block gets the same masks, and a checkpoint needs only one generator
    state. ``inside`` as in :class:`LayerNorm`.
    """

    def __init__(self, p: float = 0.5, *, inside: bool | None = None) -> None:
        """Raises ValueError unless ``p`` is a probability."""
        super().__init__()
        self.p = nn.Dropout(p).p
        self.has_parts = bool(self.grid.spread(inside=self.building.place(inside)).names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``; in training with some elements zeroed and the others scaled up."""
        region = self.grid.region
        if region is None or not (self.has_parts and self.training and self.p > 0):
            return functional.dropout(x, self.p, self.training)
        region.begin_masks(x.device)
        try:
            return functional.dropout(x, self.p, self.training)
        finally:
            region.end_masks()

    def extra_repr(self) -> str:
        return f"p={self.p}, mode={self.grid.mode!r}"
