"""Shared by the tests of activation offload: options, a model that saves in every way, what is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import (
    KIB,
    LossFn,
    Outcome,
    Recipe,
    assert_identical,
    assert_within_budgets,
    random_batch,
    seeded,
    tight,
    train_managed,
    train_plain,
)

from gemini import GeminiDDP
from gemini.runtime.activation import activations


@pytest.fixture
def store_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny: have everything go into chunks."""
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)


def offloaded(tmp_path: Path, device_bytes: int = 80 * KIB, **options: Any) -> dict[str, Any]:
    """Return keywords of GeminiDDP: DEVICE takes a small part of model data and activations."""
    return {**tight(tmp_path, device_bytes, disk_bytes="64MiB", activation_offload=True), **options}


class Block(nn.Module):
    """Every way to save: inputs, results, views, expanded, in place, random."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(32, 96)
        self.two = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Run ``x`` of shape ``[batch, 16, 32]`` through the block."""
        q, k, v = self.one(self.norm(x)).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k.transpose(1, 2).transpose(1, 2), v)
        h = F.dropout(h, 0.1, training=True) * self.scale.expand(16, 32)
        h = torch.relu_(self.two(h).add_(1))
        return x + h * h.sigmoid() + x[:, ::2].repeat_interleave(2, dim=1).mul(0.1)


class Net(nn.Module):
    """Four blocks; ``kind`` is "none", "reentrant" or "non-reentrant" checkpointing of every other one."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for index, block in enumerate(self.blocks):
            if self.kind == "none" or index % 2 or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return x


def net_loss(model: nn.Module, index: int) -> Tensor:
    torch.manual_seed(index)  # of dropout
    x = random_batch(index, 8, 16, 32).requires_grad_()  # 16 KiB
    out: Tensor = model(x)
    return out.square().mean()


def both(build: Callable[[], nn.Module], loss: LossFn, recipe: Recipe, options: dict[str, Any]) -> Outcome:
    """Train plain and managed; return the managed outcome, which has the bits of the plain one."""
    want = train_plain(seeded(build), loss, recipe)
    got = train_managed(GeminiDDP(seeded(build), mixed_precision=recipe.precision, **options), loss, recipe)
    assert_identical(got, want)
    assert_within_budgets(got.stats)
    return got


def activation_bytes(model: GeminiDDP) -> int:
    """Return what saved tensors hold on all tiers."""
    manager = model.manager
    manager.recover()
    table = manager.chunks.table
    of_model = model.stats()["model_data_bytes"]
    assert of_model > 0
    return sum(
        table.nbytes(chunk.id) * len(table.held_tiers(chunk.id))
        for chunk in manager.chunks.chunks
        if chunk.spec.kind.value == "activation"
    )
