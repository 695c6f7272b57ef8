"""Model families: one record holds all that the parallel strategies know about a family of models.

Tensor, sequence and pipeline parallelism ask the record and never test for the name of a model. The strategy
decides what it refuses, and words the refusal. ``FAMILIES`` lists the facts that only an author can know.
:func:`family_of` adds the facts that a model's configuration, modules or signature show. A new family is one
entry in ``FAMILIES`` and one row in ``tests/parallel/families.py``.

Records name the styles of layers, including those of transformers' own plans. ``parallel/tensor/plan.py``
defines each style, so a record imports no strategy.
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
        divided: the attributes that count heads or features; after the cut they count those of one rank.
        own: the style of the module itself, "" for none.
        settings: attributes to set, with their new values.
    """

    children: Mapping[str, str] = field(default_factory=dict)
    divided: tuple[str, ...] = ()
    own: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sublayers:
    """The children of a block that take the whole sequence and end in a row layer (``entries``), and the
    norms between them.
    """

    entries: tuple[str, ...]
    norms: tuple[str, ...]


class Positions(Enum):
    """How a model determines the positions of tokens if it gets no ``position_ids``."""

    COUNTED = "all tokens are counted"
    COUNTED_IN_MASK = "tokens that the mask shows are counted"
    OF_TOKENS = "made from the tokens: those that are padding do not count"
    OF_LENGTH = "made from the length of the input; there is no argument for them"


class Loss(Enum):
    """How a model computes the loss that it returns."""

    CAUSAL = "of the next token, by a function that can be replaced"
    WHOLE_SEQUENCE = "of a whole sequence: one class, one answer, one choice"
    OWN = "in its forward pass, or not at all"


@dataclass(frozen=True)
class Family:
    """The facts about one model or about all models of a family.

    Facts that the record lists:
        model_types: the values of ``config.model_type``.
        modules: by class name, the rule of a module, or a function from a module to its rule. They apply to
            every model that contains such modules.
        partial: by class name, the children that stay whole inside a cut module and compute with a part of
            its features; for modules that transformers' own plan cuts.
        sublayers: by the class name of a block, its sublayers and norms.
        documents_in_mask: ``position_ids`` that restart at 0 hide earlier documents from later ones.
        scales_by_position: the model counts positions itself and scales attention by them.

    Facts that :func:`family_of` reads from the model:
        plan: its own tensor-parallel plan, module names to style names.
        mixes_tokens: a layer that mixes neighbouring tokens outside attention, in words; "" for none.
        router_loss: the class that adds a loss over the routers of all layers; "" for none.
        random_depth: the probability of skipping a layer, by the name of the module that draws it.
        rotates_by_length: the kind of rotary embedding that depends on the input length; "" for none.
        replaceable_attention: attention is a function in transformers' registry.
        two_sequences: the model has an encoder's and a decoder's sequence.
        other_tokens: images or sounds stand between the tokens.
        looks_back_only: all attention is causal.
        has_windows: some layers attend to a part of the sequence only.
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
    """Return the rule of a ``FalconAttention``. Its fused projection stores the heads of a group side by
    side: query heads, then one key and one value head. Multi-query attention is one group, which ranks share.
    """
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
        "x_proj": "rowwise_for_parts",  # projects to the time step, B and C, which all channels share
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
    """Return the rule by which tensor parallelism cuts ``module``; None if it has none."""
    found = _RULES.get(type(module).__name__)
    return found if found is None or isinstance(found, Rule) else found(module)


def partial_children(module: nn.Module) -> tuple[str, ...]:
    """Return the names of children that stay whole and compute with a part of the features of ``module``."""
    return _PARTIAL.get(type(module).__name__, ())


# -- how modules of transformers name their parts -----------------------------------------------------

GROUPS = "num_key_value_groups"  # the number of query heads that share a key head
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
_OF_KEYS = ("k_proj", "v_proj")


def head_numel(attention: nn.Module) -> int:
    """Return the number of features of a head of ``attention``; 1 if it has no such attribute."""
    sizes = (getattr(attention, key, None) for key in _HEAD_SIZES)
    return next((size for size in sizes if isinstance(size, int)), 1)


def shares_heads(attention: nn.Module, child: str) -> bool:
    """Return whether several query heads share each head that ``child`` of ``attention`` computes."""
    return child in _OF_KEYS and hasattr(attention, GROUPS)


# -- facts read from a model -------------------------------------------------------------------------

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
    """Return the record of the family of ``model``, completed with the facts read from this model. A model of
    an unknown family gets a record that lists no facts.
    """
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
    )  # encoder-decoder models do not shift labels
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
    """Return transformers' ``layerdrop`` of each module that has it, itself or in its configuration."""
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
