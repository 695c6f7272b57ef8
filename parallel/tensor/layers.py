"""Layers that hold this rank's part of a weight. A layer becomes one by its class, and keeps its identity."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.region import Region, copy, reduce


class CutLayer(nn.Module):
    """A layer of a cut model. ``tensor_region`` is set by :func:`become`; ``tensor_sublayer`` says which
    layers are in one module."""

    tensor_region: Region
    tensor_sublayer: int = -1

    def place_in(self, sublayer: int) -> None:
        """Say that it is in the module of that number, as the other layers that have it."""
        self.tensor_sublayer = sublayer


class ColumnLayer(CutLayer):
    """Linear: all of the input, this rank's part of the output, which a row layer takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the layer that it was."""
        x = self.tensor_region.enter(x, training=self.training, layer=id(self), sublayer=self.tensor_sublayer)
        return cast(torch.Tensor, super().forward(x))


class GatheredColumnLayer(CutLayer):
    """As :class:`ColumnLayer`, with the whole output on all ranks; the first ``whole_features`` of it, where
    the weight was filled up."""

    whole_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the layer that it was."""
        out = self.tensor_region.gathered(super().forward(self.tensor_region.copied(x)))
        return out if out.size(-1) == self.whole_features else out[..., : self.whole_features]


class LocalColumnLayer(CutLayer):
    """As :class:`ColumnLayer`, with no row layer behind it: a head whose loss is taken by its parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the layer that it was."""
        return cast(torch.Tensor, super().forward(self.tensor_region.copied(x)))


class RowLayer(CutLayer):
    """Linear: this rank's part of the input, all of the output."""

    splits_input: bool | None = False  # None: where the input is whole
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' products, then the bias, once."""
        splits = self.splits_input
        if x.size(-1) != self.num_inputs if splits is None else splits:
            x = self.tensor_region.own_part(x)
        out = self.tensor_region.leave(self.product(x))
        return out if self.bias is None else out + self.bias

    @property
    def num_inputs(self) -> int:
        """How many features this rank takes."""
        return self.weight.size(1)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's product, in memory of its own."""
        return functional.linear(x, self.weight)


class TransposedRowLayer(RowLayer):
    """As :class:`RowLayer`, with a weight of (in, out): transformers' Conv1D."""

    @property
    def num_inputs(self) -> int:
        return self.weight.size(0)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class InnerRowLayer(RowLayer):
    """As :class:`RowLayer`, inside a region: each rank uses the sum for its own part, so that the gradient of
    the sum is summed as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the layer that it was."""
        out = reduce(self.product(x), self.tensor_region.axis)
        return copy(out if self.bias is None else out + self.bias, self.tensor_region.axis)


class ExpertsLayer(CutLayer):
    """Experts called as ``experts(tokens, chosen, weights)``, with this rank's part of each one's width."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' results. Raises as the module that it was."""
        region = self.tensor_region
        if weights.requires_grad:
            weights = copy(weights, region.axis)
        return region.leave(super().forward(region.copied(hidden), chosen, weights))


class SharedKeysLayer(ColumnLayer):
    """A column layer with a whole weight: this rank's part of the first outputs, and all of the last
    ``shared_features``."""

    shared_features: int
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises as the layer that it was."""
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
        """Return the module's output, without the fused kernel that the mixer has for training: that one
        multiplies by the weight of ``out_proj`` itself, so that nothing would add up the ranks' products."""
        training, self.training = self.training, False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training


class VocabularyEmbedding(CutLayer, nn.Embedding):
    """An embedding of which this rank has some rows: the vectors of others are zeros in the sum."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the vectors of ``ids``, which are of the whole vocabulary."""
        return embed_rows(ids, self.weight, self.padding_idx, self.tensor_region.axis)


