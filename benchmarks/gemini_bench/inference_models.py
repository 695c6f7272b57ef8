"""The model of ``gemini bench inference``, and what a process has used."""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def opt(options: Mapping[str, Any]) -> Any:
    """Return an OPT of ``options["layers"]`` of ``options["width"]``, with random weights."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    width = options["width"]
    config = transformers.OPTConfig(
        vocab_size=options["vocabulary"],
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=options["layers"],
        num_attention_heads=8,
        max_position_embeddings=options.get("positions", 256),
    )
    return transformers.OPTForCausalLM(config).eval().requires_grad_(False)


def weight_bytes(model: Any) -> int:
    """Return the bytes of all parameters."""
    return sum(param.numel() * param.element_size() for param in model.parameters())


def cpu_seconds() -> float:
    """Return the processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
