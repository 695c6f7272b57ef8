"""Attention across the parts of a sequence, as a replacement for torch's scaled_dot_product_attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.sequence.batch import SequenceCut, filled
from gemini.parallel.sequence.masks import AttentionMask
from gemini.parallel.sequence.ring import ring_attention
from gemini.parallel.sequence.scores import Scoring, attend_by_scores
from gemini.parallel.sequence.ulysses import ulysses_attention
from gemini.parallel.tensor.cut_outline import OutlineAxis


class _Join(torch.autograd.Function):
    """Gathers the whole sequence on all ranks. Each rank has the whole gradient then. The gradient of a part
    is its part of this, times the number of ranks: data parallelism averages over these ranks too and divides
    by their number.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, order: SequenceCut) -> torch.Tensor:
        ctx.axis, ctx.order = axis, order
        return order.whole(axis.all_gather(x), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.order.part(grad, ctx.axis.rank, 1) * ctx.axis.size, None, None


class SequenceAttention:
    """The replacement for the attention of one model. ``axis=None``: one rank has the whole sequence."""

    def __init__(self, axis: Axis | None, order: SequenceCut, method: str) -> None:
        self.axis, self.order, self.method = axis, order, method
        self._threads = threading.local()
        # By the length of a part: the length of the sequence, without padding.
        self._lengths: dict[int, int] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend with this rank's queries to the keys and values of all ranks. The arguments are those of
        ``scaled_dot_product_attention``, with masks as for :class:`AttentionMask`.

        On ``meta`` there is no communication: it returns a tensor of the output's shape. Over an
        :class:`OutlineAxis` it computes on ``meta`` as a rank would.

        Raises:
            ConfigError: the tensors are not (batch, heads, length, features), or the mask is too small.
        """
        if self._asks_nobody(query):
            return query.new_empty(*query.shape[:-1], value.size(-1))
        if self.axis is None:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if query.dim() == 3:  # one head
            if attn_mask is not None and attn_mask.dim() == 3:
                attn_mask = attn_mask.unsqueeze(1)
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            return self(query, key, value, attn_mask, dropout_p, is_causal, scale).squeeze(1)
        if query.dim() != 4:
            raise ConfigError(
                f"a query has shape {tuple(query.shape)}, but attention over sequence-parallel ranks takes "
                "(batch, heads, length, features)"
            )
        if not enable_gqa and key.size(1) != query.size(1):
            raise ConfigError(
                f"attention has {query.size(1)} heads of queries and {key.size(1)} of keys; pass "
                "enable_gqa=True"
            )
        scoring = Scoring(query.size(-1) ** -0.5 if scale is None else scale, dropout=dropout_p)
        return self.attend(query, key, value, attn_mask, scoring, causal=is_causal)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        scoring: Scoring,
        *,
        causal: bool,
    ) -> torch.Tensor:
        """Attend with tensors of 4 dimensions, with scores as in ``scoring``. There may be fewer key heads
        than query heads.

        Raises:
            ConfigError: the mask is too small, there is not one sink for each head, or ring attention is to
                drop weights.
        """
        if self._asks_nobody(query):
            return query.new_empty(*query.shape[:-1], value.size(-1))
        scoring.require_heads(query.size(1))
        if self.axis is None:
            return attend_by_scores(query, key, value, attn_mask, scoring, causal=causal)
        mask = AttentionMask(
            attn_mask,
            causal,
            (query.size(2), key.size(2)),
            (self.length_of(query.size(2)), self.length_of(key.size(2))),
            self.axis,
            self.order,
        )
        if self.method == "ring":
            if scoring.dropout > 0:
                raise ConfigError(
                    "ring attention does not support dropout; set it to 0, or use Ulysses "
                    "(sp_mode='ulysses' of the plugin, method='ulysses' of parallelize_sequence)"
                )
            return ring_attention(query, key, value, mask, scoring)
        return ulysses_attention(query, key, value, mask, scoring)

    def _asks_nobody(self, query: torch.Tensor) -> bool:
        return query.is_meta and not isinstance(self.axis, OutlineAxis)

    @contextmanager
    def in_place_of_torch(self) -> Iterator[None]:
        """Replace torch's attention function in this thread inside the block."""
        if self.axis is None or getattr(self._threads, "taken", False):
            yield
            return
        self._threads.taken = True
        try:
            with _Taken(self):
                yield
        finally:
            self._threads.taken = False

    # -- a sequence that is cut inside the model -----------------------------------------------------

    def begin(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of hidden states (batch, length, features) of any length."""
        part = self.part_of(whole)
        self.has_cut(whole.size(1))
        return part

    def has_cut(self, length: int) -> None:
        """Record the length of sequences before padding: attention hides the padding."""
        self._lengths[self.order.padded(length) // self.order.size] = length

    def end(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the hidden states on all ranks, without padding."""
        assert self.axis is not None
        whole: torch.Tensor = _Join.apply(part, self.axis, self.order)  # type: ignore[no-untyped-call]
        return whole[:, : self.length_of(part.size(1))]

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor (batch, length, ...), padded with zeros if necessary."""
        assert self.axis is not None
        missing = self.order.padded(whole.size(1)) - whole.size(1)
        return self.order.part(filled(whole, missing, 0) if missing else whole, self.axis.rank, 1)

    def length_of(self, length: int) -> int:
        """Return the length of the sequence before padding, if parts have ``length``."""
        return self._lengths.get(length, self.order.size * length)

    def __deepcopy__(self, _memo: dict[int, Any]) -> SequenceAttention:
        return self  # ranks cannot be copied


class _Taken(TorchFunctionMode):
    """Redirects calls of torch's attention to another function."""

    def __init__(self, attention: SequenceAttention) -> None:
        super().__init__()
        self._attention = attention

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:
            raise ConfigError(
                "torch's attention modules work over sequence-parallel ranks only after "
                "parallelize_sequence(model, mesh) has replaced them; this one was added later, or is "
                "called as a function"
            )
        return func(*args, **(kwargs or {}))
