"""Saved tensors that are no ordinary memory stay where they are, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from activation_harness import both, offloaded, store_small_tensors
from torch import Tensor, nn
from torch.func import jvp
from training_harness import KIB, LossFn, Recipe, random_batch

pytestmark = pytest.mark.usefixtures(store_small_tensors.__name__)


class Smooth(nn.Module):
    """Layers with a bias, whose tangents begin as zeros without memory; 100 KiB of model data in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """Run the layers, and multiply by ``other``."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if other is None else x * other


def tangents(model: nn.Module, index: int) -> Tensor:
    x = random_batch(index, 16, 32)
    out, tangent = jvp(model, (x,), (x.flip(0),))
    return (out + tangent).square().mean()


def zeros_without_memory(model: nn.Module, index: int) -> Tensor:
    x = random_batch(index, 16, 32)
    zeros = torch._efficientzerotensor(16, 32)  # type: ignore[attr-defined]
    return model(x, zeros).square().mean() + model(x).square().mean()


@pytest.mark.parametrize("device_bytes", [48 * KIB, 4096 * KIB])
@pytest.mark.parametrize("loss", [tangents, zeros_without_memory])
def test_zeros_without_memory_stay_where_they_are(loss: LossFn, device_bytes: int, tmp_path: Path) -> None:
    both(Smooth, loss, Recipe(steps=4), offloaded(tmp_path, device_bytes))
