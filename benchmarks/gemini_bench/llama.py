"""A decoder in the manner of LLaMA: RMSNorm, rotary positions, SwiGLU, no biases, a head of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_ROTARY_BASE = 10_000.0
_EPSILON = 1e-5


@dataclass(frozen=True)
class LlamaConfig:
    """Describe a model. ``inner``: width of the feed-forward part; ``checkpointing``: blocks save nothing but
    their input and run again in backward."""

    vocab: int
    layers: int
    hidden: int
    heads: int
    inner: int
    checkpointing: bool = False


# 1.3 and 6.7 billion parameters.
LLAMA_1B = LlamaConfig(vocab=32_000, layers=24, hidden=2048, heads=16, inner=5504)
LLAMA_7B = LlamaConfig(vocab=32_000, layers=32, hidden=4096, heads=32, inner=11008, checkpointing=True)


def num_parameters(config: LlamaConfig) -> int:
    """Return the exact number of parameters of ``Llama(config)``."""
    hidden = config.hidden
    block = 4 * hidden * hidden + 3 * hidden * config.inner + 2 * hidden
    return 2 * config.vocab * hidden + config.layers * block + hidden


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within ``x`` of shape ``[batch, seq, hidden]``."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        query, key = (_rotate(part, cos, sin) for part in (qkv[0], qkv[1]))
        mixed = F.scaled_dot_product_attention(query, key, qkv[2], is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        return projected


class SplitAttention(nn.Module):
    """The same with query, key and value in layers of their own, which tensor parallelism cuts by heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.width = config.hidden // config.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within ``x`` of shape ``[batch, seq, hidden]`` with the heads that are here."""
        batch, seq, _ = x.shape
        parts = (layer(x).view(batch, seq, -1, self.width) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, is_causal=True
        )
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class SwiGLU(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.inner, bias=False)
        self.up = nn.Linear(config.hidden, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of ``x`` on its own."""
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: LlamaConfig, attention: Callable[[LlamaConfig], nn.Module]) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.hidden, eps=_EPSILON)
        self.attention = attention(config)
        self.norm_mlp = nn.RMSNorm(config.hidden, eps=_EPSILON)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and feed-forward network to the residual stream ``x``."""
        attended: Tensor = x + self.attention(self.norm_attention(x), cos, sin)
        transformed: Tensor = attended + self.mlp(self.norm_mlp(attended))
        return transformed


class Llama(nn.Module):
    """Predict the next token; parameters come from torch's global generator, module by module, also when
    built on ``meta`` and wrapped. ``attention`` makes a block's."""

    def __init__(
        self, config: LlamaConfig, attention: Callable[[LlamaConfig], nn.Module] = Attention
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=_EPSILON)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.width = config.hidden // config.heads
        self._checkpointing = config.checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, seq, vocab]`` for int64 ``tokens`` ``[batch, seq]``."""
        x: Tensor = self.tokens(tokens)
        cos, sin = rotary(tokens.shape[1], self.width, x)
        for block in self.blocks:
            if self._checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotary(seq: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[seq, width / 2]``: computed in fp32, for a buffer would be cast to bf16."""
    powers = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
    places = torch.arange(seq, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, _ROTARY_BASE**-powers)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
