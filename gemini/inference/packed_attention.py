"""Attention for packed passes: new tokens of several sequences in one row, each sequence with its own keys
and values.

:func:`attend` is registered with transformers as an attention implementation. The model calls it with the
projections of all new tokens; it appends keys and values to each sequence and attends within the sequence.
Nothing is padded, prompts and single tokens share a pass, and no sequence affects another one's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from gemini.errors import ConfigError, StateError
from gemini.inference.kv import Sequence

NAME = "gemini_sequences"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Options of attention calls without effect here: dropout in eval mode, positions that rotary embeddings have
# already used, and requests for further outputs.
_WITHOUT_EFFECT = {
    "dropout",
    "position_ids",
    "cache_position",
    "output_attentions",
    "output_router_logits",
    "use_cache",
    "output_hidden_states",
    "return_dict",
    "deterministic",
    "logits_to_keep",
    "position_embeddings",
}
_APPLIED = {"sliding_window", "softcap", "s_aux"}
# Rope types with frequencies that depend on the longest sequence of a pass: it would affect the others.
_SHARED_FREQUENCIES = {"dynamic", "longrope"}


class NotPackedError(StateError):
    """The model was called outside of a packed pass while an engine uses it."""


class Packed:
    """The sequences of one pass with their numbers of new tokens, in the order of the tokens."""

    def __init__(self, parts: Iterable[tuple[Sequence, int]]) -> None:
        self.parts = list(parts)
        self.layers: set[int] = set()  # layers that have attended

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append ``key`` and ``value``, [1, heads, tokens, size], and return the output [1, tokens, heads,
        size].
        """
        if layer in self.layers:
            raise ConfigError(
                f"sequences cannot share a pass: layer {layer} attends more than once in it; use "
                "model.generate(), which takes one batch at a time"
            )
        self.layers.add(layer)
        if sinks is not None:
            sinks = sinks.clone()  # one use of the managed parameter instead of one per sequence
        outputs, first = [], 0
        for sequence, count in self.parts:
            tokens = slice(first, first + count)
            first += count
            try:
                keys, values = sequence.append(layer, key[:, :, tokens], value[:, :, tokens], window)
                mask = None if count == 1 else _mask(count, keys.shape[2], window, query.device)
                states = query[:, :, tokens]
                if softcap is None and sinks is None:
                    out = scaled_dot_product_attention(
                        states, keys, values, mask, scale=scaling, enable_gqa=_grouped(states, keys)
                    )
                else:
                    out = _written_out(states, keys[0], values[0], mask, scaling, softcap, sinks)
            finally:
                sequence.let_go()
            outputs.append(out)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return joined.transpose(1, 2).contiguous()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the sequences of ``packed``; registered as transformers' attention implementation."""
    if packed is None:
        raise NotPackedError(
            "an engine serves with this model: submit requests to the engine, or close it before you call "
            "the model"
        )
    _refuse_other_calls(module, attention_mask, options)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    attended = packed.attend(
        layer,
        query,
        key,
        value,
        scaling=scaling,
        window=_window(module, layer, options.get("sliding_window")),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return attended, None


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """Make ``model`` use :func:`attend` within the block, in eval mode. It gets no masks: transformers makes
    none for an implementation without a registered mask function.

    Raises:
        StateError: it already does.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    usual = model.config._attn_implementation
    if usual == NAME:
        raise StateError("another engine serves with this model; submit requests to that one, or close it")
    training = [module for module in model.modules() if module.training]
    model.set_attn_implementation(NAME)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(usual)
        for module in training:
            module.training = True


def refuse_other_models(model: Any) -> None:
    """Raise ConfigError if the sequences of ``model`` cannot be packed into one pass."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is not a model of transformers: it has no configuration")
    config = model.config.get_text_config()
    kind = type(model).__name__
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(entry.get("rope_type")) for entry in (rope, *rope.values()) if isinstance(entry, dict)}
    types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        why = "it has an encoder"
    elif getattr(model, "_is_stateful", False):
        why = "its layers have a state outside attention"
    elif not getattr(model, "_supports_attention_backend", False):
        why = "transformers has no exchangeable attention for it"
    elif types - _LAYER_TYPES:
        why = f"it has layers of type {', '.join(sorted(types - _LAYER_TYPES))}"
    elif getattr(config, "num_kv_shared_layers", 0):
        why = "some of its layers use the keys and values of others"
    elif kinds & _SHARED_FREQUENCIES:
        shared = ", ".join(sorted(kinds & _SHARED_FREQUENCIES))
        why = f"its positions are encoded as {shared}, by the longest text"
    else:
        return
    raise ConfigError(
        f"sequences of {kind} cannot share a pass: {why}; use model.generate(), which takes one batch at a "
        "time"
    )


def _refuse_other_calls(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> None:
    """Raise ConfigError if a layer needs more than this attention computes, instead of ignoring it."""
    unknown = sorted(
        name
        for name, value in options.items()
        if value is not None and name not in _APPLIED | _WITHOUT_EFFECT | {"is_causal"}
    )
    if not (getattr(module, "is_causal", True) and options.get("is_causal") is not False):
        why = "each of its tokens also attends to later tokens"
    elif attention_mask is not None:
        why = "it makes its own mask"
    elif unknown:
        why = f"it attends with {', '.join(unknown)}"
    else:
        return
    raise ConfigError(
        f"sequences cannot share a pass of {type(module).__name__}: {why}; use model.generate(), which takes "
        "one batch at a time"
    )


def _window(module: torch.nn.Module, layer: int, given: int | None) -> int | None:
    """Return how many tokens, itself included, a token of this layer sees at most; None: all."""
    if given is not None:
        return given
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    hidden = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    longest = getattr(config, "max_position_embeddings", None)
    if types[layer] == "sliding_attention" if types else hidden and (not longest or hidden < longest):
        raise ConfigError(
            f"layer {layer} of {type(module).__name__} has a sliding window and does not say how long it is; "
            "use model.generate()"
        )
    return None


def _mask(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return which of ``length`` keys each of the last ``count`` tokens sees: bool [count, length]."""
    own = torch.arange(length - count, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None]
    seen = keys <= own
    return seen if window is None else seen & (keys > own - window)


def _grouped(query: torch.Tensor, keys: torch.Tensor) -> bool:
    return query.shape[1] != keys.shape[1]


def _written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with capped scores or attention sinks, without the fused kernel; returns [1, heads, tokens,
    size].
    """
    groups = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    scores = query[0] @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (shares[..., : keys.shape[1]] @ values)[None]
