"""Model families: one record holds everything that the strategies know about a family of models.

A strategy (tensor, sequence, pipeline) asks the record and never tests for the name of a model. The strategy
decides what it refuses, and words the refusal. ``FAMILIES`` lists the facts that only an author can know.
:func:`family_of` adds those that a model tells by its configuration, its modules or its signature. A new
family is one entry in ``FAMILIES`` and one row in ``tests/parallel/families.py``.

Styles of layers have names here, those of transformers' own plans among them. ``parallel/tensor/plan.py``
says what each of them does, so a record imports no strategy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Rule:
    """How tensor parallelism cuts a module: the names of styles.

    Attributes:
        children: the style of each child, by the child's name.
        divided: attributes that count heads or features, of one rank after the cut.
        own: the style of the module itself, "" for none.
        settings: attributes that get another value.
    """

    children: Mapping[str, str] = field(default_factory=dict)
    divided: tuple[str, ...] = ()
    own: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sublayers:
    """The children of a block that take the whole sequence, up to a row layer, and the norms between them."""

    entries: tuple[str, ...]
    norms: tuple[str, ...]


class Positions(Enum):
    """Where a model takes the positions of tokens from, if it is not given ``position_ids``."""

    COUNTED = "all tokens are counted"
    COUNTED_IN_MASK = "tokens that the mask shows are counted"
    OF_TOKENS = "made from the tokens: those that are padding do not count"
    OF_LENGTH = "made from the length of the input; there is no argument for them"


class Loss(Enum):
    """How a model takes the loss that it returns."""

    CAUSAL = "of the next token, by a function that can be replaced"
    WHOLE_SEQUENCE = "of a whole sequence: one class, one answer, one choice"
    OWN = "in its forward pass, or not at all"


@dataclass(frozen=True)
class Family:
    """What is known of a model, or of all models of a family.

    The record says:
        model_types: as ``config.model_type`` has them.
        modules: by the name of a class, the rule of its modules, or a function from a module to its rule.
            They hold for every model that is made of such modules.
        partial: by the name of a class, children that stay whole inside a cut module and compute with a part
            of its features, for modules that transformers' own plan cuts.
        sublayers: by the name of a block's class, where its norms are.
        documents_in_mask: ``position_ids`` that begin again at 0 hide earlier documents from later ones.
        scales_by_position: attention is scaled by positions that the model counts by itself.

    The model says, and :func:`family_of` reads:
        plan: its own plan, names of modules to names of styles.
        mixes_tokens: what computes with neighbouring tokens and is no attention, in words; "" for nothing.
        router_loss: the class that adds a loss of the routers of all layers; "" for none.
        random_depth: the chance to leave out a layer, by the name of the module that draws.
        rotates_by_length: the kind of rotation that depends on the length of the input; "" for none.
        replaceable_attention: attention is a function in transformers' registry.
        two_sequences: there is an encoder's and a decoder's.
        other_tokens: images or sounds stand between the tokens.
        looks_back_only: all attention is causal.
        has_windows: some layers look back over a part of the sequence only.
    """

    name: str = "unknown"
    model_types: tuple[str, ...] = ()
    modules: Mapping[str, Rule | Callable[[Any], Rule]] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sublayers: Mapping[str, Sublayers] = field(default_factory=dict)
    positions: Positions = Positions.COUNTED
    documents_in_mask: bool = True
    scales_by_position: bool = False

    plan: Mapping[str, str] = field(default_factory=dict)
    loss: Loss = Loss.OWN
    mixes_tokens: str = ""
    router_loss: str = ""
    random_depth: Mapping[str, float] = field(default_factory=dict)
    rotates_by_length: str = ""
    replaceable_attention: bool = False
    two_sequences: bool = False
    other_tokens: bool = False
    looks_back_only: bool = False
    has_windows: bool = False


# -- rules that several families share ---------------------------------------------------------------


def _attention(*, out: str | None, divided: tuple[str, ...], inputs: tuple[str, ...]) -> Rule:
    children = dict.fromkeys(inputs, "colwise")
    if out is not None:
        children[out] = "rowwise"
    return Rule(children, divided)


def _mlp(column: str, row: str) -> Rule:
    return Rule({column: "colwise", row: "rowwise"})


_QKV = ("q_proj", "k_proj", "v_proj")
_LLAMA_NORMS = Sublayers(("self_attn", "mlp"), ("input_layernorm", "post_attention_layernorm"))


def _bert(name: str) -> Mapping[str, Rule]:
    return {
        f"{name}SelfAttention": _attention(
            out=None, divided=("num_attention_heads", "all_head_size"), inputs=("query", "key", "value")
        ),
        f"{name}SelfOutput": Rule({"dense": "rowwise"}),
        f"{name}Intermediate": Rule({"dense": "colwise"}),
        f"{name}Output": Rule({"dense": "rowwise"}),
    }


def _like_bart(name: str, model_type: str) -> Family:
    return Family(
        model_type,
        (model_type,),
        {
            f"{name}Attention": _attention(out="out_proj", divided=("num_heads",), inputs=_QKV),
            f"{name}EncoderLayer": _mlp("fc1", "fc2"),
            f"{name}DecoderLayer": _mlp("fc1", "fc2"),
        },
    )


def _falcon_attention(attention: Any) -> Rule:
    """Return the rule of a ``FalconAttention``. Its fused projection has the heads of a group side by side:
    query heads, then a key and a value head. Multi-query attention is one group, which ranks share."""
    is_one_group = attention.multi_query and not attention.new_decoder_architecture
    return Rule(
        {"query_key_value": "colwise_shared_keys" if is_one_group else "colwise", "dense": "rowwise"},
        ("num_heads",) if is_one_group else ("num_heads", "num_kv_heads"),
        "alibi_heads",
    )


_STATE_SPACE = Rule(
    {
        "in_proj": "packed_colwise",  # the input of the state space, and its gate
        "conv1d": "channels",
        "x_proj": "rowwise_for_parts",  # to the time step, B and C, which all channels share
        "dt_proj": "channels",
        "out_proj": "rowwise",
    },
    ("intermediate_size",),
    "state_space",
)


# -- the records -------------------------------------------------------------------------------------

FAMILIES: tuple[Family, ...] = (
    Family("llama", ("llama",), sublayers={"LlamaDecoderLayer": _LLAMA_NORMS}),
    Family("qwen3", ("qwen3",), sublayers={"Qwen3DecoderLayer": _LLAMA_NORMS}),
    Family(
        "gpt2",
        ("gpt2",),
        {
            "GPT2Attention": Rule(
                {"c_attn": "colwise_by_projection", "q_attn": "colwise", "c_proj": "rowwise"},
                ("num_heads", "split_size"),
            ),
            "GPT2MLP": _mlp("c_fc", "c_proj"),
        },
        sublayers={"GPT2Block": Sublayers(("attn", "mlp"), ("ln_1", "ln_2"))},
    ),
    Family("llama4", ("llama4", "llama4_text"), scales_by_position=True),
    Family("apertus", ("apertus",), partial={"ApertusMLP": ("act_fn",)}),
    Family("phi", ("phi",), partial={"PhiAttention": ("q_layernorm", "k_layernorm")}),
    Family("bert", ("bert",), _bert("Bert"), documents_in_mask=False),
    Family("roberta", ("roberta",), _bert("Roberta"), documents_in_mask=False),
    Family("electra", ("electra",), documents_in_mask=False),
    Family("esm", ("esm",), positions=Positions.OF_TOKENS),
    Family(
        "albert",
        ("albert",),
        {
            "AlbertAttention": _attention(
                out="dense",
                divided=("num_attention_heads", "all_head_size"),
                inputs=("query", "key", "value"),
            ),
            "AlbertLayer": _mlp("ffn", "ffn_output"),
        },
    ),
    Family(
        "bloom",
        ("bloom",),
        {
            # Query, key and value of a head lie side by side.
            "BloomAttention": Rule(
                {"query_key_value": "colwise", "dense": "rowwise"}, ("num_heads",), "alibi_heads"
            ),
            "BloomMLP": _mlp("dense_h_to_4h", "dense_4h_to_h"),
        },
    ),
    Family(
        "falcon",
        ("falcon",),
        {
            "FalconAttention": _falcon_attention,
            "FalconFlashAttention2": _falcon_attention,
            "FalconMLP": _mlp("dense_h_to_4h", "dense_4h_to_h"),
        },
    ),
    Family("mamba", ("mamba",), {"MambaMixer": _STATE_SPACE}),
    Family("falcon_mamba", ("falcon_mamba",), {"FalconMambaMixer": _STATE_SPACE}),
    Family(
        "opt",
        ("opt",),
        {
            "OPTAttention": _attention(out="out_proj", divided=("num_heads",), inputs=_QKV),
            "OPTDecoderLayer": _mlp("fc1", "fc2"),
        },
        positions=Positions.COUNTED_IN_MASK,
        documents_in_mask=False,
    ),
    Family(
        "t5",
        ("t5",),
        {
            "T5Attention": Rule(
                {
                    **dict.fromkeys(("q", "k", "v"), "colwise"),
                    "o": "rowwise",
                    "relative_attention_bias": "embedding_colwise",
                },
                ("n_heads", "inner_dim"),
            ),
            "T5DenseActDense": _mlp("wi", "wo"),
            "T5DenseGatedActDense": Rule({"wi_0": "colwise", "wi_1": "colwise", "wo": "rowwise"}),
        },
    ),
    Family(
        "vit",
        ("vit",),
        {
            "ViTAttention": _attention(out="o_proj", divided=("num_attention_heads",), inputs=_QKV),
            "ViTMLP": _mlp("fc1", "fc2"),
        },
    ),
    _like_bart("Whisper", "whisper"),
    _like_bart("Bart", "bart"),
    _like_bart("MBart", "mbart"),
    _like_bart("PLBart", "plbart"),
    _like_bart("Pegasus", "pegasus"),
    _like_bart("Marian", "marian"),
    _like_bart("Blenderbot", "blenderbot"),
    _like_bart("M2M100", "m2m_100"),
    Family(
        "torch",
        modules={
            "TransformerEncoder": Rule(settings={"use_nested_tensor": False}),
            "TransformerEncoderLayer": _mlp("linear1", "linear2"),
            "TransformerDecoderLayer": _mlp("linear1", "linear2"),
            "MultiheadAttention": Rule(own="torch_attention"),
        },
        sublayers={"TransformerEncoderLayer": Sublayers(("self_attn", "linear1"), ("norm1", "norm2"))},
    ),
)

_RULES = {kind: rule for family in FAMILIES for kind, rule in family.modules.items()}
_PARTIAL = {kind: children for family in FAMILIES for kind, children in family.partial.items()}
SUBLAYERS: Mapping[str, Sublayers] = {
    kind: found for family in FAMILIES for kind, found in family.sublayers.items()
}


def rule_of(module: nn.Module) -> Rule | None:
    """Return the rule by which tensor parallelism cuts ``module``, None for none."""
    found = _RULES.get(type(module).__name__)
    return found if found is None or isinstance(found, Rule) else found(module)


def partial_children(module: nn.Module) -> tuple[str, ...]:
    """Return the names of children that stay whole and compute with a part of what ``module`` computes."""
    return _PARTIAL.get(type(module).__name__, ())


# -- what modules of transformers call their parts -----------------------------------------------------

GROUPS = "num_key_value_groups"  # how many query heads share a key head
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
_OF_KEYS = ("k_proj", "v_proj")


def head_numel(attention: nn.Module) -> int:
    """Return how many features a head of ``attention`` has; 1 if it does not say."""
    sizes = (getattr(attention, key, None) for key in _HEAD_SIZES)
    return next((size for size in sizes if isinstance(size, int)), 1)


def shares_heads(attention: nn.Module, child: str) -> bool:
    """Say whether several query heads use a head that ``child`` of ``attention`` computes."""
    return child in _OF_KEYS and hasattr(attention, GROUPS)


# -- what a model says -------------------------------------------------------------------------------

_ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_WINDOWS = ("sliding_attention", "chunked_attention")
_ROTATIONS_BY_LENGTH = ("dynamic", "longrope")
_CLASSES_OF_SEQUENCES = (
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForPreTraining",
)


def family_of(model: nn.Module) -> Family:
    """Return the record of the family of ``model``, with what this model says of itself. A model of an
    unknown family has the record that says nothing."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    record = next((family for family in FAMILIES if model_type in family.model_types), Family())
    rotations = [getattr(module, "rope_type", None) for module in model.modules()]
    causal = [bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")]
    return replace(
        record,
        plan=getattr(model, "_tp_plan", None) or {},
        positions=_positions_of(model, record.positions),
        loss=_loss_of(model),
        mixes_tokens=_mixing_in(model),
        router_loss=_router_loss_in(model),
        random_depth=_random_depth_in(model),
        rotates_by_length=next((kind for kind in _ROTATIONS_BY_LENGTH if kind in rotations), ""),
        replaceable_attention=bool(getattr(model, "_supports_attention_backend", False)),
        two_sequences=bool(getattr(config, "is_encoder_decoder", False)),
        other_tokens=hasattr(config, "vision_config") or hasattr(config, "audio_config"),
        looks_back_only=bool(causal) and all(causal),
        has_windows=_has_windows(config),
    )


def _positions_of(model: nn.Module, known: Positions) -> Positions:
    if not hasattr(model, "config"):
        return known
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return Positions.OF_LENGTH
    makes_them = any(hasattr(each, "create_position_ids_from_input_ids") for each in model.modules())
    return Positions.OF_TOKENS if makes_them else known


def _loss_of(model: nn.Module) -> Loss:
    if type(model).__name__.endswith(_CLASSES_OF_SEQUENCES):
        return Loss.WHOLE_SEQUENCE
    replaceable = isinstance(getattr(type(model), "loss_function", None), property)
    is_causal = getattr(model, "loss_type", None) in (None, "ForCausalLM")
    two_sequences = getattr(
        getattr(model, "config", None), "is_encoder_decoder", False
    )  # labels do not shift
    return Loss.CAUSAL if replaceable and is_causal and not two_sequences else Loss.OWN


def _mixing_in(model: nn.Module) -> str:
    for module in model.modules():
        kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
        others = [kind for kind in kinds if kind not in _ATTENTIONS]
        if others:
            return f"layers of type {others[0]!r}"
    for name, module in model.named_modules():
        is_in_block = any(part.isdigit() for part in name.split("."))
        is_wide = isinstance(module, nn.Conv1d) and max(module.kernel_size) > 1
        if is_in_block and (is_wide or isinstance(module, nn.RNNBase)):
            return f"{name}, a {type(module).__name__}"
    return ""


def _router_loss_in(model: nn.Module) -> str:
    for module in model.modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            return type(module).__name__
    return ""


def _random_depth_in(model: nn.Module) -> dict[str, float]:
    """Return transformers' ``layerdrop`` of each module that has one, or has it in its configuration."""
    found = {}
    for name, module in model.named_modules():
        chance = getattr(module, "layerdrop", None)
        chance = chance or getattr(getattr(module, "config", None), "layerdrop", 0)
        if isinstance(chance, float) and chance > 0:
            found[name] = chance
    return found


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind in _WINDOWS for kind in kinds)
    return getattr(config, "sliding_window", None) is not None
