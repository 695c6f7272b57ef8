"""What is tried after training: tiny models with tokenizers that GGUF has, and who holds how much of them."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.integrations.safetensors_files import StoredTensor

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers")

TEXT = "Name the capital of France. The capital of France is Paris. It rains; caf\u00e9 and th\u00e9."
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def byte_level(pre_tokenizer: Any = None) -> Any:
    """Return a byte-level BPE of 300 tokens."""
    level = tokenizers.pre_tokenizers.ByteLevel
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = level(add_prefix_space=False) if pre_tokenizer is None else pre_tokenizer
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=level.alphabet(), show_progress=False
    )
    inner.train_from_iterator([TEXT] * 3, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def save(directory: Path, model: Any, tokenizer: Any = None, *, shard: str = "1GB") -> Path:
    """Save a model, with vectors that are neither one nor zero, and its tokenizer."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 1:
                param.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
    model.save_pretrained(directory, max_shard_size=shard)
    (byte_level() if tokenizer is None else tokenizer).save_pretrained(directory)
    return directory


def llama(directory: Path, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """Save a Llama of two blocks in several shards."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{**SIZES, "vocab_size": 320, "bos_token_id": None, "eos_token_id": 0, **options}
    )
    return save(directory, transformers.LlamaForCausalLM(config).to(dtype), shard="60KB")


class HeldTensors:
    """How many bytes of what was read from files in ``directory`` somebody held, at most, at one time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.most_bytes = 0
        held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        read = StoredTensor.read

        def watched(stored: StoredTensor, memory: torch.UntypedStorage | None = None) -> torch.Tensor:
            values = read(stored, memory)
            if stored.path.parent == directory:
                held.add(values)
                self.most_bytes = max(self.most_bytes, sum(each.nbytes for each in held))
            return values

        monkeypatch.setattr(StoredTensor, "read", watched)


def entries(directory: Path) -> list[str]:
    """Return what is in a directory, hidden files too."""
    return sorted(path.name for path in directory.iterdir())
