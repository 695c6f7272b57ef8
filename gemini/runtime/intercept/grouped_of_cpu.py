"""Products of groups of rows with a matrix each (experts), on tensors without memory.

torch's own of ``meta`` takes bf16 alone, as a GPU does; the CPU takes every dtype.
"""

from __future__ import annotations

from typing import Any

import torch

GROUPED_MM = torch.ops.aten._grouped_mm.default


def grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return what ``torch._grouped_mm`` would, for operands on ``meta``; the groups are those of ``offs``."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:  # matrices cut along what is summed over, or a matrix of each per group
        groups = left.shape[0] if left.ndim == 3 or offs is None else offs.shape[0]
        shape = (groups, *shape)
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def grouped_mm_flops(args: tuple[Any, ...], _out: Any) -> int:
    """Return the multiplications and additions, however rows are spread over the groups."""
    left, right = args[:2]
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return int(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])
