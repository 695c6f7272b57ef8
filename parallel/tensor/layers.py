"""Layers that hold this rank's part of a weight. A module is converted by changing its class, so references
to it stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.region import Region, copy, reduce


class CutLayer(nn.Module):
    """A layer of a cut model. :func:`become` sets ``tensor_region``. Layers in the same module have the same
    ``tensor_sublayer``.
    """

    tensor_region: Region
    tensor_sublayer: int = -1

    def place_in(self, sublayer: int) -> None:
        """Set the number of the module that it is in."""
        self.tensor_sublayer = sublayer


class ColumnLayer(CutLayer):
    """A Linear that takes the whole input and returns this rank's part of the output, for a row layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the original layer."""
        x = self.tensor_region.enter(x, training=self.training, layer=id(self), sublayer=self.tensor_sublayer)
        return cast(torch.Tensor, super().forward(x))


class GatheredColumnLayer(CutLayer):
    """A :class:`ColumnLayer` that returns the whole output on all ranks: its first ``whole_features`` if the
    weight was padded.
    """

    whole_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the original layer."""
        out = self.tensor_region.gathered(super().forward(self.tensor_region.copied(x)))
        return out if out.size(-1) == self.whole_features else out[..., : self.whole_features]


class LocalColumnLayer(CutLayer):
    """A :class:`ColumnLayer` without a row layer behind it: a head with a loss that takes the parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the original layer."""
        return cast(torch.Tensor, super().forward(self.tensor_region.copied(x)))


class RowLayer(CutLayer):
    """A Linear that takes this rank's part of the input and returns the whole output."""

    splits_input: bool | None = False  # None: split the input if it is whole
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' products, then add the bias once."""
        splits = self.splits_input
        if x.size(-1) != self.num_inputs if splits is None else splits:
            x = self.tensor_region.own_part(x)
        out = self.tensor_region.leave(self.product(x))
        return out if self.bias is None else out + self.bias

    @property
    def num_inputs(self) -> int:
        """The number of features that this rank takes."""
        return self.weight.size(1)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's product, in its own memory."""
        return functional.linear(x, self.weight)


class TransposedRowLayer(RowLayer):
    """A :class:`RowLayer` with a weight of shape (in, out): transformers' Conv1D."""

    @property
    def num_inputs(self) -> int:
        return self.weight.size(0)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class InnerRowLayer(RowLayer):
    """A :class:`RowLayer` inside a region: each rank uses the sum for its own part, so the gradient of the
    sum is summed too.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the original layer."""
        out = reduce(self.product(x), self.tensor_region.axis)
        return copy(out if self.bias is None else out + self.bias, self.tensor_region.axis)


class ExpertsLayer(CutLayer):
    """Experts called as ``experts(tokens, chosen, weights)``, with this rank's part of their widths."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' results. Raises as the original module."""
        region = self.tensor_region
        if weights.requires_grad:
            weights = copy(weights, region.axis)
        return region.leave(super().forward(region.copied(hidden), chosen, weights))


class SharedKeysLayer(ColumnLayer):
    """A column layer with a whole weight. It computes this rank's part of the first outputs, and all of the
    last ``shared_features``.
    """

    shared_features: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the original layer."""
        x = self.tensor_region.enter(x, training=self.training, layer=id(self), sublayer=self.tensor_sublayer)
        axis, first = self.tensor_region.axis, self.weight.size(0) - self.shared_features
        own = first // axis.size
        rows = ((axis.rank * own, own), (first, self.shared_features))
        biases = (None if self.bias is None else self.bias.narrow(0, *each) for each in rows)
        parts = zip(rows, biases, strict=True)
        return torch.cat([functional.linear(x, self.weight.narrow(0, *each), b) for each, b in parts], -1)


class StateSpaceLayer(CutLayer):
    """A mixer of transformers' Mamba with this rank's channels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output. Disables the fused training kernel of the mixer: it multiplies by the
        weight of ``out_proj`` itself, and then nothing would sum the ranks' products.
        """
        training, self.training = self.training, False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training


class VocabularyEmbedding(CutLayer, nn.Embedding):
    """An embedding with some rows on this rank; vectors of other rows are zeros in a sum over the ranks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors of ``ids`` of the whole vocabulary."""
        return embed_rows(ids, self.weight, self.padding_idx, self.tensor_region.axis)


def embed_rows(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, axis: Axis) -> torch.Tensor:
    """Return the vectors of ``ids``; each rank has some rows in its ``weight``. The row at ``padding_idx``
    gets no gradient.
    """
    first, count = axis.rank * weight.size(0), weight.size(0)
    _refuse_unknown(ids, count * axis.size)
    local = ids - first
    outside = (local < 0) | (local >= count)
    padding = None if padding_idx is None or not 0 <= padding_idx - first < count else padding_idx - first
    found = functional.embedding(local.masked_fill(outside, 0), weight, padding)
    return reduce(found.masked_fill(outside.unsqueeze(-1), 0.0), axis)


def _refuse_unknown(ids: torch.Tensor, count: int) -> None:
    """Raise IndexError if an id is out of range, as torch's embedding does on the CPU."""
    if ids.device.type == "cpu" and ids.numel() and not (ids.min() >= 0 and ids.max() < count):
        raise IndexError(
            f"index out of range in an embedding of {count} rows: {int(ids.min())} to {int(ids.max())}"
        )


