"""Sequence parallelism for transformers: attention is looked up in a registry, where ours gets a name."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.families import Family, Loss, Positions, family_of
from gemini.parallel.sequence.attention import SequenceAttention
from gemini.parallel.sequence.inner_models import AT_BLOCKS, Complete, complete_calls
from gemini.parallel.sequence.scores import Scoring

_NUMBERS = itertools.count()
_WITHOUT = "train it with whole sequences (sp_size=1), with tp_size or pp_size"
_UNKNOWN = ("position_bias",)  # arguments of attention that change its scores


def refuse_unfit(model: Any, *, cuts_blocks: bool) -> None:
    """Raise ConfigError if ``model`` would treat parts of a sequence as whole sequences."""
    name, family = type(model).__name__, family_of(model)
    if family.two_sequences:
        raise ConfigError(
            f"{name} has two sequences, an encoder's and a decoder's, which sequence parallelism cannot cut; "
            f"{_WITHOUT}"
        )
    if family.mixes_tokens:
        raise ConfigError(
            f"{name} mixes tokens outside of attention, with {family.mixes_tokens}, and would mix only those "
            f"of one part; {_WITHOUT}"
        )
    if not family.replaceable_attention:
        raise ConfigError(
            f"{name} computes attention in its own code, which sequence parallelism cannot replace; "
            f"{_WITHOUT}"
        )
    if family.router_loss:
        raise ConfigError(_takes_router_loss(model))
    if not cuts_blocks:
        _refuse_parts_of_batches(name, family)


def _takes_router_loss(model: Any) -> str:
    return (
        f"{type(model).__name__} computes a loss of the routers over all tokens (output_router_logits, in "
        "its configuration or its call), but each rank has only a part of them; set it to False"
    )


def _refuse_parts_of_batches(name: str, family: Family) -> None:
    """Raise ConfigError if a model computes something from whole sequences outside of its blocks."""
    way_out = f"give whole batches to all ranks and {AT_BLOCKS}"
    if family.loss is Loss.WHOLE_SEQUENCE:
        raise ConfigError(
            f"{name} computes its loss from a whole sequence, but each rank has only a part; {way_out}"
        )
    if family.rotates_by_length:
        raise ConfigError(
            f"{name} scales its rotary positions by the length of its input (rope_type "
            f"{family.rotates_by_length!r}), which would be the length of a part; {way_out}"
        )
    if family.other_tokens:
        raise ConfigError(
            f"{name} puts images or sounds between tokens, which sequence parallelism does not cut; {way_out}"
        )
    if family.scales_by_position:
        raise ConfigError(
            f"{name} scales attention by positions that it would compute from one part; {way_out}"
        )
    if family.positions is Positions.OF_LENGTH:
        raise ConfigError(
            f"{name} computes positions from the length of its input, which would be the length of a part; "
            f"{way_out}"
        )


def replace_attention(model: Any, attention: SequenceAttention, *, cuts_blocks: bool) -> None:
    """Make ``model`` use ``attention``; with ``cuts_blocks`` its masks are those of whole sequences. Other
    models that share its configuration are not changed.
    """
    family = family_of(model)
    modeling = importlib.import_module("transformers.modeling_utils")
    masking = importlib.import_module("transformers.masking_utils")
    name = f"gemini_sequence_{next(_NUMBERS)}"
    modeling.ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, attention))
    mask = masking.sdpa_mask if cuts_blocks else partial(_mask, attention, masking.sdpa_mask)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    configs: dict[int, Any] = {}  # copies, by the id of the original
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            if id(config) not in configs:
                configs[id(config)] = copy.deepcopy(config, memo)
                configs[id(config)]._attn_implementation = name
            module.config = configs[id(config)]
    asked = partial(_refuse_router_loss, model, tuple(configs.values()))
    complete = None if cuts_blocks else partial(_complete, attention, model, family)
    complete_calls(model, partial(_completed, asked if attention.axis is not None else None, complete))


def _attend(
    attention: SequenceAttention,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend across the ranks. Takes the arguments of transformers' ``sdpa_attention_forward``, and the soft
    cap (``softcap``) and sinks (``s_aux``, one for each query head) of its other attention functions.
    """
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise ConfigError(
                f"{type(module).__name__} passes {name} to attention, which sequence parallelism does not "
                f"support; {_WITHOUT}"
            )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = bool(is_causal) and attention_mask is None
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, others.get("softcap"), others.get("s_aux"), dropout)
    if not scoring.is_plain:
        out = attention.attend(query, key, value, attention_mask, scoring, causal=causal)
        return out.transpose(1, 2).contiguous(), None
    with attention.in_place_of_torch():
        out = functional.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


