"""Ring attention: each rank keeps its queries, and keys and values are passed from rank to rank. Partial
results are merged by the log-sum-exp of each query's scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gemini.errors import ConfigError
from gemini.parallel.mesh import Arrival
from gemini.parallel.sequence.masks import AttentionMask
from gemini.parallel.sequence.scores import Scoring

# Shapes: query (batch, heads, rows, features), key and value (batch, heads, keys, features), lse (batch,
# heads, rows). Intermediate results are fp32, or fp64 if the inputs are.

_TILE_ROWS = 256  # number of queries with scores in memory at once
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"  # torch's own kernel; it has no public name


def attend_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of the queries to these keys only, and the log-sum-exp of their scores; zeros and
    -inf for a query that sees none of them. ``mask`` is boolean or a bias; ``causal``: query i sees keys 0 to
    i. Sinks are not included: they are added at the end.
    """
    if mask is None and scoring.softcap is None and _has_kernel(q, v):
        out, lse = getattr(torch.ops.aten, _FLASH)(q, k, v, 0.0, causal, scale=scoring.scale)
        return out.to(lse.dtype), lse
    outs, sums = [], []
    for rows in _tiles(q):
        scores = _hidden(_scores(q, k, scoring, rows), mask, causal, rows)
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
    scoring: Scoring,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return these keys' contribution to the gradients of query, key and value. ``out`` and ``lse`` are those
    of attention to all keys; ``grad`` is the gradient of ``out``, with its dtype.
    """
    if mask is None and scoring.softcap is None and _has_kernel(q, v):
        backward: Any = getattr(torch.ops.aten, f"{_FLASH}_backward")
        grads = backward(grad, q, k, v, out, lse, 0.0, causal, scale=scoring.scale)
        return tuple(x.to(lse.dtype) for x in grads)
    kind = lse.dtype
    of_q = []
    of_k, of_v = torch.zeros_like(k, dtype=kind), torch.zeros_like(v, dtype=kind)
    for rows in _tiles(q):
        scores = _scores(q, k, scoring, rows)
        weights = _weights(_hidden(scores, mask, causal, rows), lse[:, :, rows])
        own = grad[:, :, rows].to(kind)
        of_v += weights.mT @ own
        mean = (own * out[:, :, rows].to(kind)).sum(-1, keepdim=True)
        of_scores = weights * (own @ v.to(kind).mT - mean) * scoring.scale
        if scoring.softcap is not None:
            of_scores *= 1 - (scores / scoring.softcap).square()
        of_q.append(of_scores @ k.to(kind))
        of_k += of_scores.mT @ q[:, :, rows].to(kind)
    return torch.cat(of_q, 2), of_k, of_v


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention to the keys of two blocks from the attention to each, and its log-sum-exp."""
    both = torch.logaddexp(lse, other_lse)
    return _share(lse, both) * out + _share(other_lse, both) * other, both


