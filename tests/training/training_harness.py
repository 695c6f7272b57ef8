"""What the training tests share: one training loop for a plain and for a managed model, and their comparison.

The reference of law 1 is written the way a user without this library would: fp32 with the same optimizer,
16-bit with a short loop that keeps fp32 masters by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer

KIB = 1024
TIERS = ("device", "host", "disk")
LINKS = ("h2d", "d2h", "disk_read", "disk_write")

# The loss of one micro-batch: (model, index of the micro-batch) -> scalar.
LossFn = Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How to train. ``clip`` is ``("norm" or "value", limit)``; ``adam`` are keywords of CPUAdam."""

    steps: int = 20
    accumulate: int = 1
    no_sync: bool = False
    clip: tuple[str, float] | None = None
    precision: str | None = None
    adam: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.01})


@dataclass(frozen=True)
class Outcome:
    """What a run produced: the loss of every micro-batch and every tensor of the state dict."""

    losses: list[float]
    state: dict[str, Tensor]
    stats: dict[str, Any] = field(default_factory=dict)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return ``build()`` with the global generator seeded before."""
    torch.manual_seed(seed)
    return build()


def tight(tmp_path: Path, device_bytes: int | str = 72 * KIB, **options: Any) -> dict[str, Any]:
    """Return keywords of GeminiDDP: a small DEVICE above a DISK, exact budgets, the smallest chunks."""
    return {
        "device_bytes": device_bytes,
        "disk_dir": str(tmp_path),
        "non_model_bytes": 0,
        "min_chunk_size_mb": 4096 / 2**20,
        **options,
    }


def train_plain(model: nn.Module, loss_fn: LossFn, recipe: Recipe) -> Outcome:
    """Train a model that nobody manages."""
    if recipe.precision == "bf16":
        return _train_bf16(model, loss_fn, recipe)
    optimizer = CPUAdam(model.parameters(), **recipe.adam)
    losses = []
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            loss = loss_fn(model, step * recipe.accumulate + micro)
            loss.backward()
            losses.append(loss.item())
        _clip(list(model.parameters()), recipe)
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, {key: value.detach().clone() for key, value in model.state_dict().items()})


def train_managed(model: GeminiDDP, loss_fn: LossFn, recipe: Recipe) -> Outcome:
    """Train a managed model the same way; its memory is given back at the end."""
    with model:
        optimizer = managed_optimizer(model, recipe)
        losses = []
        for step in range(recipe.steps):
            losses += managed_step(model, optimizer, loss_fn, recipe, step)
        stats = model.stats()
        return Outcome(losses, {key: value.clone() for key, value in model.state_dict().items()}, stats)


def managed_optimizer(model: GeminiDDP, recipe: Recipe | None = None) -> GeminiOptimizer:
    """Return the optimizer of ``recipe`` for a managed model."""
    recipe = recipe or Recipe()
    return GeminiOptimizer(CPUAdam(model.parameters(), **recipe.adam), model)


def managed_step(
    model: GeminiDDP, optimizer: GeminiOptimizer, loss_fn: LossFn, recipe: Recipe, step: int
) -> list[float]:
    """Run one step of ``recipe``; return the losses of its micro-batches."""
    losses = []
    for micro in range(recipe.accumulate):
        last = micro == recipe.accumulate - 1
        with model.no_sync() if recipe.no_sync and not last else nullcontext():
            loss = loss_fn(model, step * recipe.accumulate + micro)
            optimizer.backward(loss)
        losses.append(loss.item())
    if recipe.clip is not None:
        kind, limit = recipe.clip
        clip = optimizer.clip_grad_by_norm if kind == "norm" else optimizer.clip_grad_by_value
        clip(limit)
    optimizer.step()
    return losses


def assert_identical(got: Outcome, want: Outcome) -> None:
    """Compare bit for bit: every loss and every weight."""
    assert got.losses == want.losses
    assert_same_state(got.state, want.state)


def assert_same_state(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compare two state dicts bit for bit."""
    assert list(got) == list(want)
    different = [key for key in want if not torch.equal(got[key], want[key])]
    assert different == []


def assert_within_budgets(stats: dict[str, Any]) -> None:
    """No tier ever held more than its budget."""
    for tier in TIERS:
        assert stats[tier]["peak_bytes"] <= stats[tier]["budget_bytes"], tier


def moved_bytes(stats: dict[str, Any]) -> int:
    """Return what went over all links."""
    return int(sum(stats[link]["bytes"] for link in LINKS))


def assert_trains_alike(
    build: Callable[[], nn.Module],
    loss_fn: LossFn,
    options: dict[str, Any],
    recipe: Recipe | None = None,
) -> Outcome:
    """State law 1 for one model: under ``options`` it trains to the bits of the plain one, within budgets.

    Where DEVICE is smaller than the model data, bytes must really have moved.
    """
    recipe = recipe or Recipe(steps=5)
    want = train_plain(seeded(build), loss_fn, recipe)
    got = train_managed(
        GeminiDDP(seeded(build), mixed_precision=recipe.precision, **options), loss_fn, recipe
    )
    assert_identical(got, want)
    assert_within_budgets(got.stats)
    if got.stats["device"]["budget_bytes"] < got.stats["model_data_bytes"]:
        assert moved_bytes(got.stats) > 0
    return got


def random_batch(index: int, *shape: int) -> Tensor:
    """Return the same normal numbers for the same ``index``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + index))


def _clip(params: Sequence[nn.Parameter], recipe: Recipe) -> None:
    if recipe.clip is None:
        return
    kind, limit = recipe.clip
    if kind == "norm":
        nn.utils.clip_grad_norm_(params, limit)
    else:
        nn.utils.clip_grad_value_(params, limit)


def _train_bf16(model: nn.Module, loss_fn: LossFn, recipe: Recipe) -> Outcome:
    """Train with bf16 weights and, for those that train, fp32 masters made from the original weights."""
    masters = {param: param.detach().clone() for param in model.parameters() if param.requires_grad}
    for owner in model.modules():
        if not isinstance(owner, nn.BatchNorm1d | nn.BatchNorm2d):  # takes one type with its statistics
            for param in owner.parameters(recurse=False):
                param.data = param.data.to(torch.bfloat16)
    optimizer = CPUAdam(masters.values(), **recipe.adam)
    losses = []
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            loss = loss_fn(model, step * recipe.accumulate + micro)
            loss.backward()
            losses.append(loss.item())
        for param, master in masters.items():
            master.grad = param.grad.float() if param.grad is not None else None
            param.grad = None
        _clip(list(masters.values()), recipe)
        optimizer.step()
        with torch.no_grad():
            for param, master in masters.items():
                param.copy_(master)
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        value = masters.get(value, value)
        state[key] = value.detach().float() if isinstance(value, nn.Parameter) else value.detach()
    return Outcome(losses, state)
