"""The model families that can be exported to GGUF: their hyperparameters, and how their tensors differ from
transformers'."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini.errors import ConfigError, InputError

# Buffers that transformers once saved.
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(.+)")


@dataclass(frozen=True)
class Experts:
    """How the config of a mixture describes its experts.

    ``inner``: the key of an expert's width; None: that of the model's. ``normalizes``: the key that says
    whether the weights of a token's experts sum to one, as llama.cpp has it; None: they always do.
    """

    inner: str | None = None
    normalizes: str | None = None


@dataclass(frozen=True)
class Architecture:
    """A model family.

    Attributes:
        name: its name in GGUF.
        sizes, epsilon: keys of its config.
        pairs_rows: GGUF rotates queries and keys in pairs of neighbouring rows; transformers rotates halves.
        transposed: suffixes of weights that transformers stores transposed.
        lacks: suffixes of tensors that llama.cpp does not support for this family.
        activations: supported activations; the first is the default.
        experts: how the config describes them, if the family is a mixture of experts.
    """

    name: str
    sizes: Mapping[str, str]
    epsilon: str
    pairs_rows: bool = False
    is_rotary: bool = True
    transposed: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    activations: tuple[str, ...] = ("silu",)
    experts: Experts | None = None


_SIZES = {
    "context": "max_position_embeddings",
    "width": "hidden_size",
    "blocks": "num_hidden_layers",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
}
_GPT2_SIZES = {"context": "n_positions", "width": "n_embd", "blocks": "n_layer", "heads": "n_head"}
_RMS = "rms_norm_eps"
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _SIZES, _RMS, pairs_rows=True),
    "MistralForCausalLM": Architecture("llama", _SIZES, _RMS, pairs_rows=True),
    "MixtralForCausalLM": Architecture("llama", _SIZES, _RMS, pairs_rows=True, experts=Experts()),
    "Qwen2ForCausalLM": Architecture("qwen2", _SIZES, _RMS),
    "Qwen3ForCausalLM": Architecture("qwen3", _SIZES, _RMS, lacks=("_proj.bias",)),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe",
        _SIZES,
        _RMS,
        lacks=("_proj.bias",),
        experts=Experts(inner="moe_intermediate_size", normalizes="norm_topk_prob"),
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        _GPT2_SIZES,
        "layer_norm_epsilon",
        is_rotary=False,
        transposed=("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"),
        activations=("gelu_new",),
    ),
}


class ModelShape:
    """The hyperparameters of a model's config in GGUF's terms.

    Raises:
        ConfigError: the model cannot be exported to GGUF, or one of its options is not supported there.
    """

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._config, self._path = config, path
        named = config.get("architectures")
        name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else "none"
        if name not in ARCHITECTURES:
            raise ConfigError(
                f"{path} is a {name:.80}, which gemini cannot export to GGUF; supported are "
                f"{', '.join(ARCHITECTURES)}. For other models use convert_hf_to_gguf.py of llama.cpp"
            )
        self.architecture = ARCHITECTURES[name]
        self._check_options()
        self.vocabulary = self._size("vocab_size")
        self.width = self._size(self.architecture.sizes["width"])
        self.blocks = self._size(self.architecture.sizes["blocks"])
        self.heads = self._size(self.architecture.sizes["heads"])
        self.kv_heads = self._size("num_key_value_heads", self.heads)
        self.head_size = self._size("head_dim", self.width // self.heads)
        if self.heads % self.kv_heads or self.head_size % 2:
            raise InputError(
                f"{path}: {self.heads} heads of size {self.head_size} do not go with {self.kv_heads} "
                "key heads; correct config.json"
            )
        # Counts of experts, and of those that a token uses, and their width; 0 without experts.
        self.experts, self.used_experts, self.expert_inner = self._expert_sizes()
        window = config.get("sliding_window")
        context = self._size(self.architecture.sizes["context"])
        # GGUF has no window for these families. Up to the length of the window it makes no difference, so
        # the window becomes the limit of the context.
        self.context = min(context, window) if type(window) is int and self._has_window else context

    def add_to(self, writer: Any) -> None:
        """Add the hyperparameters to a GGUFWriter."""
        inner = self.architecture.sizes.get("inner")
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.width)
        writer.add_block_count(self.blocks)
        writer.add_feed_forward_length(self._size(inner) if inner else self._size("n_inner", 4 * self.width))
        writer.add_head_count(self.heads)
        writer.add_vocab_size(self.vocabulary)
        if self.architecture.experts is not None:
            writer.add_expert_count(self.experts)
            writer.add_expert_used_count(self.used_experts)
            writer.add_expert_feed_forward_length(self.expert_inner)
        if not self.architecture.is_rotary:
            writer.add_layer_norm_eps(self._number(self.architecture.epsilon))
            return
        writer.add_layer_norm_rms_eps(self._number(self.architecture.epsilon))
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(self._theta)
        rope = self._rope
        if self._rope_type == "linear":
            from gguf import RopeScalingType

            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(_positive(rope.get("factor"), "rope factor", self._path))

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor belongs in the GGUF file."""
        return not name.endswith(_NOT_WEIGHTS)

    def has_place_for(self, name: str) -> bool:
        """Return whether llama.cpp supports this tensor for the family."""
        return not (self.architecture.lacks and name.endswith(self.architecture.lacks))

    def expert_of(self, name: str) -> tuple[str, int] | None:
        """Return the name that the matrices of all experts have together, and the number of the expert that
        ``name`` belongs to; None if it belongs to none."""
        found = _EXPERT.fullmatch(name) if self.experts else None
        return (f"{found[1]}.{found[3]}", int(found[2])) if found else None

    def rearranged(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor in GGUF's order of rows and dimensions."""
        if name.endswith(self.architecture.transposed or "\0"):
            return values.t()
        if self.architecture.pairs_rows:
            if name.endswith((".q_proj.weight", ".q_proj.bias")):
                return self._paired(values, self.heads)
            if name.endswith((".k_proj.weight", ".k_proj.bias")):
                return self._paired(values, self.kv_heads)
        return values

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of :meth:`rearranged`."""
        return shape[::-1] if name.endswith(self.architecture.transposed or "\0") else shape

    def rope_factors(self) -> torch.Tensor | None:
        """Return the divisors of the rope frequencies for Llama 3.1 and later; None for other models."""
        if self._rope_type != "llama3":
            return None
        said = {
            key: _positive(self._rope.get(key), key, self._path)
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        }
        factor, low, high = said["factor"], said["low_freq_factor"], said["high_freq_factor"]
        before = said["original_max_position_embeddings"]
        found = []
        for place in range(0, self.head_size, 2):
            wavelength = 2 * math.pi * self._theta ** (place / self.head_size)
            share = (before / wavelength - low) / (high - low)  # 0: divided by the factor, 1: unchanged
            share = min(1.0, max(0.0, share))
            found.append(1 / ((1 - share) / factor + share))
        return torch.tensor(found, dtype=torch.float32, device="cpu")

    def _paired(self, values: torch.Tensor, heads: int) -> torch.Tensor:
        """Reorder rows such that rows that are rotated together are neighbours."""
        rest = values.shape[1:]
        return values.reshape(heads, 2, self.head_size // 2, *rest).transpose(1, 2).reshape(values.shape)

    def _check_options(self) -> None:
        said = self._config
        activation = said.get("hidden_act", said.get("activation_function", self.architecture.activations[0]))
        if activation not in self.architecture.activations:
            raise self._unknown(f"the activation {activation!r}")
        if self.architecture.is_rotary:
            if self._rope_type not in ("default", "linear", "llama3"):
                raise self._unknown(f"rope of type {self._rope_type!r}")
            normalizes = self.architecture.experts and self.architecture.experts.normalizes
            if normalizes and said.get(normalizes) is not True:
                raise self._unknown(f"weights of experts that are not normalized ({normalizes} is not true)")
        elif said.get("scale_attn_by_inverse_layer_idx") or said.get("scale_attn_weights") is False:
            raise self._unknown("another scale of attention")

    def _expert_sizes(self) -> tuple[int, int, int]:
        experts = self.architecture.experts
        if experts is None:
            return 0, 0, 0
        count = self._size("num_experts" if "num_experts" in self._config else "num_local_experts")
        used = self._size("num_experts_per_tok")
        if used > count:
            raise InputError(
                f"{self._path}: num_experts_per_tok is {used}, of {count} experts; correct config.json"
            )
        return count, used, self._size(experts.inner or self.architecture.sizes["inner"])

    @property
    def is_tied(self) -> bool:
        """Whether the output may be the embeddings. If the config does not say, the model's class decides."""
        return self._config.get("tie_word_embeddings") is not False

    @property
    def _has_window(self) -> bool:
        """Whether the model uses its ``sliding_window``; Qwen's configs have one that is not used."""
        return self._config.get("use_sliding_window", True) is not False

    @property
    def _rope(self) -> Mapping[str, Any]:
        found = self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}
        return found if isinstance(found, dict) else {}

    @property
    def _rope_type(self) -> str:
        return str(self._rope.get("rope_type", self._rope.get("type", "default")))

    @property
    def _theta(self) -> float:
        said = self._rope.get("rope_theta", self._config.get("rope_theta", 10000.0))
        return _positive(said, "rope_theta", self._path)

    def _size(self, key: str, default: int | None = None) -> int:
        found = self._config.get(key)
        found = default if found is None else found
        if type(found) is not int or not 0 < found < 2**31:
            raise InputError(f"{self._path}: {key} is {found!r:.50}, not a size; correct config.json")
        return found

    def _number(self, key: str) -> float:
        return _positive(self._config.get(key), key, self._path)

    def _unknown(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._path} has {what}, which GGUF does not support for {self.architecture.name!r}"
        )


def _positive(value: Any, key: str, path: Path) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InputError(f"{path}: {key} is {value!r:.50}, not a positive number; correct config.json")
    return float(value)
