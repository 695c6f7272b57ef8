"""Embeddings over a grid: of ids, cut by rows and columns, and of image patches, cut by columns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.tensor.grid import Tile
from gemini.parallel.tensor.layers import embed_rows
from gemini.parallel.tensor.nn.grid_layer import GridLayer, divided, embedding_cuts
from gemini.parallel.tensor.region import gather_and_use

_INIT_STD = 0.02  # of positions and of the class token


class Embedding(GridLayer):
    """nn.Embedding with any number of rows. Its ids are this rank's part of the batch (``grid.own_batch``),
    or ids without a batch that all ranks have, such as positions. Its output is distributed as outside of
    pairs.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ConfigError if the ranks do not divide ``embedding_dim``."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.building.go_on(inside=False)
        cuts = embedding_cuts(self.grid)
        divided(self.grid, "embedding_dim", embedding_dim, cuts[1])
        self.add_parameter(
            "weight", Tile(self.grid.places, (num_embeddings, embedding_dim), cuts), device, dtype
        )
        self.reset_parameters()

    def draw(self, device: torch.device) -> Mapping[str, torch.Tensor | None]:
        whole = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            device=device,
            dtype=self.weight.dtype,
        )
        return {"weight": whole.weight}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the vectors of ``ids``."""
        every = self.grid.every
        if self.grid.mode == "1d" and every is not None:
            return embed_rows(ids, self.weight, self.padding_idx, every)
        weight = self.summed("weight", self.grid.spread())
        assert weight is not None
        for name in reversed(self.tiles["weight"].cuts[0]):  # the innermost coordinate first
            axis = self.grid.axis(name)
            if axis is not None:  # a clone: a collective is no operator and would not fetch a managed weight
                weight = gather_and_use(weight.clone() if weight is self.weight else weight, axis, 0)
        return functional.embedding(ids, weight, self.padding_idx)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.grid.mode!r}"


class PatchEmbedding(GridLayer):
    """Convert images (batch, channels, height, width) to a sequence: a class token, then the patches, each
    with its position, as in ViT. A rank takes its part of the batch; the output is distributed as outside of
    pairs.
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ConfigError if the ranks do not divide ``embed_size``, or patches the image."""
        super().__init__()
        self.img_size, self.patch_size = img_size, patch_size
        self.in_chans, self.embed_size = in_chans, embed_size
        self.building.go_on(inside=False)
        columns = self.grid.spread().columns
        divided(self.grid, "embed_size", embed_size, columns)
        if img_size % patch_size:
            raise ConfigError(
                f"images of {img_size} cannot be divided into patches of {patch_size}; use a size that is a "
                "multiple of the patches"
            )
        self.num_patches = (img_size // patch_size) ** 2
        for name, shape, dim in (
            ("weight", (embed_size, in_chans, patch_size, patch_size), 0),
            ("bias", (embed_size,), 0),
            ("cls_token", (1, 1, embed_size), 2),
            ("pos_embed", (1, self.num_patches + 1, embed_size), 2),
        ):
            cuts = tuple(columns if at == dim else () for at in range(len(shape)))
            self.add_parameter(name, Tile(self.grid.places, shape, cuts), device, dtype)
        self.reset_parameters()

    def draw(self, device: torch.device) -> Mapping[str, torch.Tensor | None]:
        dtype = self.weight.dtype
        whole = nn.Conv2d(
            self.in_chans, self.embed_size, self.patch_size, self.patch_size, device=device, dtype=dtype
        )
        token = torch.empty(self.tiles["cls_token"].shape, device=device, dtype=dtype)
        positions = torch.empty(self.tiles["pos_embed"].shape, device=device, dtype=dtype)
        for values in (token, positions):
            nn.init.trunc_normal_(values, std=_INIT_STD)
        return {"weight": whole.weight, "bias": whole.bias, "cls_token": token, "pos_embed": positions}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of (batch, 1 + patches, embed_size)."""
        spread = self.grid.spread()
        weight, bias = self.summed("weight", spread), self.summed("bias", spread)
        token, positions = self.summed("cls_token", spread), self.summed("pos_embed", spread)
        assert weight is not None
        assert token is not None
        assert positions is not None
        patches = functional.conv2d(images, weight, bias, self.patch_size).flatten(2).transpose(1, 2)
        return torch.cat([token.expand(images.size(0), -1, -1), patches], 1) + positions

    def extra_repr(self) -> str:
        return (
            f"{self.img_size}, {self.patch_size}, {self.in_chans}, {self.embed_size}, mode={self.grid.mode!r}"
        )
