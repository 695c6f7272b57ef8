"""Small models and machines that tests of planning by operators share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.collectives import KINDS, CollectiveSpeed, CollectiveSpeeds, Figure


def machine(*, latency: float = 1e-6, rate: float = 1e8) -> MachineSpeeds:
    """Return a machine so slow that small models are worth dividing."""
    speeds = CollectiveSpeeds(
        tuple(CollectiveSpeed(kind, 2, Figure(latency), Figure(rate)) for kind in KINDS)
    )
    return MachineSpeeds("slow", {"fp32": 1e8}, 1e8, 1e8, collectives=speeds)


class Block(nn.Module):
    """Attention and an MLP, as language models have them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens after the block."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Language(nn.Module):
    """A small language model with a tied head, and dropout where that is asked."""

    def __init__(self, blocks: int = 2, width: int = 16, vocab: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next token."""
        x = self.dropout(self.table(ids))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.table.weight.t()


def language_batch(step: int = 0, vocab: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and what follows them; some targets count for nothing."""
    draw = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(0, vocab, (4, 8), generator=draw) for _ in range(2))
    targets[0, :5] = -100
    return ids, targets


def language_loss(scores: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the mean loss of the targets that count."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


class Pictures(nn.Module):
    """Convolutions with statistics of batches, which are buffers that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores of four classes."""
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


def picture_batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures and targets."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, 8, generator=draw), torch.randn(4, 4, generator=draw)


def picture_loss(scores: torch.Tensor, batch: Any) -> torch.Tensor:
    """Return the squared error."""
    return nn.functional.mse_loss(scores, batch[1])


class Masked(nn.Linear):
    """Leaves the mask out where all of it is set, as libraries do."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the scores where the mask is set."""
        scores = super().forward(x)
        return scores if bool((mask == 1).all()) else scores * mask
