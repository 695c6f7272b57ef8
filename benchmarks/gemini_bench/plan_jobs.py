"""The jobs of ``gemini bench plan``: models of transformers, and layouts over ranks of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure
from gemini.parallel.layout_plan import Run
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.planner.space import Pins

BATCH = 8  # samples of a step, over all ranks
SEQ = 128
QUICK_SEQ = 16

_LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": SEQ}
# By name: the class of transformers, and the options of its configuration.
MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama 4x256": (
        "LlamaForCausalLM",
        {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 2000, **_LLAMA},
    ),
    "llama 8x128": (
        "LlamaForCausalLM",
        {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8, "vocab_size": 1000, **_LLAMA},
    ),
    "llama 2x512": (
        "LlamaForCausalLM",
        {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2, "vocab_size": 4000, **_LLAMA},
    ),
    "gpt2 4x256": (
        "GPT2LMHeadModel",
        {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 2000, "n_positions": SEQ},
    ),
    "qwen3 4x256": (
        "Qwen3ForCausalLM",
        {
            **_LLAMA,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 2000,
        },
    ),
    "opt 4x256": (
        "OPTForCausalLM",
        {
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "ffn_dim": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "vocab_size": 2000,
            "max_position_embeddings": SEQ,
        },
    ),
    "tiny": (
        "LlamaForCausalLM",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 64, **_LLAMA},
    ),
}
QUICK_MODEL = "tiny"
# Losses of ranks can be compared where nothing is drawn.
_NO_DROPOUT = {
    "GPT2LMHeadModel": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "OPTForCausalLM": {"dropout": 0.0, "attention_dropout": 0.0},
}

_ONE = "microbatches=1 recompute=none tiers=device"
_MANY = "zero=0 microbatches=4 schedule=1f1b tiers=device"


def layouts(ranks: int) -> dict[str, Pins]:
    """Return the layouts to measure over so many ranks: pins by name."""
    texts = {f"dp {ranks}, ZeRO {zero}": f"dp={ranks} zero={zero} {_ONE}" for zero in range(4)}
    texts |= {
        f"tp {ranks}": f"tp={ranks} zero=0 {_ONE}",
        f"sp {ranks}": f"sp={ranks} sp_mode=ulysses zero=0 {_ONE}",
        f"pp {ranks}": f"pp={ranks} recompute=none {_MANY}",
        f"pp {ranks}, all recompute": f"pp={ranks} recompute=all {_MANY}",
    }
    if ranks == 4:
        texts |= {
            "dp 2 x tp 2": f"dp=2 tp=2 zero=0 {_ONE}",
            "dp 2 x sp 2": f"dp=2 sp=2 sp_mode=ulysses zero=0 {_ONE}",
            "dp 2 x pp 2": f"dp=2 pp=2 recompute=none {_MANY}",
            "tp 2 x pp 2": f"tp=2 pp=2 recompute=none {_MANY}",
        }
    return {name: Pins.parse(text.split()) for name, text in texts.items()}


def build(name: str) -> nn.Module:
    """Return a model that trains, with random weights that are the same every time; on torch's default
    device."""
    import transformers

    kind, sizes = MODELS[name]
    model = getattr(transformers, kind)
    config = model.config_class(**sizes, **_NO_DROPOUT.get(kind, {}), use_cache=False)
    torch.manual_seed(0)
    built: nn.Module = model(config).train()
    return built


def batch_of(name: str, step: int, seq: int) -> dict[str, torch.Tensor]:
    """Return the samples of a step of all ranks."""
    generator = torch.Generator().manual_seed(step)
    vocab = MODELS[name][1]["vocab_size"]
    ids = torch.randint(0, vocab, (BATCH, seq), generator=generator, device="cpu")
    return {"input_ids": ids, "labels": ids}


def run_of(samples: int, seq: int) -> Run:
    """Return a function that runs such a model, without values, on a micro-batch."""

    def run(model: nn.Module, sequence: SequenceOutline | None) -> torch.Tensor:
        ids = torch.empty(samples, seq, dtype=torch.int64, device="meta")
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        if sequence is not None:
            batch = sequence.cut(batch)
        loss: torch.Tensor = model(**batch).loss
        return loss

    return run


def supposed_machine() -> MachineSpeeds:
    """Return a machine with assumed speeds, for questions whose answers do not depend on them."""
    figures = Figure(1e-4), Figure(1e9)
    return MachineSpeeds(
        "supposed",
        {"fp32": 5e10},
        1e10,
        1e10,
        1e-4,
        collectives=CollectiveSpeeds(
            tuple(CollectiveSpeed(kind, ranks, *figures) for kind in KINDS for ranks in (2, 4, 8))
        ),
    )
