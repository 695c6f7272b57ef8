"""Saved tensors that are no ordinary memory stay where they are, and change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from activation_harness import both, offloaded, store_small_tensors
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp
from training_harness import KIB, LossFn, Recipe, random_batch

from gemini import GeminiDDP

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


def dual_numbers(model: nn.Module, index: int) -> Tensor:
    x = random_batch(index, 16, 32)
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.flip(0))))
    return (out + tangent).square().mean()


def zeros_without_memory(model: nn.Module, index: int) -> Tensor:
    x = random_batch(index, 16, 32)
    zeros = torch._efficientzerotensor(16, 32)  # type: ignore[attr-defined]
    return model(x, zeros).square().mean() + model(x).square().mean()


class Graph(nn.Module):
    """Layers that sum over neighbours; ``adjacent`` says which nodes are."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.smooth = Smooth()
        nodes = torch.arange(16)
        dense = torch.eye(16) + torch.eye(16)[(nodes + 1) % 16]
        convert = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}
        self.adjacent = convert[layout](dense)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers on sums over neighbours."""
        for layer in self.smooth.layers:
            x = torch.tanh(torch.sparse.mm(self.adjacent, layer(x)))
        return x


def of_nodes(model: nn.Module, index: int) -> Tensor:
    out: Tensor = model(random_batch(index, 16, 32))
    return out.square().mean()


@pytest.mark.parametrize("mode", [True, "auto"])
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_tensors_stay_where_they_are(layout: str, mode: bool | str, tmp_path: Path) -> None:
    measured = {"non_model_bytes": None} if mode == "auto" else {}
    options = offloaded(tmp_path, 96 * KIB, activation_offload=mode, **measured)
    both(lambda: Graph(layout), of_nodes, Recipe(steps=4), options)


def test_a_sparse_tensor_that_was_written_is_refused_as_by_autograd(tmp_path: Path) -> None:
    with GeminiDDP(Graph("coo"), **offloaded(tmp_path)) as model:
        loss = of_nodes(model, 0)
        model.module.adjacent.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("device_bytes", [48 * KIB, 4096 * KIB])
@pytest.mark.parametrize("loss", [tangents, dual_numbers, zeros_without_memory])
def test_zeros_without_memory_stay_where_they_are(loss: LossFn, device_bytes: int, tmp_path: Path) -> None:
    both(Smooth, loss, Recipe(steps=4), offloaded(tmp_path, device_bytes))