def embed_rows(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, axis: Axis) -> torch.Tensor:
    """Return the vectors of ``ids``, of which each rank has some rows in its ``weight``; the one at
    ``padding_idx`` gets no gradient."""
    first, count = axis.rank * weight.size(0), weight.size(0)
    _refuse_unknown(ids, count * axis.size)
    local = ids - first
    outside = (local < 0) | (local >= count)
    padding = None if padding_idx is None or not 0 <= padding_idx - first < count else padding_idx - first
    found = functional.embedding(local.masked_fill(outside, 0), weight, padding)
    return reduce(found.masked_fill(outside.unsqueeze(-1), 0.0), axis)


def _refuse_unknown(ids: torch.Tensor, count: int) -> None:
    """Raise IndexError where one of ``ids`` is out of range, as torch's embedding does on the CPU."""
    if ids.device.type == "cpu" and ids.numel() and not (ids.min() >= 0 and ids.max() < count):
        raise IndexError(
            f"index out of range in an embedding of {count} rows: {int(ids.min())} to {int(ids.max())}"
        )


class GatheredEmbedding(CutLayer, nn.Embedding):
    """An embedding of which this rank has some columns: vectors are put together."""

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
        """Return output and weights as torch's does; weights that are not averaged are of all heads."""
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
        """Return query, key and value of this rank's heads: (batch, heads, length, head)."""
        found = []
        weights = self.in_proj_weight.chunk(3)
        biases = self.in_proj_bias.chunk(3) if self.in_proj_bias is not None else (None, None, None)
        for index, (x, weight, bias) in enumerate(zip(inputs, weights, biases, strict=True)):
            layer = 0 if index else id(self)
            x = self.tensor_region.enter(
                x, training=self.training, layer=layer, sublayer=self.tensor_sublayer
            )
            out = functional.linear(x, weight, bias)
            out = out if self.batch_first else out.transpose(0, 1)
            found.append(out.unflatten(-1, (-1, self.head_dim)).transpose(1, 2))
        return found

    def _shown(self, weights: torch.Tensor, *, averaged: bool) -> torch.Tensor:
        """Return the weights of all heads, or their mean. No gradient goes through them."""
        every = torch.cat(self.tensor_region.axis.all_gather(weights.detach()), 1)
        return every.mean(1) if averaged else every


class AlibiAttention(CutLayer):
    """Attention of transformers' BLOOM and Falcon with this rank's heads. The model makes a bias for all."""

    num_heads: int  # of this rank

    def forward(self, *args: Any, alibi: torch.Tensor | None, **kwargs: Any) -> Any:
        """Return the module's output; ``alibi``, (batch x all heads, 1, keys) or (batch, all heads, 1, keys),
        is cut to own heads, and so is a mask that the model added it to."""
        if alibi is None:  # a Falcon that rotates
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
    """Return what is added to scores of (batch, heads here, query, key)."""
    batch, heads = q.size(0), q.size(1)
    joined = None
    if mask is not None:
        joined = _added(mask, q.dtype)
        if joined.dim() == 3:  # one for each head
            joined = joined.view(batch, size, heads, *joined.shape[1:])[:, rank]
    if padding is not None:
        hidden = _added(padding, q.dtype)[:, None, None, :]
        joined = hidden if joined is None else joined + hidden
    return joined


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as what is added to scores: a boolean one is True where nothing is to be seen."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))


@cache
def _class_of(layer: type[CutLayer], was: type[nn.Module]) -> type[nn.Module]:
    """Return the class of what was a ``was`` and becomes a ``layer``, under the name it had."""
    # A subclass that calls its base (an embedding that is scaled, say) goes on doing so.
    torch_class = next(base for base in layer.__mro__ if base.__module__.startswith("torch.nn.modules"))
    bases: tuple[type[nn.Module], ...] = (layer, was)
    if torch_class is not nn.Module:
        bases = (layer,) if was is torch_class else (was, layer)
    return type(was.__name__, bases, {"__module__": was.__module__})


def become(module: nn.Module, layer: type[CutLayer], region: Region, **attributes: Any) -> None:
    """Make ``module`` a ``layer``, with these ``attributes``."""
    module.__class__ = _class_of(layer, type(module))  # type: ignore[arg-type]
    cast(CutLayer, module).tensor_region = region
    for name, value in attributes.items():
        setattr(module, name, value)
