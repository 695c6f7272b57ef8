"""Scoring: how attention weights follow from query-key products: scale, soft cap, sinks, dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from gemini.errors import ConfigError


@dataclass(frozen=True)
class Scoring:
    """A model's options for scores, the products of queries and keys.

    Attributes:
        scale: the first factor of scores.
        softcap: then scores become ``softcap * tanh(scores / softcap)``, before any mask (Gemma 2).
        sinks: (heads of queries,), one more score in each softmax, for a key with the value zero (GPT-OSS).
        dropout: the probability of dropping a weight.
    """

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether ``scaled_dot_product_attention`` computes these scores."""
        return self.softcap is None and self.sinks is None

    def of_heads(self, heads: slice) -> Scoring:
        """Return the scoring for some query heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    def require_heads(self, heads: int) -> None:
        """Raise ConfigError unless there is one sink for each of ``heads`` query heads."""
        if self.sinks is not None and self.sinks.shape != (heads,):
            raise ConfigError(
                f"attention has sinks of shape {tuple(self.sinks.shape)} and {heads} heads of queries; "
                "give one sink for each head"
            )

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Apply the soft cap to scaled scores."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


def attend_by_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    *,
    causal: bool,
) -> torch.Tensor:
    """Return attention of whole sequences as transformers' eager functions compute it. Scores of all rows are
    in memory at once. A row that sees nothing is zeros, as in ``scaled_dot_product_attention``; eager
    functions return the mean of all values there.

    Shapes: ``q`` (batch, heads, rows, features), ``k`` and ``v`` (batch, key heads, keys, features). ``mask``
    is boolean (True means visible) or a bias; ``causal``: row i sees keys 0 to i.
    """
    group = q.size(1) // max(k.size(1), 1)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = scoring.capped(q @ k.mT * scoring.scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        # Not -inf: a row that sees nothing (padding) must not become NaN, here or in backward.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    kind = torch.promote_types(q.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=kind)[..., : k.size(2)].to(v.dtype)
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.masked_fill(~mask, 0)
    return functional.dropout(weights, scoring.dropout) @ v
