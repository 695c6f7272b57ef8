"""Models and machines that the forecast tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gemini.forecast.machine import MachineSpeeds
from gemini.forecast.rehearsal import Example, ModelSource
from gemini.jobs.gpt.model import GPT, GPTConfig, language_loss
from gemini.memstats.trace import LinkSpeed
from gemini.runtime.config import GeminiConfig

KIB, MIB = 1024, 1024**2
SEQ = 32


def tiny_gpt(checkpointing: bool = False) -> nn.Module:
    """Three layers of 64; embedding and head are tied."""
    return GPT(GPTConfig(layers=3, hidden=64, heads=4, seq=SEQ, checkpoint_activations=checkpointing))


class FrozenHead(nn.Module):
    """A frozen layer between two that train, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.frozen = nn.Linear(32, 32)
        self.out = nn.Linear(32, 64)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        mixed, _ = self.attention(hidden, hidden, hidden)
        # A view of a weight, and a weight outside its module.
        return self.out(torch.tanh(self.frozen(mixed))) @ self.embed.weight.t()[:, :1].expand(-1, 1).repeat(
            2, 1
        )


class Buffers(nn.Module):
    """Buffers that are read, and ones that a forward pass writes; an integer one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("scale", torch.full((32,), 0.5))
        self.out = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens).flatten(0, 1)) * self.scale
        return self.out(hidden).unflatten(0, tokens.shape)


def loss_of(outputs: Any, inputs: Any) -> Tensor:
    """The loss of a language model; of anything else the mean."""
    return language_loss(outputs, inputs[0]) if outputs.shape[-1] > 1 else outputs.float().mean()


def source(build: Callable[[], nn.Module] = tiny_gpt) -> ModelSource:
    """A model on token ids."""
    return ModelSource(
        "test",
        lambda batch: Example(build(), (torch.zeros(batch, SEQ, dtype=torch.int64),)),
        loss_of,
        tokens=SEQ,
        unit="tokens",
    )


def config(device_bytes: int, **options: Any) -> GeminiConfig:
    """Small chunks over a DISK tier that a rehearsal never opens."""
    sizes: dict[str, Any] = {"min_chunk_size_mb": 0.05, "search_range_mb": 0.05}
    return GeminiConfig(device_bytes=device_bytes, **{"disk_dir": "nowhere", **sizes, **options})


def machine(disk_bytes_per_second: float = 1e9) -> MachineSpeeds:
    """A machine of round numbers."""
    links = tuple(LinkSpeed(name, disk_bytes_per_second, 1e-4) for name in ("disk_read", "disk_write"))
    return MachineSpeeds("round", {"fp32": 1e11, "bf16": 2e11}, 1e10, 2e10, 1e-5, links)
