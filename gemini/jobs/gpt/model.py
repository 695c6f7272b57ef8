"""A decoder-only GPT: pre-LN blocks, learned positions, GELU MLP, embedding tied to the head.

Every module that owns parameters initializes them only in ``reset_parameters``, and has no child that owns
parameters. Therefore building under ``init_on("meta")`` and calling ``reset_parameters`` module by module in
``modules()`` order draws the same random numbers as building directly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini.errors import ConfigError

_INIT_STD = 0.02
_MLP_RATIO = 4


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. ``seq`` is the longest sequence in tokens. Raise ConfigError for impossible
    sizes."""

    vocab: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq: int = 128
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "hidden", "heads", "seq"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.hidden % self.heads:
            raise ConfigError(
                f"hidden {self.hidden} is not a multiple of {self.heads} heads; use hidden "
                f"{self.heads * math.ceil(self.hidden / self.heads)} or another number of heads"
            )


def num_parameters(config: GPTConfig) -> int:
    """Return the exact number of parameters of ``GPT(config)``; the tied head counts once."""
    hidden = config.hidden
    attention = (3 * hidden * hidden + 3 * hidden) + (hidden * hidden + hidden)
    mlp = (_MLP_RATIO * hidden * hidden + _MLP_RATIO * hidden) + (_MLP_RATIO * hidden * hidden + hidden)
    block = attention + mlp + 2 * (2 * hidden)
    return (config.vocab + config.seq) * hidden + config.layers * block + 2 * hidden


class Embedding(nn.Embedding):
    """An embedding with the small initialization that a tied head needs."""

    def reset_parameters(self) -> None:
        """Draw the table from the global generator."""
        nn.init.normal_(self.weight, std=_INIT_STD)


class Linear(nn.Linear):
    """``x @ weight.t() + bias`` with a chosen initial standard deviation."""

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        self.std = std  # must precede nn.Linear.__init__, which calls reset_parameters()
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        """Draw the weight from the global generator and zero the bias."""
        nn.init.normal_(self.weight, std=self.std)
        nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Causal self-attention over ``heads`` heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.qkv = Linear(config.hidden, 3 * config.hidden, std=_INIT_STD)
        self.out = Linear(config.hidden, config.hidden, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Attend within ``x`` of shape ``[batch, seq, hidden]``."""
        batch, seq, _ = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class Mlp(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.hidden, _MLP_RATIO * config.hidden, std=_INIT_STD)
        self.down = Linear(_MLP_RATIO * config.hidden, config.hidden, std=_residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of ``x`` separately."""
        projected: Tensor = self.down(F.gelu(self.up(x)))
        return projected


class Block(nn.Module):
    """One pre-LN transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and MLP to the residual stream ``x``."""
        attended: Tensor = x + self.attention(self.norm_attention(x))
        transformed: Tensor = attended + self.mlp(self.norm_mlp(attended))
        return transformed


class GPT(nn.Module):
    """Predicts the next token. Parameters are drawn from torch's global generator."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = Embedding(config.vocab, config.hidden)
        self.positions = Embedding(config.seq, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    @property
    def _tp_plan(self) -> dict[str, Any]:
        """The tensor-parallel plan of the layers, in transformers' format (gemini.parallel.parallelize)."""
        from gemini.parallel.tensor import Column

        return {
            "blocks.*.attention.qkv": Column(sections=3),
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, seq, vocab]`` for int64 ``tokens`` ``[batch, seq]``."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.config.checkpoint_activations and torch.is_grad_enabled():
                # There is no dropout, so saving the RNG state would only cost time.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats, computed in fp32 regardless of the logits' dtype."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _residual_std(config: GPTConfig) -> float:
    """Return the initial standard deviation of layers that add to the residual stream. It shrinks with the
    depth, so that the stream does not grow with it."""
    return _INIT_STD / math.sqrt(2 * config.layers)
