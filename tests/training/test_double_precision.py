"""Models in float64: their gradients stay so on the way into an update, into a norm, and to who asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from training_harness import assert_same_state, assert_within_budgets, random_batch, seeded, tight

from gemini import GeminiDDP, GeminiOptimizer, Lion

WIDTH, STEPS = 32, 4
DOUBLE, SINGLE, HALF = torch.float64, torch.float32, torch.bfloat16

Make = Callable[[Any], torch.optim.Optimizer]

RULES: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "lion": lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2, eps=(1e-16, 1e-3)),
}
if hasattr(torch.optim, "Muon"):
    RULES["muon"] = lambda params: torch.optim.Muon(params, lr=1e-2)


class Layers(nn.Module):
    """Linear layers without biases, each of a type of its own."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x


def loss_of(model: nn.Module, index: int) -> Tensor:
    return model(random_batch(index, 4, WIDTH).double()).square().mean()


def doubles() -> nn.Module:
    return Layers(*(DOUBLE,) * 6)


def mixed() -> nn.Module:
    return Layers(SINGLE, DOUBLE, DOUBLE, SINGLE, SINGLE, DOUBLE)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], Any] = lambda: None,
    *,
    accumulate: int = 1,
) -> list[float]:
    found = []
    for step in range(STEPS):
        for micro in range(accumulate):
            loss = loss_of(model, step * accumulate + micro)
            loss.backward()
            found.append(loss.item())
        norm = clip()
        found.append(0.0 if norm is None else float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return found


def wrap(build: Callable[[], nn.Module], tmp_path: Path) -> GeminiDDP:
    return GeminiDDP(seeded(build), **tight(tmp_path))


@pairs(build=[doubles, mixed], rule=RULES, accumulate=[1, 3])
def test_any_rule_has_the_bits_of_the_unmanaged_model(
    build: Callable[[], nn.Module], rule: str, accumulate: int, tmp_path: Path
) -> None:
    plain = seeded(build)
    want = train(plain, RULES[rule](plain.parameters()), accumulate=accumulate)
    with wrap(build, tmp_path) as model:
        managed = GeminiOptimizer(RULES[rule](model.parameters()), model)
        assert train(model, managed, accumulate=accumulate) == want
        assert_same_state(model.state_dict(), plain.state_dict())
        assert_within_budgets(model.stats())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("build", [doubles, mixed])
def test_clipping_by_norm_has_the_bits_of_torch(
    build: Callable[[], nn.Module], norm_type: float, tmp_path: Path
) -> None:
    plain, limit = seeded(build), 1e-3
    want = train(
        plain,
        RULES["sgd"](plain.parameters()),
        lambda: nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type),
    )
    with wrap(build, tmp_path) as model:
        managed = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        assert train(model, managed, lambda: managed.clip_grad_by_norm(limit, norm_type)) == want
        assert_same_state(model.state_dict(), plain.state_dict())


def test_clipping_by_value_has_the_bits_of_torch(tmp_path: Path) -> None:
    plain, limit = seeded(doubles), 1e-4
    want = train(
        plain,
        RULES["adamw"](plain.parameters()),
        lambda: nn.utils.clip_grad_value_(plain.parameters(), limit),
    )
    with wrap(doubles, tmp_path) as model:
        managed = GeminiOptimizer(RULES["adamw"](model.parameters()), model)
        assert train(model, managed, lambda: managed.clip_grad_by_value(limit)) == want
        assert_same_state(model.state_dict(), plain.state_dict())


def test_clipping_twice_has_the_bits_of_torch(tmp_path: Path) -> None:
    plain = seeded(doubles)

    def clip_plain() -> None:
        for limit in (1e-3, 1e-4):
            nn.utils.clip_grad_value_(plain.parameters(), limit)
            nn.utils.clip_grad_norm_(plain.parameters(), limit)

    want = train(plain, RULES["sgd"](plain.parameters()), clip_plain)
    with wrap(doubles, tmp_path) as model:
        managed = GeminiOptimizer(RULES["sgd"](model.parameters()), model)

        def clip() -> None:
            for limit in (1e-3, 1e-4):
                managed.clip_grad_by_value(limit)
                managed.clip_grad_by_norm(limit)

        assert train(model, managed, clip) == want
        assert_same_state(model.state_dict(), plain.state_dict())


def test_who_asks_for_a_gradient_gets_all_of_its_digits(tmp_path: Path) -> None:
    plain = seeded(mixed)
    loss_of(plain, 0).backward()
    with wrap(mixed, tmp_path) as model:
        managed = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        loss_of(model, 0).backward()
        for param, like in zip(model.parameters(), plain.parameters(), strict=True):
            got = managed.get_param_grad(param)
            assert got is not None
            assert got.dtype == like.dtype
            assert torch.equal(got, like.grad)


def test_a_gradient_in_16_bits_is_still_given_in_fp32(tmp_path: Path) -> None:
    with wrap(lambda: Layers(HALF, HALF), tmp_path) as model:
        managed = GeminiOptimizer(RULES["sgd"](model.parameters()), model)
        loss_of(model, 0).backward()
        got = managed.get_param_grad(next(iter(model.parameters())))
        assert got is not None
        assert got.dtype == SINGLE


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_states_go_to_the_optimizer_itself_and_back(rule: str, tmp_path: Path) -> None:
    plain = seeded(doubles)
    optimizer = RULES[rule](plain.parameters())
    train(plain, optimizer)
    train(plain, optimizer)
    with wrap(doubles, tmp_path) as model:
        first = GeminiOptimizer(RULES[rule](model.parameters()), model)
        train(model, first)
        state = first.state_dict()
        second = GeminiOptimizer(RULES[rule](model.parameters()), model)
        second.load_state_dict(state)
        train(model, second)
        assert_same_state(model.state_dict(), plain.state_dict())