class GatheredEmbedding(CutLayer, nn.Embedding):
    """An embedding with some of the columns on this rank; vectors are gathered."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the whole vectors of ``ids``."""
        return self.tensor_region.gathered(super().forward(ids))


class Attention(CutLayer, nn.MultiheadAttention):
    """Torch's attention with this rank's heads."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and weights as torch's does; weights that are not averaged are those of all heads."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, and there is none")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(1 if not self.batch_first else 0) for x in (query, key, value))
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._projected(query, key, value)
        mask = _joined_mask(
            attn_mask, key_padding_mask, q, self.tensor_region.axis.rank, self.tensor_region.axis.size
        )
        weights = None
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            weights = _weights(q, k, mask)
            out = functional.dropout(weights, dropout) @ v
            weights = self._shown(weights, averaged=average_attn_weights)
        else:
            out = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        out = out.transpose(1, 2).flatten(2)
        out = self.out_proj(out if self.batch_first else out.transpose(0, 1))
        if batched:
            return out, weights
        return out.squeeze(0 if self.batch_first else 1), weights.squeeze(0) if weights is not None else None

    def _projected(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return query, key and value of this rank's heads: (batch, heads, length, head size)."""
        enter, place = self.tensor_region.enter, self.tensor_sublayer
        layers = (id(self), 0, 0)  # 0: another input of the same layer
        entered = (
            enter(x, training=self.training, layer=layer, sublayer=place)
            for x, layer in zip(inputs, layers, strict=True)
        )
        return project(self, entered)

    def _shown(self, weights: torch.Tensor, *, averaged: bool) -> torch.Tensor:
        """Return the weights of all heads, or their mean, without a gradient."""
        every = torch.cat(self.tensor_region.axis.all_gather(weights.detach()), 1)
        return every.mean(1) if averaged else every


class AlibiAttention(CutLayer):
    """Attention of transformers' BLOOM and Falcon with this rank's heads of the bias for all heads."""

    num_heads: int  # on this rank

    def forward(self, *args: Any, alibi: torch.Tensor | None, **kwargs: Any) -> Any:
        """Return the module's output. ``alibi``, (batch x all heads, 1, keys) or (batch, all heads, 1, keys),
        is cut to this rank's heads, and also a mask that contains it.
        """
        if alibi is None:  # a Falcon with rotary embeddings
            return super().forward(*args, alibi=None, **kwargs)
        count = self.tensor_region.axis.size * self.num_heads
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.size(1) == count:
            kwargs["attention_mask"] = self._own(mask)
        if alibi.dim() == 4:
            own = self._own(alibi)
        else:
            own = self._own(alibi.unflatten(0, (-1, count))).flatten(0, 1)
        return super().forward(*args, alibi=own, **kwargs)

    def _own(self, every: torch.Tensor) -> torch.Tensor:
        return every.narrow(1, self.tensor_region.axis.rank * self.num_heads, self.num_heads)


def _weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
    return torch.softmax(scores if mask is None else scores + mask, -1)


def _joined_mask(
    mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor, rank: int, size: int
) -> torch.Tensor | None:
    """Return the bias to add to scores of (batch, this rank's heads, query, key)."""
    batch, heads = q.size(0), q.size(1)
    joined = None
    if mask is not None:
        joined = mask_as_bias(mask, q.dtype)
        if joined.dim() == 3:  # one mask for each head
            joined = joined.view(batch, size, heads, *joined.shape[1:])[:, rank]
    if padding is not None:
        hidden = mask_as_bias(padding, q.dtype)[:, None, None, :]
        joined = hidden if joined is None else joined + hidden
    return joined


def project(module: nn.MultiheadAttention, inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Project query, key and value with the packed weights of ``module``. Return each as (batch, heads,
    length, head size).
    """
    found = []
    weights = module.in_proj_weight.chunk(3)
    biases = module.in_proj_bias.chunk(3) if module.in_proj_bias is not None else (None, None, None)
    for x, weight, bias in zip(inputs, weights, biases, strict=True):
        out = functional.linear(x, weight, bias)
        out = out if module.batch_first else out.transpose(0, 1)
        found.append(out.unflatten(-1, (-1, module.head_dim)).transpose(1, 2))
    return found


def mask_as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as a bias for scores; a boolean mask is True at positions to hide."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


@cache
def _class_of(layer: type[CutLayer], was: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a converted module: a ``layer`` that was a ``was``, with the name of ``was``."""
    # A subclass that calls its base, for example a scaled embedding, must come first to keep doing so.
    torch_class = next(base for base in layer.__mro__ if base.__module__.startswith("torch.nn.modules"))
    bases: tuple[type[nn.Module], ...] = (layer, was)
    if torch_class is not nn.Module:
        bases = (layer,) if was is torch_class else (was, layer)
    return type(was.__name__, bases, {"__module__": was.__module__})


def become(module: nn.Module, layer: type[CutLayer], region: Region, **attributes: Any) -> None:
    """Convert ``module`` to a ``layer`` in place, with these ``attributes``."""
    module.__class__ = _class_of(layer, type(module))  # type: ignore[arg-type]
    cast(CutLayer, module).tensor_region = region
    for name, value in attributes.items():
        setattr(module, name, value)
