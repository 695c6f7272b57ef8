"""Plans: the style of each layer of a model. Plans are data: names, or classes, to styles."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.families import family_of, head_numel, partial_children, rule_of, shares_heads
from gemini.parallel.tensor.styles import (
    AlibiHeads,
    Channels,
    Column,
    EmbeddingColumns,
    Head,
    InnerRow,
    InsideExperts,
    PartialGradient,
    PerHead,
    Row,
    SharedKeys,
    StateSpace,
    Style,
    TorchAttention,
    Vocabulary,
)
from gemini.parallel.transformers_model import pretrained_in

# The names in transformers' plans.
STYLES: Mapping[str, Style | None] = {
    "colwise": Column(),
    "colwise_gather_output": Head(),
    "colwise_rep": Head(),
    "rowwise": Row(),
    "rowwise_split_input": Row(splits_input=True),
    "rowwise_rep": Row(splits_input=True),
    "packed_colwise": Column(sections=2),
    "packed_rowwise": Row(),
    "embedding_rowwise": Vocabulary(),
    "replicated_with_grad_allreduce": PartialGradient(),
    "replicate": None,
    "moe_tp_experts": InsideExperts(),
}

# Further names in the records of families (parallel/families.py).
_OWN_STYLES: Mapping[str, Style] = {
    "colwise_by_projection": Column(square=True),
    "embedding_colwise": EmbeddingColumns(),
    "torch_attention": TorchAttention(),
    "alibi_heads": AlibiHeads(),
    "colwise_shared_keys": SharedKeys(),
    "rowwise_for_parts": InnerRow(),
    "channels": Channels(),
    "state_space": StateSpace(),
}


@dataclass
class Resolved:
    """The plan of a model: a style by the name of each module that has one, and attributes to change by the
    name of a module and their own.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    divided: list[tuple[str, str]] = field(default_factory=list)
    around: dict[str, str] = field(default_factory=dict)  # part of an adapted module -> the module, by name
    settings: list[tuple[str, str, Any]] = field(default_factory=list)


def resolve(
    model: nn.Module,
    plan: str | Mapping[str, Style | str],
    *,
    gather_logits: bool,
    whole_experts: bool = False,
) -> Resolved:
    """Resolve ``plan`` for ``model``. A plan is a mapping of names, with ``*`` for one part of a name, to
    styles; or ``"auto"``: transformers' own plan if the model has one, rules for known classes, and the
    vocabulary of embedding and head. ``whole_experts``: that plan cuts no experts.

    Raises:
        ConfigError: a name matches no module, a style is unknown, or ``"auto"`` finds nothing to cut.
    """
    if isinstance(plan, str):
        if plan != "auto":
            raise ConfigError(f"plan is {plan!r}; give 'auto' or a mapping of names to styles")
        found = _automatic(model, gather_logits=gather_logits)
        if whole_experts:
            found.styles = {name: s for name, s in found.styles.items() if not isinstance(s, InsideExperts)}
        return found
    found = Resolved()
    _add_named(found, model, plan)
    _keep_heads_whole(found, model)
    _cut_by_head(found, model)
    _cut_adapters(found, model)
    return found


def _automatic(model: nn.Module, *, gather_logits: bool) -> Resolved:
    found = Resolved()
    planned: set[int] = set()
    for prefix, inner in (pretrained_in(model) or {"": model}).items():
        own = {f"{prefix}.{key}".lstrip("."): style for key, style in family_of(inner).plan.items()}
        own = {key: style for key, style in own.items() if _matching(model, key)}
        _add_named(found, model, own)
        planned |= {id(module) for module in inner.modules()} if own else set()
    _add_by_class(found, model, planned)
    if not found.styles:
        raise ConfigError(
            f"there is no plan for {type(model).__name__}, nor for any of its parts; pass plan=, for example "
            "{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}"
        )
    _add_vocabulary(found, model, gather_logits=gather_logits)
    _add_within(found, model)
    _keep_heads_whole(found, model)
    _cut_by_head(found, model)
    _cut_adapters(found, model)
    return found


def _add_named(found: Resolved, model: nn.Module, plan: Mapping[str, Style | str]) -> None:
    for pattern, style in plan.items():
        names = _matching(model, pattern)
        if not names:
            raise ConfigError(
                f"plan names {pattern!r}, but no module of {type(model).__name__} has such a name"
            )
        if isinstance(style, str):
            if style not in STYLES:
                raise ConfigError(
                    f"plan has {style!r} for {pattern!r}; the styles are {', '.join(STYLES)}, or an object "
                    "of gemini.parallel.tensor"
                )
            named = STYLES[style]
            if named is None:
                continue
            style = named
        found.styles.update(dict.fromkeys(names, style))


def _matching(model: nn.Module, pattern: str) -> list[str]:
    parts = (re.escape(part).replace(r"\*", r"[^.]+") for part in pattern.split("."))
    regular = re.compile(r"\.".join(parts))
    return [name for name, _ in model.named_modules() if regular.fullmatch(name)]


def _add_within(found: Resolved, model: nn.Module) -> None:
    """Sum the gradients of known modules that are whole on all ranks but compute with a rank's part."""
    for name, module in model.named_modules():
        for child in partial_children(module):
            inner = getattr(module, child, None)
            if isinstance(inner, nn.Module) and next(inner.parameters(), None) is not None:
                found.styles.setdefault(f"{name}.{child}", PartialGradient())