def _mask(
    attention: SequenceAttention,
    whole_mask: Any,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return the mask of the whole sequence, with ``q_length`` tokens of it on this rank, from the arguments
    of transformers' ``sdpa_mask``. Collective.
    """
    axis, order = attention.axis, attention.order
    if int(q_offset) or int(kv_offset):
        raise ConfigError(
            "a sequence over several ranks works only for training; generate with a separate model"
        )
    padding = attention_mask
    if axis is not None and padding is not None:
        if padding.size(1) != kv_length:
            raise ConfigError(f"attention_mask has {padding.size(1)} tokens, but this rank has {kv_length}")
        padding = order.whole(axis.all_gather(padding.to(torch.uint8)), 1).bool()
    whole = partial(
        whole_mask, batch_size=batch_size, kv_length=order.size * kv_length, attention_mask=padding
    )
    if axis is None or attention.method == "ulysses":
        found: torch.Tensor | None = whole(q_length=order.size * q_length, **options)
        return found
    local = options.get("local_size")
    if local is None and options.get("allow_is_bidirectional_skip"):
        return None if padding is None or bool(padding.all()) else padding[:, None, None, :]
    if local is None and options.get("allow_is_causal_skip") and (padding is None or _is_at_the_end(padding)):
        return None  # padding at the end: a causal query never sees it
    rows = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    stretch = q_length * order.size // order.num_stretches
    return torch.cat(
        [whole(q_length=stretch, q_offset=index * stretch, **rows) for index in order.stretches(axis.rank)],
        2,
    )


def _is_at_the_end(padding: torch.Tensor) -> bool:
    """Return whether all padding is at the end; ``padding``: (batch, length), True for tokens that count. On
    ``meta``, which has no values, it is assumed.
    """
    return padding.is_meta or bool((padding[:, 1:] <= padding[:, :-1]).all())


def _completed(
    asked: Callable[..., None] | None,
    complete: Complete | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for a forward pass on parts."""
    if asked is not None:
        asked(args, kwargs)
    return (args, kwargs) if complete is None else complete(args, kwargs)


def _refuse_router_loss(
    model: Any, configs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise ConfigError if a forward pass computes a router loss: its call and its configuration may request
    one at any time.
    """
    given = dict(zip(_parameters(model), args, strict=False)) | kwargs
    asked = given.get("output_router_logits")
    if asked or (asked is None and any(getattr(each, "output_router_logits", False) for each in configs)):
        raise ConfigError(_takes_router_loss(model))


def _complete(
    attention: SequenceAttention,
    model: Any,
    family: Family,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the arguments that the model would compute from the length of its input: positions, and the mask of
    documents if positions restart within a sequence. Collective.
    """
    names = _parameters(model)
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or attention.axis is None:
        return args, kwargs
    positions = given.get("position_ids")
    if positions is None:
        if family.positions is Positions.OF_TOKENS:
            raise ConfigError(
                f"{type(model).__name__} computes position_ids from its input, which is only a part of the "
                "sequence; add position_ids of the whole sequence to the batch"
            )
        given["position_ids"] = _positions(attention, family, tokens, given.get("attention_mask"))
    elif given.get("attention_mask") is None and family.looks_back_only:
        if family.documents_in_mask:
            given["attention_mask"] = _mask_of_documents(attention, positions)
        if given.get("attention_mask") is not None and family.has_windows:
            raise ConfigError(
                "layers with sliding windows cannot tell apart several documents in one sequence "
                "(position_ids that start again from 0); give whole batches to all ranks and "
                f"{AT_BLOCKS}, or put one document in a row"
            )
    if attention.order.zigzag and given.get("attention_mask") is None:
        # Without a mask transformers would take the jump between two stretches for a document border.
        given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return (), given


def _positions(
    attention: SequenceAttention, family: Family, tokens: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the positions of this rank's ``tokens``, (batch or 1, length), as the model computes them for a
    whole sequence. Collective.
    """
    axis, order = attention.axis, attention.order
    assert axis is not None
    if family.positions is Positions.COUNTED_IN_MASK and mask is not None:
        seen = order.whole(axis.all_gather(mask.long()), 1)
        return order.part(seen.cumsum(1) * seen - 1, axis.rank, 1)
    return order.positions(tokens.size(1), axis.rank, tokens.device).unsqueeze(0)


def _mask_of_documents(attention: SequenceAttention, positions: torch.Tensor) -> torch.Tensor | None:
    """Return the mask (batch, 1, rows here, keys) of documents side by side in a sequence; None for one
    document, and on ``meta``. Collective.
    """
    axis, order = attention.axis, attention.order
    assert axis is not None
    every = order.whole(axis.all_gather(positions), 1)
    documents = (every.diff(dim=1, prepend=every[:, :1] - 1) != 1).cumsum(1)
    if documents.is_meta or not bool(documents.any()):
        return None
    places = torch.arange(every.size(1), device=every.device)
    here = order.positions(positions.size(1), axis.rank, every.device)
    same = documents[:, here, None] == documents[:, None, :]
    return (same & (here[:, None] >= places)).unsqueeze(1)


def _parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters of the model's forward."""
    return list(inspect.signature(model.forward).parameters)
