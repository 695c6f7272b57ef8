"""Runs operators on ``meta`` tensors as the CPU would compute them, for rehearsals.

``scaled_dot_product_attention`` chooses an implementation by device, and on ``meta`` it chooses the plain
one, which saves every product of queries and keys. torch's grouped matrix product (experts) accepts only bf16
on ``meta``, as on a GPU; the CPU accepts every dtype.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

_Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]


class CpuAttention(TorchFunctionMode):
    """Mode in which attention on ``meta`` is the operator that the CPU would run."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    operands = tuple(_geometry(tensor) for tensor in (query, key, value, attn_mask))
    if _choice(operands, dropout_p, is_causal, enable_gqa) != SDPBackend.FLASH_ATTENTION.value:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return out


def _geometry(tensor: torch.Tensor | None) -> _Geometry | None:
    """Return shape, stride, dtype, and whether a gradient is needed (no fused kernel computes that of a
    mask), for a batch of one: the choice does not depend on the batch size."""
    if tensor is None:
        return None
    shape = (min(tensor.shape[0], 1), *tensor.shape[1:]) if tensor.ndim == 4 else tuple(tensor.shape)
    return shape, tuple(tensor.stride()), tensor.dtype, tensor.requires_grad and torch.is_grad_enabled()


@lru_cache(maxsize=64)
def _choice(
    operands: tuple[_Geometry | None, ...], dropout_p: float, is_causal: bool, enable_gqa: bool
) -> int:
    """Return the attention implementation that torch would choose on the CPU for these shapes; no memory is
    touched."""
    with _disable_current_modes():
        tensors: list[Any] = [None if geometry is None else _like(geometry) for geometry in operands]
        choose: Any = torch._fused_sdp_choice
        return int(choose(*tensors, dropout_p, is_causal, enable_gqa=enable_gqa))


def _like(geometry: _Geometry) -> torch.Tensor:
    shape, stride, dtype, requires_grad = geometry
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu", requires_grad=requires_grad)


GROUPED_MM = torch.ops.aten._grouped_mm.default


def grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result of ``torch._grouped_mm`` for operands on ``meta``, in groups that end at ``offs``."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:  # matrices cut along what is summed over, or a matrix of each per group
        groups = left.shape[0] if left.ndim == 3 or offs is None else offs.shape[0]
        shape = (groups, *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def grouped_mm_flops(args: tuple[Any, ...], _out: Any) -> int:
    """Return the number of multiplications and additions, which does not depend on the sizes of the
    groups."""
    left, right = args[:2]
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])
