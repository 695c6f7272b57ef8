"""``zero_grad(set_to_none=False)`` after a step: plain torch has zeros then, which momentum and weight decay
act on, also where the next pass makes no gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from training_harness import (
    KIB,
    assert_same_state,
    assert_within_budgets,
    random_batch,
    seeded,
    tight,
)

from gemini import GeminiDDP, GeminiOptimizer, Lion, checkpoint

WIDTH, STEPS = 32, 7

Make = Callable[[Any], torch.optim.Optimizer]

RULES: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
}


class Skips(nn.Module):
    """Layers, one of which only some passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = layer(x).relu()
        return x


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(random_batch(step, 4, WIDTH), -1 if step % 3 == 0 else step % 5).square().mean()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero: Callable[[], None],
    clip: Callable[[], Any] = lambda: None,
    steps: int = STEPS,
) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        if isinstance(optimizer, GeminiOptimizer):
            optimizer.backward(loss)
        else:
            loss.backward()
        clip()
        optimizer.step()
        zero()
        losses.append(loss.item())
    return losses


def trained_plain(make: Make, max_norm: float = 0.0) -> tuple[list[float], dict[str, Tensor]]:
    plain = seeded(Skips)
    optimizer = make(plain.parameters())

    def clip() -> None:
        if max_norm:
            nn.utils.clip_grad_norm_(plain.parameters(), max_norm)

    losses = train(plain, optimizer, lambda: optimizer.zero_grad(set_to_none=False), clip)
    return losses, plain.state_dict()


@pairs(
    rule=RULES,
    options=[{"overlap": True}, {"overlap": False}, {"overlap": "backward"}],
    device_bytes=[None, 24 * KIB],
)
def test_what_got_no_gradient_moves_as_in_torch(
    rule: str, options: dict[str, Any], device_bytes: int | None, tmp_path: Path
) -> None:
    want, weights = trained_plain(RULES[rule])
    with GeminiDDP(seeded(Skips), **tight(tmp_path, device_bytes)) as model:
        optimizer = GeminiOptimizer(RULES[rule](model.parameters()), model, **options)
        assert train(model, optimizer, lambda: optimizer.zero_grad(set_to_none=False)) == want
        assert_same_state(model.state_dict(), weights)
        assert_within_budgets(model.stats())


@pytest.mark.parametrize("device_bytes", [None, 24 * KIB])
def test_neither_the_model_nor_clipping_makes_a_difference(device_bytes: int | None, tmp_path: Path) -> None:
    want, weights = trained_plain(RULES["sgd"], max_norm=0.01)
    with GeminiDDP(seeded(Skips), **tight(tmp_path, device_bytes)) as model:
        optimizer = GeminiOptimizer(RULES["sgd"](model.parameters()), model, max_norm=0.01)
        assert train(model, optimizer, lambda: model.zero_grad(set_to_none=False)) == want
        assert_same_state(model.state_dict(), weights)


def test_a_step_that_follows_at_once_has_zeros(tmp_path: Path) -> None:
    plain = seeded(Skips)
    optimizer = RULES["sgd"](plain.parameters())
    train(plain, optimizer, lambda: None, steps=1)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    with GeminiDDP(seeded(Skips), **tight(tmp_path, 24 * KIB)) as model:
        managed = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        train(model, managed, lambda: None, steps=1)
        managed.zero_grad(set_to_none=False)
        managed.step()
        assert_same_state(model.state_dict(), plain.state_dict())


def test_who_reads_it_finds_zeros(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Skips), **tight(tmp_path, 24 * KIB)) as model:
        optimizer = GeminiOptimizer(RULES["adamw"](model.parameters()), model)
        train(model, optimizer, lambda: optimizer.zero_grad(set_to_none=False), steps=1)
        weight = model.module.layers[0].weight
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.zeros(WIDTH, WIDTH))
        got = optimizer.get_param_grad(model.module.layers[1].weight)
        assert got is not None
        assert got.count_nonzero() == 0


@pytest.mark.parametrize("give_up", ["zero_grad", "grad = None"])
def test_what_was_given_up_since_is_none(give_up: str, tmp_path: Path) -> None:
    with GeminiDDP(seeded(Skips), **tight(tmp_path, 24 * KIB)) as model:
        optimizer = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        train(model, optimizer, lambda: optimizer.zero_grad(set_to_none=False), steps=1)
        for param in model.parameters():
            if give_up == "grad = None":
                param.grad = None
        if give_up == "zero_grad":
            optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        assert [name for name, param in model.named_parameters() if param.grad is not None] == []


def test_zeros_that_nobody_uses_take_no_memory_and_no_transfer(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Skips), **tight(tmp_path, 24 * KIB)) as model:
        optimizer = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        train(model, optimizer, lambda: None, steps=3)
        before, used = model.stats(), len(model.manager.pending.all())
        optimizer.zero_grad(set_to_none=False)
        assert len(model.manager.pending.all()) == used  # updates stay behind the next forward pass
        for key in ("device", "host", "disk"):
            assert model.stats()[key]["bytes"] == before[key]["bytes"]
        checkpoint.save(tmp_path / "saved", model, optimizer)  # which takes no gradients


def test_a_negative_zero_becomes_one_that_was_added_to_zeros(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Skips), **tight(tmp_path, 24 * KIB)) as model:
        optimizer = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        weight = model.module.layers[0].weight
        train(model, optimizer, lambda: optimizer.zero_grad(set_to_none=False), steps=1)
        (weight * -0.0).sum().backward()
        assert weight.grad is not None
        assert not torch.signbit(weight.grad).any()
