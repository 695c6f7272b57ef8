"""What the tests of sharded models share: small models, one training loop for every way to run it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from processes import own_part
from torch import Tensor, nn
from torch import distributed as dist

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer

GLOBAL_BATCH = 12
WIDTH = 64
SMALL_CHUNKS = {"min_chunk_size_mb": 0.01, "search_range_mb": 0.01}


@dataclass(frozen=True)
class Recipe:
    """How to train. ``clip`` limits the global norm; ``accumulate`` micro-batches make a step."""

    steps: int = 4
    accumulate: int = 1
    no_sync: bool = False
    clip: float | None = None
    adam: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-5})


class Tied(nn.Module):
    """A weight used by two submodules, one frozen layer, one parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.inner.weight
        self.unused = nn.Parameter(torch.ones(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(torch.tanh(self.frozen(torch.tanh(self.inner(x)))))
        return out


def mlp() -> nn.Module:
    """A stack of layers of different sizes."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.LayerNorm(2 * WIDTH),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, WIDTH),
    )


def columns() -> nn.Module:
    """Layers of which one lies in memory column by column."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


def tied() -> nn.Module:
    """See :class:`Tied`."""
    torch.manual_seed(6)
    return Tied()


def batch(index: int) -> Tensor:
    """The global batch with this number."""
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(100 + index))


def train_plain(build: Callable[[], nn.Module], recipe: Recipe) -> tuple[list[float], dict[str, Tensor]]:
    """Train on the whole batch with plain PyTorch; return the losses and the weights."""
    model = build()
    optimizer = CPUAdam([p for p in model.parameters() if p.requires_grad], **recipe.adam)
    losses = []
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            loss = model(batch(step * recipe.accumulate + micro)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def wrap(build: Callable[[], nn.Module], recipe: Recipe, **options: Any) -> tuple[GeminiDDP, GeminiOptimizer]:
    """Return the managed model and its optimizer."""
    model = GeminiDDP(build(), **{**SMALL_CHUNKS, **options})
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, GeminiOptimizer(CPUAdam(trained, **recipe.adam), model)


def train_step(model: GeminiDDP, optimizer: GeminiOptimizer, recipe: Recipe, step: int) -> list[float]:
    """Train one step on this rank's part; return the losses averaged over the ranks."""
    losses, device = [], model.device
    for micro in range(recipe.accumulate):
        last = micro == recipe.accumulate - 1
        with model.no_sync() if recipe.no_sync and not last else nullcontext():
            inputs = own_part(batch(step * recipe.accumulate + micro)).to(device)
            loss = model(inputs).float().square().mean()
            optimizer.backward(loss)
        losses.append(mean_over_ranks(loss.item(), device))
    if recipe.clip is not None:
        optimizer.clip_grad_by_norm(recipe.clip)
    optimizer.step()
    return losses


def train_sharded(
    build: Callable[[], nn.Module], recipe: Recipe, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank's part of each batch; return the mean losses and the weights."""
    model, optimizer = wrap(build, recipe, **options)
    with model:
        losses = [loss for step in range(recipe.steps) for loss in train_step(model, optimizer, recipe, step)]
        model.manager.chunks.table.check_invariants()
        return losses, {key: value.clone() for key, value in model.state_dict().items()}


def mean_over_ranks(value: float, device: torch.device | None = None) -> float:
    """Return the mean of a number over the ranks, in double precision; ``device``: whose memory the default
    group takes."""
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compare bit for bit."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), f"{key} differs by {(got[key] - value).abs().max()}"


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Compare up to the order in which the ranks' gradients are added."""
    assert got.keys() == want.keys()
    for key, value in want.items():
        error = float((got[key] - value).abs().max())
        assert error <= tolerance, f"{key} differs by {error}"
