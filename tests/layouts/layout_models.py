"""Small models of the campaign over layouts: how each is built, its batches and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 67  # which nothing divides
IGNORED = -100
_TEXT = {
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
_HEADS = {**_TEXT, **_LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 64}
_WINDOWS = {**_HEADS, "head_dim": 8, "sliding_window": 6}
_NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
_EXPERTS = {**_HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_HALVES = {
    **_TEXT,
    **{f"{half}_{name}": 2 for half in ("encoder", "decoder") for name in ("layers",)},
    **{f"{half}_{name}": 48 for half in ("encoder", "decoder") for name in ("ffn_dim",)},
    **{f"{half}_{name}": 4 for half in ("encoder", "decoder") for name in ("attention_heads",)},
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    "d_model": 32,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Subject:
    """A model: its class in transformers (none: :class:`Own`) and its configuration. ``inputs`` says what its
    batches are; ``adapted``: the layers beside which LoRA is put."""

    build: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "causal"
    adapted: tuple[str, ...] = ()
    experts: bool = False
    ties: bool = True  # whether its head may share the embedding's weight

    @property
    def is_own(self) -> bool:
        return not self.build


_QV = ("q_proj", "v_proj")
SUBJECTS: dict[str, Subject] = {
    "llama": Subject("LlamaForCausalLM", _HEADS, adapted=_QV),
    "qwen2": Subject("Qwen2ForCausalLM", _HEADS, adapted=_QV),
    "qwen3": Subject("Qwen3ForCausalLM", {**_HEADS, "head_dim": 8}, adapted=("q_proj", "up_proj")),
    "mistral": Subject("MistralForCausalLM", _WINDOWS, adapted=_QV),
    "gemma2": Subject("Gemma2ForCausalLM", _WINDOWS),
    "gemma3": Subject("Gemma3ForCausalLM", _WINDOWS),
    "gpt2": Subject(
        "GPT2LMHeadModel",
        {
            **_TEXT,
            **{"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 64},
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        },
        adapted=("c_attn",),
    ),
    "opt": Subject(
        "OPTForCausalLM", {**_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, adapted=_QV
    ),
    "falcon": Subject(
        "FalconForCausalLM",
        {**_HEADS, "new_decoder_architecture": True, "num_kv_heads": 2, "hidden_dropout": 0.0},
    ),
    "bloom": Subject("BloomForCausalLM", {**_TEXT, "hidden_size": 32, "n_head": 4, "n_layer": 4}),
    "gpt_neox": Subject("GPTNeoXForCausalLM", _HEADS),
    "mixtral": Subject("MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4}, experts=True),
    "qwen3_moe": Subject("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "head_dim": 8}, experts=True),
    "deepseek_v3": Subject(
        "DeepseekV3ForCausalLM",
        {
            **_EXPERTS,
            **_LATENT,
            **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
            **{"n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
        },
        experts=True,
    ),
    "gpt_oss": Subject("GptOssForCausalLM", {**_EXPERTS, **_WINDOWS, "num_local_experts": 4}, experts=True),
    "bert": Subject("BertForMaskedLM", {**_TEXT, **_LAYERS, **_NO_DROPOUT}, "masked"),
    "t5": Subject(
        "T5ForConditionalGeneration",
        {
            **_TEXT,
            **{"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "dropout_rate": 0.0},
            "decoder_start_token_id": 0,
        },
        "translation",
    ),
    "bart": Subject("BartForConditionalGeneration", _HALVES, "translation"),
    "vit": Subject(
        "ViTForImageClassification",
        {**_LAYERS, **_NO_DROPOUT, "image_size": 16, "patch_size": 8, "num_labels": 5},
        "images",
        ties=False,
    ),
    "own": Subject("", inputs="own"),
}
# The tensor-parallel plan of :class:`Own`.
OWN_PLAN = {
    "tokens": "embedding_rowwise",
    **{f"blocks.*.{name}": "colwise" for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
    "head": "colwise_gather_output",
}


class _Block(nn.Module):
    """Attention that looks back, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        layers = (self.query, self.key, self.value)
        heads = (layer(normed).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in layers)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.between(x))))
        return out


