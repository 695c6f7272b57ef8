"""Small models of the families that parallel/families.py knows: one row each.

A row computes and trains the same whole and cut (test_tensor_transformers.py). ``SAYS`` has what its record
says (test_families.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini.parallel.families import Loss, Positions

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 67  # which nothing divides
TEXT = {"vocab_size": VOCABULARY, "use_cache": False}
LLAMA = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BART = {
    **TEXT,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "max_position_embeddings": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
FALCON = {
    **TEXT,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {**TEXT, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3}
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **TEXT,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 16,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
            "resid_pdrop": 0,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama, tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "llama, one key head": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "num_key_value_heads": 1}),
    "qwen3, one key head": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**LLAMA, "head_dim": 8, "num_key_value_heads": 1, "attention_bias": True},
    ),
    **{
        f"cohere, norms by head, {heads} key heads": (
            "CohereForCausalLM",
            "CohereConfig",
            {
                **LLAMA,
                "use_qk_norm": True,
                "num_key_value_heads": heads,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        )
        for heads in (1, 2)
    },
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**BERT, "pad_token_id": 1}),
    "albert": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**BERT, "embedding_size": 16, "num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {**TEXT, "hidden_size": 32, "n_head": 4, "n_layer": 2, "hidden_dropout": 0.0},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **TEXT,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dropout": 0.0,
            "word_embed_proj_dim": 32,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **TEXT,
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_heads": 4,
            "num_layers": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    **{
        name.lower(): (f"{name}ForConditionalGeneration", f"{name}Config", BART)
        for name in ("Bart", "MBart", "Pegasus", "Blenderbot", "M2M100", "PLBart")
    },
    "marian": ("MarianMTModel", "MarianConfig", {**BART, "decoder_start_token_id": 0}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**FALCON, "multi_query": False, "bias": True}),
    "falcon, one key head": ("FalconForCausalLM", "FalconConfig", {**FALCON, "bias": True}),
    "falcon, groups": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        {**FALCON, "multi_query": False, "alibi": True, "parallel_attn": False},
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", {**MAMBA, "bos_token_id": 1}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 5,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "dropout": 0.0,
        },
    ),
}
# Families without a rule for tensor parallelism, or that test_tensor_programs.py trains.
READ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", "ApertusConfig", LLAMA),
    "phi": ("PhiForCausalLM", "PhiConfig", {**LLAMA, "qk_layernorm": True}),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**BERT, "embedding_size": 16}),
    "esm": ("EsmForMaskedLM", "EsmConfig", {**BERT, "pad_token_id": 1, "max_position_embeddings": 40}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**LLAMA, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "pad_token_id": 0},
    ),
}
# What the record of a row says that is not what an unknown model's does, but for its rules.
_CAUSAL = {"loss": Loss.CAUSAL, "looks_back_only": True, "replaceable_attention": True}
_MASKED = {"replaceable_attention": True, "documents_in_mask": False}
_STATE_SPACE = {
    "loss": Loss.CAUSAL,
    "positions": Positions.OF_LENGTH,
    "mixes_tokens": "layers of type 'linear_attention'",
}
_HALVES = {"two_sequences": True, "positions": Positions.OF_LENGTH}
SAYS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt2", "llama", "qwen3", "apertus", "phi"), _CAUSAL),
    "unknown": _CAUSAL,  # models of Cohere
    "llama4": {**_CAUSAL, "scales_by_position": True, "has_windows": True},
    "opt": {**_CAUSAL, "positions": Positions.COUNTED_IN_MASK, "documents_in_mask": False},
    "bloom": {"loss": Loss.CAUSAL, "positions": Positions.OF_LENGTH},
    "falcon": {"loss": Loss.CAUSAL, "looks_back_only": True},
    **dict.fromkeys(("mamba", "falcon_mamba"), _STATE_SPACE),
    "bert": _MASKED,
    "electra": _MASKED,
    "roberta": {**_MASKED, "positions": Positions.OF_TOKENS},
    "esm": {"replaceable_attention": True, "positions": Positions.OF_TOKENS},
    "albert": {"replaceable_attention": True},
    "vit": {"replaceable_attention": True, "positions": Positions.OF_LENGTH},
    **dict.fromkeys(("t5", "whisper", "bart", "mbart", "plbart", "pegasus", "marian", "blenderbot"), _HALVES),
    "m2m_100": {**_HALVES, "random_depth": {"model.encoder": 0.05, "model.decoder": 0.05}},
}


def build(name: str) -> nn.Module:
    """Return the model of a row."""
    model, config, options = (ROWS | READ)[name]
    torch.manual_seed(13)
    built: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    with torch.no_grad():  # biases and norms begin as zeros and ones, which hides mistakes
        for index, param in enumerate(built.parameters()):
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(index)))
    return built


def inputs_of(name: str) -> dict[str, Tensor]:
    """Return a batch for the model of a row."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=generator)
    if name == "vit":
        images = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.tensor([1, 4])}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 24, generator=generator), "labels": ids}
    labels = ids.clone()
    labels[0, :3] = -100
    if name == "bloom":  # whose bias depends on the mask
        seen = torch.ones_like(ids)
        seen[1, :2] = 0
        return {"input_ids": ids, "labels": labels, "attention_mask": seen}
    return {"input_ids": ids, "labels": labels}