def _add_by_class(found: Resolved, model: nn.Module, planned: Collection[int]) -> None:
    """Add the rules for known classes, except for modules that are ``planned``, by their identities."""
    for name, module in model.named_modules():
        rule = None if id(module) in planned else rule_of(module)
        if rule is None:
            continue
        if rule.own:
            found.styles[name] = style_of(rule.own)
        prefix = f"{name}." if name else ""
        for child, style in rule.children.items():
            if isinstance(getattr(module, child, None), nn.Module):
                found.styles[prefix + child] = style_of(style)
        found.divided += [(name, key) for key in rule.divided if hasattr(module, key)]
        found.settings += [(name, key, value) for key, value in rule.settings.items()]


def style_of(name: str) -> Style:
    """Return the style with the name that a record uses."""
    style = _OWN_STYLES.get(name) or STYLES[name]
    assert style is not None, name
    return style


def _add_vocabulary(found: Resolved, model: nn.Module, *, gather_logits: bool) -> None:
    """Cut the vocabulary: transformers' input and output embeddings, and modules tied to them."""
    models = list(pretrained_in(model).values()) or [model]
    getters = ("get_input_embeddings", "get_output_embeddings")
    ends = [_asked(each, getter) for each in models for getter in getters]
    weights = {id(end.weight) for end in ends if isinstance(end, nn.Embedding | nn.Linear)}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and id(module.weight) in weights:
            found.styles[name] = Vocabulary()
        elif isinstance(module, nn.Linear) and id(module.weight) in weights:
            found.styles[name] = Head(gathers=gather_logits)


def _cut_adapters(found: Resolved, model: nn.Module) -> None:
    """Cut LoRA layers together with the layers that they adapt.

    A layer W becomes W + B A. For a column layer A is whole and B is cut by outputs like W; for a row layer A
    is cut by inputs like W, and B is whole. The additional traffic has the width of A.

    Raises:
        ConfigError: there are adapters of another kind.
    """
    kinds = [str(getattr(config, "peft_type", "")) for config in getattr(model, "peft_config", {}).values()]
    if any("PREFIX" in kind for kind in kinds):
        raise ConfigError(
            "prefix tuning gives each attention keys and values of all heads, but a rank has only its own "
            "heads; use LoRA or prompt tuning, or leave tp_size at 1"
        )
    for name, style in list(found.styles.items()):
        parts = _styles_of_adapted(name, model.get_submodule(name), style)
        if parts is not None:
            del found.styles[name]
            found.styles |= parts
            found.around |= dict.fromkeys(parts, name)


def _styles_of_adapted(name: str, layer: nn.Module, style: Style) -> dict[str, Style] | None:
    """Return the styles of the parts of ``layer``, by name, if PEFT wrapped it around the module that
    ``style`` was for; else None.

    Raises:
        ConfigError: its adapters are of another kind than LoRA.
    """
    adapted: Any = layer
    base = getattr(adapted, "base_layer", None)
    if not isinstance(base, nn.Module):
        return None
    kinds = {kind for kind in getattr(adapted, "adapter_layer_names", ()) if len(getattr(adapted, kind, ()))}
    others = sorted(kinds - {"lora_A", "lora_B"})
    if others:
        raise ConfigError(
            f"adapters of {', '.join(others)} cannot be cut; use LoRA around linear layers, without DoRA, or "
            "leave tp_size at 1"
        )
    if isinstance(style, Column) and style.square:
        style = style.as_sections(base)
    found: dict[str, Style] = {f"{name}.base_layer": style}
    if isinstance(style, Column | Head | SharedKeys):
        found |= {f"{name}.lora_B.{key}": style for key in getattr(adapted, "lora_B", ())}
    elif isinstance(style, Row):
        found |= {f"{name}.lora_A.{key}": style for key in getattr(adapted, "lora_A", ())}
    else:
        raise ConfigError(
            f"LoRA around a layer of the style {type(style).__name__} cannot be cut; adapt other layers"
        )
    return found


def _asked(model: nn.Module, getter: str) -> nn.Module | None:
    method = getattr(model, getter, None)
    if method is None:
        return None
    try:
        found: nn.Module | None = method()
    except NotImplementedError:  # transformers: a model without one
        return None
    return found


def _keep_heads_whole(found: Resolved, model: nn.Module) -> None:
    """Cut the projections of attention only between heads."""
    for name, style in found.styles.items():
        around = model.get_submodule(name.rpartition(".")[0])
        unit = head_numel(around)
        if unit > 1 and isinstance(style, Column) and style.unit == 1:
            shares = shares_heads(around, name.rpartition(".")[2])
            found.styles[name] = replace(style, unit=unit, repeats=shares)
        elif unit > 1 and isinstance(style, SharedKeys):
            found.styles[name] = SharedKeys(unit)
        elif unit > 1 and isinstance(style, Row) and style.unit == 1:
            found.styles[name] = Row(style.splits_input, unit)


def _cut_by_head(found: Resolved, model: nn.Module) -> None:
    """Cut modules that have one row of parameters per head beside a projection cut between heads, such as the
    norms of queries and keys of some models. Torch's own norms are left out: they normalize over all heads.
    """
    for name, style in list(found.styles.items()):
        if not isinstance(style, Column) or style.unit == 1:
            continue
        weight = getattr(model.get_submodule(name), "weight", None)
        if not isinstance(weight, torch.Tensor):
            continue
        prefix = name.rpartition(".")[0]
        rows = (weight.shape[0] // style.unit, style.unit)
        for child, module in model.get_submodule(prefix).named_children():
            shapes = {tuple(param.shape) for param in module.parameters()}
            if shapes == {rows} and not isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
                found.styles.setdefault(f"{prefix}.{child}".lstrip("."), PerHead(style.repeats))
