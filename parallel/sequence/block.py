"""Attention to some of the keys, with what is needed to add the others later: a log-sum-exp of each query."""

from __future__ import annotations

from typing import Any

import torch

# Shapes: query (batch, heads, rows, features), key and value (batch, heads, keys, features), lse (batch,
# heads, rows). What is computed step by step is fp32, or fp64 where the inputs are.

_TILE_ROWS = 256  # scores of so many queries are in memory at once
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"  # torch's own kernel, which has no public name


def attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of the queries to these keys alone, and the logarithm of the sum of the
    exponentials of their scores: -inf, beside zeros, for a query that sees none of them. ``mask`` is boolean
    or added; ``causal``: query i sees keys 0 to i."""
    if mask is None and _has_kernel(q, v):
        out, lse = getattr(torch.ops.aten, _FLASH)(q, k, v, 0.0, causal, scale=scale)
        return out.to(lse.dtype), lse
    outs, sums = [], []
    for rows in _tiles(q):
        scores = _scores(q, k, mask, scale, causal, rows)
        lse = scores.logsumexp(-1)
        outs.append(_weights(scores, lse) @ v.to(scores.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def block_gradients(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what these keys add to the gradients of query, key and value. ``out`` and ``lse`` are those of
    attention to all keys, ``grad`` is the gradient of ``out``, of its type."""
    if mask is None and _has_kernel(q, v):
        backward: Any = getattr(torch.ops.aten, f"{_FLASH}_backward")
        grads = backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return tuple(x.to(lse.dtype) for x in grads)
    kind = lse.dtype
    of_q = []
    of_k, of_v = torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
    for rows in _tiles(q):
        scores = _scores(q, k, mask, scale, causal, rows)
        weights = _weights(scores, lse[:, :, rows])
        own = grad[:, :, rows].to(kind)
        of_v += weights.mT @ own
        mean = (own * out[:, :, rows].to(kind)).sum(-1, keepdim=True)
        of_scores = weights * (own @ v.to(kind).mT - mean) * scale
        of_q.append(of_scores @ k.to(kind))
        of_k += of_scores.mT @ q[:, :, rows].to(kind)
    return torch.cat(of_q, 2), of_k, of_v


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to the keys of two blocks, of what it is to each."""
    both = torch.logaddexp(lse, other_lse)
    return _share(lse, both) * out + _share(other_lse, both) * other, both


def _share(lse: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    return (lse - both.clamp_min(torch.finfo(both.dtype).min)).exp().unsqueeze(-1)


def _has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    # What is planned on meta is what the CPU would do.
    on_cpu = q.device.type in ("cpu", "meta")
    return on_cpu and q.size(-1) == v.size(-1) and hasattr(torch.ops.aten, _FLASH)


def _tiles(q: torch.Tensor) -> list[slice]:
    return [slice(start, start + _TILE_ROWS) for start in range(0, q.size(2), _TILE_ROWS)]


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool, rows: slice
) -> torch.Tensor:
    """Return the scores of some rows (batch, heads, rows, keys), -inf for what is not seen."""
    kind = torch.promote_types(q.dtype, torch.float32)
    scores = (q[:, :, rows].to(kind) * scale) @ k.to(kind).mT
    if mask is not None:
        here = mask if mask.size(2) == 1 else mask[:, :, rows]
        scores = scores.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else scores + here
    if causal:
        first = torch.arange(rows.start, rows.start + scores.size(2), device=q.device)
        later = torch.arange(k.size(2), device=q.device) > first.unsqueeze(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the exponentials, those of rows that see nothing as zeros."""
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
