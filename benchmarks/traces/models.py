"""The models whose steps are recorded: plain torch, the shapes of well-known ones, random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention of ``x`` to ``memory``, or to itself."""

    def __init__(self, hidden: int, heads: int, *, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query = nn.Linear(hidden, hidden, bias=bias)
        self.key = nn.Linear(hidden, hidden, bias=bias)
        self.value = nn.Linear(hidden, hidden, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        source = x if memory is None else memory
        split = [
            layer(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, given in ((self.query, x), (self.key, source), (self.value, source))
        ]
        mixed = F.scaled_dot_product_attention(*split, is_causal=self.causal)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the last dimension."""
        mapped: Tensor = self.down(F.gelu(self.up(x)))
        return mapped


class GatedMlp(nn.Module):
    """The SwiGLU of LLaMA."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the last dimension."""
        mapped: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return mapped


class Experts(nn.Module):
    """A mixture of experts: each token goes to its best two."""

    def __init__(self, hidden: int, inner: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(Mlp(hidden, inner) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Add the two experts' results, weighted by the router."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            of_expert, rank = torch.where(chosen == index)
            if len(of_expert):
                result = expert(tokens[of_expert]) * weights[of_expert, rank, None]
                mixed = mixed.index_add(0, of_expert, result)
        return mixed.view_as(x)


class Block(nn.Module):
    """A pre-norm transformer layer; ``memory`` adds attention to an encoder's output."""

    def __init__(
        self, attention: Attention, mlp: nn.Module, norm: Callable[[], nn.Module], *, memory: Attention | None
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(2 if memory is None else 3))
        self.attention, self.memory, self.mlp = attention, memory, mlp

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        """Add attention and MLP to the residual stream."""
        x = x + self.attention(self.norms[0](x))
        if self.memory is not None:
            x = x + self.memory(self.norms[2](x), encoded)
        added: Tensor = x + self.mlp(self.norms[1](x))
        return added


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer; ``experts`` of them in every second layer."""

    vocab: int
    hidden: int
    heads: int
    inner: int
    layers: int
    experts: int = 0


class Decoder(nn.Module):
    """A causal language model in the manner of LLaMA (gated, no biases) or with experts."""

    def __init__(self, shape: Shape, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(self._block(shape, index) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    @staticmethod
    def _block(shape: Shape, index: int) -> Block:
        attention = Attention(shape.hidden, shape.heads, causal=True, bias=False)
        mlp = GatedMlp(shape.hidden, shape.inner)
        sparse = Experts(shape.hidden, shape.inner, shape.experts) if shape.experts and index % 2 else mlp
        return Block(attention, sparse, lambda: nn.RMSNorm(shape.hidden), memory=None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class EncoderDecoder(nn.Module):
    """A translator in the manner of T5: one table of tokens for both sides and the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.encoder = nn.ModuleList(self._block(shape, decodes=False) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(self._block(shape, decodes=True) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)

    @staticmethod
    def _block(shape: Shape, *, decodes: bool) -> Block:
        attention = Attention(shape.hidden, shape.heads, causal=decodes, bias=False)
        memory = Attention(shape.hidden, shape.heads, bias=False) if decodes else None
        mlp = Mlp(shape.hidden, shape.inner, bias=False)
        return Block(attention, mlp, lambda: nn.RMSNorm(shape.hidden), memory=memory)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the decoder, which reads the same tokens as the encoder."""
        encoded = self.tokens(tokens)
        for block in self.encoder:
            encoded = block(encoded)
        x = self.tokens(tokens)
        for block in self.decoder:
            x = block(x, encoded)
        return F.linear(self.norm(x), self.tokens.weight)


class VisionTransformer(nn.Module):
    """ViT: patches of 16 x 16 pixels, a class from their mean."""

    def __init__(self, shape: Shape, *, patches: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, shape.hidden, 16, stride=16)
        self.positions = nn.Parameter(torch.zeros(patches, shape.hidden))
        self.blocks = nn.ModuleList(
            Block(
                Attention(shape.hidden, shape.heads),
                Mlp(shape.hidden, shape.inner),
                lambda: nn.LayerNorm(shape.hidden),
                memory=None,
            )
            for _ in range(shape.layers)
        )
        self.head = nn.Linear(shape.hidden, shape.vocab)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the classes."""
        x = self.patch(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


class MixerBlock(nn.Module):
    """An MLP across patches, then one across channels."""

    def __init__(self, shape: Shape, patches: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(shape.hidden) for _ in range(2))
        self.across = Mlp(patches, shape.hidden // 2)
        self.within = Mlp(shape.hidden, shape.inner)

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the residual stream."""
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        added: Tensor = x + self.within(self.norms[1](x))
        return added


class Mixer(nn.Module):
    """MLP-Mixer."""

    def __init__(self, shape: Shape, *, patches: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, shape.hidden, 16, stride=16)
        self.blocks = nn.Sequential(*(MixerBlock(shape, patches) for _ in range(shape.layers)))
        self.head = nn.Linear(shape.hidden, shape.vocab)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the classes."""
        logits: Tensor = self.head(self.blocks(self.patch(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


class Residual(nn.Module):
    """A bottleneck of three convolutions beside a shortcut, with group norms."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = outputs // 4
        self.body = nn.Sequential(
            *_convolution(inputs, inner, 1),
            nn.ReLU(),
            *_convolution(inner, inner, 3, stride),
            nn.ReLU(),
            *_convolution(inner, outputs, 1),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, inputs, height, width]``."""
        return F.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return conv, nn.GroupNorm(min(32, outputs // 4), outputs)


def wide_resnet50() -> nn.Sequential:
    """Return ResNet-50 at 1.5 times the width."""
    layers: list[nn.Module] = [*_convolution(3, 96, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 96
    for stage, blocks in enumerate((3, 4, 6, 3)):
        outputs = 384 << stage
        for index in range(blocks):
            layers.append(Residual(inputs, outputs, 2 if stage and not index else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))
