"""Models and training loops of the booster's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import HybridAdam
from gemini.parallel import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster import Plugin


def _zero(stage: int) -> Plugin:
    return LowLevelZeroPlugin(stage, initial_scale=2**16, overlap_communication=stage == 2)


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "gemini": GeminiPlugin,
    "zero-1": lambda: _zero(1),
    "zero-2": lambda: _zero(2),
}


every_plugin = pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
every_layout = pytest.mark.parametrize("shard", [False, True], ids=["file", "directory"])
TINY = 1e-4  # MB: a hundred bytes, so that every tensor has a file of its own


class Tied(nn.Module):
    """A model with tied weights, buffers, a parameter that is not contiguous, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.across = nn.Parameter(torch.randn(8, 4).t())
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.note = {"seen": 0}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        logits: torch.Tensor = self.head(hidden + hidden @ self.across.t() @ self.across)
        return logits

    def get_extra_state(self) -> Any:
        return dict(self.note)

    def set_extra_state(self, state: Any) -> None:
        self.note = dict(state)


def tied(seed: int = 0) -> Tied:
    """Return the model with the weights of a seed."""
    torch.manual_seed(seed)
    return Tied()


def mlp(seed: int = 0, width: int = 16) -> nn.Sequential:
    """Return a small network with the weights of a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def boosted(
    plugin: Plugin, model: nn.Module, mixed_precision: Any = None, **adam: Any
) -> tuple[Booster, nn.Module, Any]:
    """Return a booster, and the model with a HybridAdam after boosting."""
    booster = Booster(mixed_precision, plugin)
    optimizer = HybridAdam(model.parameters(), **{"lr": 1e-2, **adam})
    wrapped, optim, *_ = booster.boost(model, optimizer)
    return booster, wrapped, optim


def tokens(seed: int) -> torch.Tensor:
    """Return a batch for :class:`Tied`."""
    return torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(seed))


def train(
    booster: Booster, model: nn.Module, optimizer: Any, seeds: Iterable[int], max_norm: float = 0.5
) -> list[float]:
    """Take a step for every seed, clipped unless ``max_norm`` is 0; return the losses."""
    losses = []
    for seed in seeds:
        batch = tokens(seed)
        loss = nn.functional.cross_entropy(model(batch).float(), batch)
        booster.backward(loss, optimizer)
        if max_norm > 0:
            optimizer.clip_grad_by_norm(max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a state."""
    return {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    got, want = plain(got), plain(want)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def names_in(directory: Path) -> list[str]:
    """Return the names of what a directory holds, sorted."""
    return sorted(path.name for path in directory.iterdir())
