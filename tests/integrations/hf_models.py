"""Small models of transformers and what is asked of two of them: to be the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def saved(config: Any, kind: Any, directory: Path, shard: str = "1GB") -> Path:
    """Save a model with random weights; return the directory."""
    torch.manual_seed(0)
    kind(config).save_pretrained(directory, max_shard_size=shard)
    return directory


def assert_same(got: nn.Module, want: nn.Module) -> None:
    """Assert that values, buffers, names, ties and flags of two models are the same."""
    one, other = got.state_dict(), want.state_dict()
    assert one.keys() == other.keys()
    unlike = [n for n, v in other.items() if one[n].dtype != v.dtype or not torch.equal(one[n], v)]
    assert not unlike
    buffers = dict(got.named_buffers())
    assert all(torch.equal(buffers[name], value) for name, value in want.named_buffers())
    flags = [[(n, p.requires_grad) for n, p in model.named_parameters()] for model in (got, want)]
    assert flags[0] == flags[1]