def _share(lse: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
    return (lse - both.clamp_min(torch.finfo(both.dtype).min)).exp().unsqueeze(-1)


def _has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    # A plan on meta computes as the CPU would.
    on_cpu = q.device.type in ("cpu", "meta")
    return on_cpu and q.size(-1) == v.size(-1) and hasattr(torch.ops.aten, _FLASH)


def _tiles(q: torch.Tensor) -> list[slice]:
    return [slice(start, start + _TILE_ROWS) for start in range(0, q.size(2), _TILE_ROWS)]


def _scores(q: torch.Tensor, k: torch.Tensor, scoring: Scoring, rows: slice) -> torch.Tensor:
    """Return the scores of some rows (batch, heads, rows, keys) before masking."""
    kind = torch.promote_types(q.dtype, torch.float32)
    return scoring.capped((q[:, :, rows].to(kind) * scoring.scale) @ k.to(kind).mT)


def _hidden(scores: torch.Tensor, mask: torch.Tensor | None, causal: bool, rows: slice) -> torch.Tensor:
    """Return the scores of some rows with -inf for hidden keys."""
    if mask is not None:
        here = mask if mask.size(2) == 1 else mask[:, :, rows]
        scores = scores.masked_fill(~here, -torch.inf) if here.dtype == torch.bool else scores + here
    if causal:
        first = torch.arange(rows.start, rows.start + scores.size(2), device=scores.device)
        later = torch.arange(scores.size(3), device=scores.device) > first.unsqueeze(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - lse); zeros for rows that see nothing."""
    return (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()


@dataclass(frozen=True)
class _Visit:
    """Keys and values of the rank ``source``, on this rank; the next ones are in flight."""

    source: int
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class _Seen:
    """The rows of this rank that see the keys of a visit; ``diagonal``: row i sees keys 0 to i of these."""

    rows: slice
    keys: slice
    diagonal: bool = False


class _Ring:
    """The state shared by forward and backward; ``mask`` is for this rank's queries."""

    def __init__(self, mask: AttentionMask, scoring: Scoring, device: torch.device) -> None:
        self.axis, self.order = mask.axis, mask.order
        self.scoring = replace(scoring, sinks=None)  # autograd must get the sinks as an argument
        self._causal, (self._rows, self._keys) = mask.causal, mask.here
        self._mask = mask.of_own_queries(device)

    def visits(self, keys: torch.Tensor, values: torch.Tensor) -> Iterator[_Visit]:
        """Yield keys and values of all ranks, this rank's first. Collective."""
        flat = torch.cat([keys.reshape(-1), values.reshape(-1)])
        for step in range(self.axis.size):
            arrival: Arrival | None = None
            if step + 1 < self.axis.size:
                arrival = self.axis.pass_on(flat)
            k, v = flat.split([keys.numel(), values.numel()])
            yield _Visit((self.axis.rank - step) % self.axis.size, k.view(keys.shape), v.view(values.shape))
            if arrival is not None:
                flat = arrival.wait()

    def seen(self, source: int) -> _Seen | None:
        """Return which keys of ``source`` are visible to which rows; None if none are."""
        every = _Seen(slice(0, self._rows), slice(0, self._keys))
        if not self._causal:
            return every
        if source == self.axis.rank:
            return _Seen(every.rows, every.keys, diagonal=True)  # parts are ordered by position
        if not self.order.zigzag:
            return every if source < self.axis.rank else None
        if source < self.axis.rank:  # its stretch at the front is visible
            return _Seen(every.rows, slice(0, self._keys // 2))
        return _Seen(slice(self._rows // 2, self._rows), every.keys)  # only to the stretch at the back

    def mask_of(self, source: int, seen: _Seen) -> torch.Tensor | None:
        """Return the mask for the visible keys of ``source``."""
        if self._mask is None:
            return None
        mask = self._mask
        if mask.size(3) > 1:
            mask = self.order.part(mask, source, 3)[..., seen.keys]
        return mask if mask.size(2) == 1 else mask[:, :, seen.rows]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, ring: _Ring
    ) -> torch.Tensor:
        kind = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], v.size(3), dtype=kind)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=kind)
        group = q.size(1) // k.size(1)
        for visit in ring.visits(k, v):
            seen = ring.seen(visit.source)
            if seen is None:
                continue
            keys, values = (_repeated(x[:, :, seen.keys], group) for x in (visit.keys, visit.values))
            mask, rows = ring.mask_of(visit.source, seen), seen.rows
            more = attend_block(q[:, :, rows], keys, values, mask, ring.scoring, seen.diagonal)
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *more)
        share = None  # the share of the sinks in each softmax
        if sinks is not None:
            of_keys, own = lse, sinks.to(kind).unsqueeze(1)
            lse = torch.logaddexp(of_keys, own)
            out *= _share(of_keys, lse)
            share = (own - lse).exp()
        found = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, found, lse, share)
        ctx.sinks_type = None if sinks is None else sinks.dtype
        ctx.ring = ring
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, share = ctx.saved_tensors
        ring: _Ring = ctx.ring
        group = q.size(1) // k.size(1)
        of_q = torch.zeros_like(q, dtype=lse.dtype)
        arrival: Arrival | None = None
        for visit in ring.visits(k, v):
            # Gradients of keys and values travel behind them, and are complete when they are back on their
            # rank.
            of_k, of_v = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
            seen = ring.seen(visit.source)
            if seen is not None:
                rows, keys = seen.rows, seen.keys
                more_q, more_k, more_v = block_gradients(
                    grad[:, :, rows],
                    q[:, :, rows],
                    _repeated(visit.keys[:, :, keys], group),
                    _repeated(visit.values[:, :, keys], group),
                    out[:, :, rows],
                    lse[:, :, rows],
                    ring.mask_of(visit.source, seen),
                    ring.scoring,
                    seen.diagonal,
                )
                of_q[:, :, rows] += more_q
                of_k[:, :, keys] = _summed(more_k, group)
                of_v[:, :, keys] = _summed(more_v, group)
            flat = torch.cat([of_k.reshape(-1), of_v.reshape(-1)])
            if arrival is not None:
                flat += arrival.wait()
            arrival = ring.axis.pass_on(flat)
        assert arrival is not None
        of_k, of_v = arrival.wait().split([k.numel(), v.numel()])
        of_sinks = None
        if share is not None:  # a sink's value is zero: its gradient is from the weight it takes
            mean = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
            of_sinks = -(share * mean).sum((0, 2)).to(ctx.sinks_type)
        of_keys = of_k.view(k.shape).to(k.dtype), of_v.view(v.shape).to(v.dtype)
        return of_q.to(q.dtype), *of_keys, of_sinks, None


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask,
    scoring: Scoring,
) -> torch.Tensor:
    """Return the attention of this rank's queries, all heads (batch, heads, length, features), to the keys of
    all ranks: the same as torch's ``scaled_dot_product_attention``, up to rounding. Sinks join each softmax
    once, after the last keys. The dropout of ``scoring`` is ignored. No rank holds more than two ranks' keys
    and values at a time; backward sends them round again, followed by their gradients. Collective.

    Raises:
        ConfigError: the mask has a gradient, or is causal between sequences of different lengths.
    """
    if mask.mask is not None and mask.mask.requires_grad:
        raise ConfigError(
            "a mask with a gradient (a learned bias) does not work with ring attention; use method='ulysses'"
        )
    if mask.causal and mask.here[0] != mask.here[1]:
        raise ConfigError(
            f"a causal mask between {mask.here[0]} queries and {mask.here[1]} keys of a rank; ring attention "
            "needs equal lengths"
        )
    if query.size(1) % key.size(1):
        raise ConfigError(
            f"attention has {query.size(1)} heads of queries and {key.size(1)} of keys; the first must be a "
            "multiple of the second"
        )
    ring = _Ring(mask, scoring, query.device)
    found: torch.Tensor = _Attention.apply(query, key, value, scoring.sinks, ring)  # type: ignore[no-untyped-call]
    return found


def _repeated(x: torch.Tensor, group: int) -> torch.Tensor:
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(x: torch.Tensor, group: int) -> torch.Tensor:
    """Sum over the query heads that share a key head."""
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)
