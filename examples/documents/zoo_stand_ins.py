"""The documents' model zoo and timm's ViT, as far as their programs use them: layers and their signatures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from gemini.parallel.tensor.nn import Classifier, Dropout, LayerNorm, Linear, PatchEmbedding

# -- blocks over the ranks of tensor parallelism ----------------------------------------------------


class _Block(nn.Module):
    """Attention and two layers, each with a way around it, whose heads and features are cut over ranks."""

    def __init__(self, dim: int, num_heads: int, mlp_ratio: int, dropout: float, activation: Any, **how: Any):
        super().__init__()
        self.head_dim, self.dropout, self.activation = dim // num_heads, Dropout(dropout), activation
        self.norm1 = LayerNorm(dim, **how)
        self.query_key_value = Linear(dim, 3 * dim, inside=False, **how)
        self.dense = Linear(dim, dim, inside=True, **how)
        self.norm2 = LayerNorm(dim, **how)
        self.dense_1 = Linear(dim, mlp_ratio * dim, inside=False, **how)
        self.dense_2 = Linear(mlp_ratio * dim, dim, inside=True, **how)

    def run(self, x: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
        heads = self.query_key_value(self.norm1(x)).unflatten(-1, (-1, 3 * self.head_dim)).transpose(1, 2)
        query, key, value = heads.chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, -10000.0)
        scores = scores if mask is None else scores + mask
        mixed = scores.float().softmax(-1).to(x.dtype) @ value
        x = x + self.dropout(self.dense(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.dense_2(self.activation(self.dense_1(self.norm2(x)))))


class GPTEmbedding(nn.Module):
    def __init__(
        self, embedding_dim: int, vocab_size: int, max_position_embeddings: int, dropout=0.0, dtype=None
    ):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_dim, dtype=dtype)
        self.position_embeddings = nn.Embedding(max_position_embeddings, embedding_dim, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.word_embeddings.weight, std=0.02)
        nn.init.normal_(self.position_embeddings.weight, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.dropout(self.word_embeddings(input_ids) + self.position_embeddings(positions))


class GPTBlock(_Block):
    def __init__(
        self, dim, num_heads, mlp_ratio, attention_dropout=0.0, dropout=0.0, dtype=None, checkpoint=False,
        activation=nn.functional.gelu,
    ):  # fmt: skip
        super().__init__(dim, num_heads, mlp_ratio, dropout, activation, dtype=dtype)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.checkpoint and self.training:
            x = recomputed(self.run, x, attention_mask, is_causal=True, use_reentrant=False)
        else:
            x = self.run(x, attention_mask, is_causal=True)
        return x, attention_mask


class GPTLMHead(nn.Module):
    def __init__(self, vocab_size: int, dim: int, dtype=None, bias=False):
        super().__init__()
        self.dense = nn.Linear(dim, vocab_size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class GPTLMLoss(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class ViTEmbedding(nn.Module):
    def __init__(
        self, img_size, patch_size, in_chans, embedding_dim, dropout, dtype=None, init_method="torch",
    ):  # fmt: skip
        super().__init__()
        self.patch_embed = PatchEmbedding(img_size, patch_size, in_chans, embedding_dim, dtype=dtype)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.patch_embed(x))


class ViTBlock(_Block):
    def __init__(
        self, dim, num_heads, mlp_ratio, attention_dropout=0.0, dropout=0.0, drop_path=0.0,
        activation=nn.functional.gelu, dtype=None, bias=True, checkpoint=False, init_method="torch",
    ):  # fmt: skip
        super().__init__(dim, num_heads, mlp_ratio, dropout, activation, dtype=dtype)
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint and self.training:
            return recomputed(self.run, x, use_reentrant=False)
        return self.run(x)


class ViTHead(nn.Module):
    def __init__(
        self, dim, num_classes, representation_size=None, dtype=None, bias=True, init_method="torch"
    ):
        super().__init__()
        self.dense = Classifier(dim, num_classes, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x[:, 0])


def _create_vit_model(img_size, patch_size, dim, depth, num_heads, mlp_ratio, num_classes, **how):
    """Return the whole of what a program builds in stages of these layers."""
    embed = ViTEmbedding(img_size, patch_size, 3, dim, 0.0)
    blocks = [
        ViTBlock(dim, num_heads, mlp_ratio, checkpoint=how.get("checkpoint", False)) for _ in range(depth)
    ]
    return nn.Sequential(embed, *blocks, LayerNorm(dim), ViTHead(dim, num_classes))


# -- timm.models.vision_transformer -----------------------------------------------------------------


class _PatchEmbed(nn.Module):
    def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768):
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class _TimmBlock(nn.TransformerEncoderLayer):
    def __init__(
        self, dim, num_heads, mlp_ratio=4.0, qkv_bias=True, drop=0.0, attn_drop=0.0, drop_path=0.0,
        norm_layer=None, act_layer=None,
    ):  # fmt: skip
        super().__init__(
            dim, num_heads, int(dim * mlp_ratio), drop, "gelu", batch_first=True, norm_first=True
        )


def _init_vit_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


vit = SimpleNamespace(
    PatchEmbed=_PatchEmbed,
    Block=_TimmBlock,
    trunc_normal_=nn.init.trunc_normal_,
    _init_vit_weights=_init_vit_weights,
)
