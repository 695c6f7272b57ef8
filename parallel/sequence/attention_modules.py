"""Modules of models that call torch's attention directly: the function is replaced while they compute."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.sequence.attention import SequenceAttention
from gemini.parallel.tensor.layers import Attention as CutHeads
from gemini.parallel.tensor.layers import mask_as_bias, project


class AttendingModule(nn.Module):
    """A module with its calls of ``scaled_dot_product_attention`` redirected. Not a hook of the model, so
    that a block that is recomputed in backward, outside the model's call, attends as in forward.
    """

    sequence_attention: SequenceAttention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original module with attention across the ranks."""
        with self.sequence_attention.in_place_of_torch():
            return super().forward(*args, **kwargs)


class AttendingHeads(AttendingModule, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` across parts of a sequence. It returns no attention weights, because no rank
    has them. A module that was cut by heads stays cut.
    """

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
    ) -> tuple[torch.Tensor, None]:
        """Return the output as torch's module does, and None.

        Masks: with ``is_causal``, ``attn_mask`` is ignored; ``key_padding_mask`` covers this rank's keys or
        all keys; ``attn_mask`` covers this rank's queries, or all queries, and all keys.
        """
        if query.dim() != 3:
            raise ConfigError(
                "attention over sequence-parallel ranks takes batches, but this query has no batch dimension"
            )
        q, k, v = self._projected(query, key, value)
        mask = None if is_causal else attn_mask
        joined = _joined(mask, key_padding_mask, q)
        if is_causal and joined is not None:
            raise ConfigError(
                "is_causal=True does not work with key_padding_mask; pass attn_mask= for all keys instead"
            )
        dropout = self.dropout if self.training else 0.0
        with self.sequence_attention.in_place_of_torch():
            out = functional.scaled_dot_product_attention(q, k, v, joined, dropout, is_causal)
        out = out.transpose(1, 2).flatten(2)
        out = self.out_proj(out if self.batch_first else out.transpose(0, 1))
        return out, None

    def _projected(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return query, key and value as (batch, heads, length, features)."""
        if isinstance(self, CutHeads):
            return CutHeads._projected(self, *inputs)
        return project(self, inputs)


def _joined(mask: torch.Tensor | None, padding: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Return the bias for scores (batch, heads, rows, keys). True in boolean masks means hidden."""
    if mask is not None:
        mask = mask_as_bias(mask, q.dtype)
        if mask.dim() == 3:
            mask = mask.unflatten(0, (q.size(0), -1))
    if padding is None:
        return mask
    hidden = mask_as_bias(padding, q.dtype)[:, None, None, :]
    return hidden if mask is None else mask + hidden


def refuse_torch_attention(model: nn.Module) -> None:
    """Raise ConfigError if an ``nn.MultiheadAttention`` of ``model`` has unsupported options."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ConfigError(
                f"{name}: attention with kdim, vdim, add_bias_kv or add_zero_attn cannot run over "
                "sequence-parallel ranks; train it with sp_size=1"
            )


def replace_torch_attention(model: nn.Module, attention: SequenceAttention) -> None:
    """Make all modules of ``model`` use ``attention``."""
    for module in list(model.modules()):
        if isinstance(module, nn.MultiheadAttention):
            _become(module, AttendingHeads, attention)
            module._qkv_same_embed_dim = False  # torch's fused kernel must not use the weights
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
        elif not type(module).__module__.startswith("torch.nn.modules"):
            _become(module, AttendingModule, attention)


@cache
def _class_of(kind: type[AttendingModule], was: type[nn.Module]) -> type[nn.Module]:
    bases: tuple[type[nn.Module], ...] = (kind, was)
    if issubclass(was, nn.MultiheadAttention) and not issubclass(was, CutHeads):
        # A subclass that calls its base must keep doing so.
        bases = (kind,) if was is nn.MultiheadAttention else (was, kind)
    return type(was.__name__, bases, {"__module__": was.__module__})


def _become(module: nn.Module, kind: type[AttendingModule], attention: SequenceAttention) -> None:
    module.__class__ = _class_of(kind, type(module))  # type: ignore[arg-type]
    cast(AttendingModule, module).sequence_attention = attention