class Own(nn.Module):
    """A program's own language model, which returns logits; its labels are at their tokens."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def built(
    name: str, *, tied: bool = False, lora: bool = False, frozen: str = "", seed: int = 13
) -> nn.Module:
    """Return a model with the values of ``seed``, biases and norms among them: as zeros and ones they would
    hide mistakes. ``frozen``: a part that does not train, ``"embedding"`` or the first half of the
    ``"blocks"``."""
    import transformers

    subject = SUBJECTS[name]
    torch.manual_seed(seed)
    if subject.is_own:
        model: nn.Module = Own(tied=tied)
    else:
        kind = getattr(transformers, subject.build)
        options = {**subject.options, "tie_word_embeddings": tied} if subject.ties else subject.options
        model = kind(_configuration(kind)(**options))
    if lora:
        import peft

        config = peft.LoraConfig(r=4, target_modules=list(subject.adapted), init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed + index)))
    for part in _frozen(model, frozen):
        part.requires_grad_(False)
    return model.train()


def _configuration(kind: Any) -> Any:
    import transformers

    return transformers.Gemma3TextConfig if kind.__name__ == "Gemma3ForCausalLM" else kind.config_class


def _frozen(model: nn.Module, which: str) -> list[nn.Module]:
    if which == "embedding":
        return [next(part for part in model.modules() if isinstance(part, nn.Embedding))]
    if which == "blocks":
        names = block_names(model)
        return [model.get_submodule(name) for name in names[: len(names) // 2]]
    return []


def block_names(model: nn.Module) -> list[str]:
    """Return the names of the blocks: the members of the longest list."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    name, blocks = max(lists, key=lambda each: len(each[1]))
    return [f"{name}.{index}" for index in range(len(blocks))]


def batch_of(name: str, seed: int, rows: int, length: int, padding: str, ignores: bool) -> dict[str, Tensor]:
    """Return a batch of ``rows``. ``padding``: the side on which sequences are filled up; ``ignores``: some
    labels do not count, besides those of padding. At least two of a row do."""
    generator = torch.Generator().manual_seed(seed)
    subject = SUBJECTS[name]
    if subject.inputs == "images":
        images = torch.randn(rows, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(5, (rows,), generator=generator)}
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    batch = {"input_ids": ids}
    seen = torch.ones_like(ids)
    if padding:
        for row in range(rows):
            fill = int(torch.randint(0, length // 2, (), generator=generator))
            where = slice(length - fill, None) if padding == "right" else slice(0, fill)
            seen[row, where] = 0
        ids[seen == 0] = 0
        batch["attention_mask"] = seen
    if subject.inputs == "translation":
        labels, counts = torch.randint(3, VOCABULARY, (rows, length - 2), generator=generator), None
    else:
        labels, counts = ids.clone(), seen
    if subject.inputs == "masked":
        labels = torch.randint(3, VOCABULARY, ids.shape, generator=generator)
    if counts is not None:
        labels[counts == 0] = IGNORED
    if ignores:
        left_out = torch.rand(labels.shape, generator=generator) < 0.4
        for row, each in enumerate(left_out):  # the last two that count, stay
            each[(labels[row] != IGNORED).nonzero().flatten()[-2:]] = False
        labels[left_out] = IGNORED
    batch["labels"] = labels
    if subject.is_own:
        batch["position_ids"] = torch.arange(length).repeat(rows, 1)
        batch.pop("attention_mask", None)
    return batch


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the labels that count: the criterion of all programs."""
    if isinstance(output, Tensor):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
    loss: Tensor = output.loss
    return loss


def labels_in(name: str, batch: dict[str, Tensor], *, shifted: bool) -> float:
    """Return how many labels of a batch count; ``shifted``: those of a causal model are at the tokens that
    predict them already, as in a part of a sequence."""
    labels = batch["labels"]
    if SUBJECTS[name].inputs == "causal" and not shifted:
        labels = labels[:, 1:]
    return float((labels != IGNORED).sum())


@cache
def parameter_bytes(name: str) -> int:
    """Return the bytes of the weights of a model."""
    return sum(param.numel() * 4 for param in built(name).parameters())
