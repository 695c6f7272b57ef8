"""Ulysses attention: an all-to-all gives each rank some heads of the whole sequence; another reverses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.sequence.masks import AttentionMask
from gemini.parallel.sequence.scores import Scoring, attend_by_scores


@dataclass(frozen=True)
class Heads:
    """How heads are divided: ``queries`` heads over ``size`` ranks, as evenly as possible, and ``keys`` heads
    of keys and values, each for the same number of neighbouring query heads. A rank has the key heads that
    its queries need, so several ranks may have the same one. Ranks beyond the number of query heads have
    none.
    """

    queries: int
    keys: int
    size: int

    def __post_init__(self) -> None:
        if self.keys < 1 or self.queries % self.keys:
            raise ConfigError(
                f"attention has {self.queries} heads of queries and {self.keys} of keys; the first must be a "
                "multiple of the second"
            )

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.queries // self.keys

    def of_queries(self, rank: int) -> slice:
        """Return the query heads of ``rank``."""
        least, more = divmod(self.queries, self.size)
        first = rank * least + min(rank, more)
        return slice(first, first + least + (rank < more))

    def of_keys(self, rank: int) -> slice:
        """Return the key heads of ``rank``."""
        mine = self.of_queries(rank)
        if mine.start == mine.stop:
            return slice(0, 0)
        return slice(mine.start // self.group, (mine.stop - 1) // self.group + 1)

    def matching(self, keys: torch.Tensor, rank: int) -> torch.Tensor:
        """Return this rank's ``keys`` (batch, its key heads, ...), or values, in a form in which each is for
        the same number of neighbouring query heads: unchanged, or repeated for each query head.
        """
        mine, theirs = self.of_queries(rank), self.of_keys(rank)
        whole_groups = mine.start % self.group == 0 and mine.stop % self.group == 0
        if whole_groups or theirs.stop - theirs.start <= 1:
            return keys
        index = torch.arange(mine.start, mine.stop, device=keys.device) // self.group - theirs.start
        return keys.index_select(1, index)


def count(heads: slice) -> int:
    """Return the number of heads."""
    found: int = heads.stop - heads.start
    return found


# Shapes: (batch, heads, length, features). All tensors for a rank form one message: query, key and value.

_DIM = 2  # the sequence


@dataclass(frozen=True)
class _Exchange:
    """The exchange of heads: the first tensor has query heads, the others (keys, values) have key heads."""

    axis: Axis
    heads: Heads

    def to_heads(self, local: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's heads of the whole sequence, from tensors with all heads of its part."""
        parts = [
            torch.cat([x[:, self._share(i, rank)].reshape(-1) for i, x in enumerate(local)])
            for rank in range(self.axis.size)
        ]
        mine = [self._shape(i, x, self.axis.rank, x.size(_DIM)) for i, x in enumerate(local)]
        got = self._swap(parts, [mine] * self.axis.size)
        return [torch.cat(pieces, _DIM) for pieces in zip(*got, strict=True)]

    def to_sequence(self, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return all heads of this rank's part of the sequence, from tensors with its heads of the whole
        sequence. Key heads that several ranks have are summed.
        """
        size = self.axis.size
        pieces = [x.chunk(size, _DIM) for x in whole]
        parts = [torch.cat([x[rank].reshape(-1) for x in pieces]) for rank in range(size)]
        shapes = [
            [self._shape(i, x, rank, x.size(_DIM) // size) for i, x in enumerate(whole)]
            for rank in range(size)
        ]
        queries, *others = zip(*self._swap(parts, shapes), strict=True)
        return [torch.cat(queries, 1), *(self._added_up(found) for found in others)]

    def _share(self, index: int, rank: int) -> slice:
        return self.heads.of_queries(rank) if index == 0 else self.heads.of_keys(rank)

    def _shape(self, index: int, x: torch.Tensor, rank: int, length: int) -> tuple[int, ...]:
        return (x.size(0), count(self._share(index, rank)), length, x.size(3))

    def _swap(
        self, parts: list[torch.Tensor], shapes: list[list[tuple[int, ...]]]
    ) -> list[list[torch.Tensor]]:
        """Send one message to each rank; return, by rank, the received tensors with these ``shapes``."""
        sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        got = self.axis.all_to_all(parts, [(sum(of_rank),) for of_rank in sizes])
        return [
            [piece.view(shape) for piece, shape in zip(flat.split(size), of_rank, strict=True)]
            for flat, size, of_rank in zip(got, sizes, shapes, strict=True)
        ]

    def _added_up(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Combine the ranks' key heads to all key heads; heads that several ranks have are summed."""
        if sum(part.size(1) for part in found) == self.heads.keys:
            return torch.cat(list(found), 1)
        first = found[0]
        whole = first.new_zeros(first.size(0), self.heads.keys, *first.shape[2:])
        for rank, part in enumerate(found):
            whole[:, self.heads.of_keys(rank)] += part
        return whole


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads(local))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, *ctx.exchange.to_sequence(grads))


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, whole: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.to_sequence([whole])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.exchange.to_heads([grad])[0]


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask,
    scoring: Scoring,
) -> torch.Tensor:
    """Return the attention of this rank's queries, all heads (batch, heads, length, features), to the keys of
    all ranks. Each rank computes some heads, by torch's ``scaled_dot_product_attention`` or, for a soft cap
    or sinks, by explicit scores. Forward and backward together need four all-to-alls. A sink has its gradient
    on the rank with its head. There may be fewer key heads than query heads, and fewer than ranks.
    Collective.
    """
    axis = mask.axis
    exchange = _Exchange(axis, Heads(query.size(1), key.size(1), axis.size))
    q, k, v = _ToHeads.apply(exchange, query, key, value)  # type: ignore[no-untyped-call]
    length = q.size(_DIM)
    q, k, v = (x[:, :, :n] for x, n in zip((q, k, v), (*mask.whole, mask.whole[1]), strict=True))
    mine = exchange.heads.of_queries(axis.rank)
    allowed = mask.of_all_queries(mine)
    if not scoring.is_plain:
        k, v = (exchange.heads.matching(x, axis.rank) for x in (k, v))
        out = attend_by_scores(q, k, v, allowed, scoring.of_heads(mine), causal=mask.causal)
    elif q.size(1) == 0:
        out = q @ (k.mT @ v)  # an empty result that depends on all inputs: backward calls the other ranks
    else:
        k, v = (exchange.heads.matching(x, axis.rank) for x in (k, v))
        group = q.size(1) // k.size(1)
        if group > 1 and allowed is not None:  # with a mask torch's fast kernels need equal numbers of heads
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        out = functional.scaled_dot_product_attention(
            q, k, v, allowed, scoring.dropout, mask.causal, scale=scoring.scale, enable_gqa=group > 1
        )
    if out.size(_DIM) < length:
        out = functional.pad(out, (0, 0, 0, length - out.size(_DIM)))
    found: torch.Tensor = _ToSequence.apply(exchange, out)  # type: ignore[no-untyped-call]
    return found
