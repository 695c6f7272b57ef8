"""Optimizers that treat one parameter as no other: by its attributes, its identity, its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from same_bits import assert_same
from test_rules import mlp, num_bytes, square, tight
from test_stepped_rules import train, train_plain
from torch import Tensor, nn
from training_harness import seeded

from gemini import ConfigError, GeminiDDP, GeminiOptimizer

MODES: dict[str, dict[str, Any]] = {
    "tried": {},
    "whole": {"whole": True},
    "elementwise": {"elementwise": True},
}


class Scaled(torch.optim.Optimizer):
    """SGD whose rate follows from what a subclass says of a parameter."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 0.1, **settings})
        self.prepare([param for group in self.param_groups for param in group["params"]])

    def prepare(self, params: list[Tensor]) -> None:
        pass

    def scale(self, param: Tensor, place: int) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    self.update(param, group["lr"] * self.scale(param, place))

    def update(self, param: Tensor, rate: float) -> None:
        param.sub_(param.grad, alpha=rate)


class Attribute(Scaled):
    """Of the last parameter, which shares its shape with others."""

    def prepare(self, params: list[Tensor]) -> None:
        params[-1].lr_scale = 0.1  # type: ignore[attr-defined]
        params[0].rule = {"halve": True}  # type: ignore[attr-defined]

    def scale(self, param: Tensor, place: int) -> float:
        halved = 0.5 if getattr(param, "rule", {}).get("halve") else 1.0
        return getattr(param, "lr_scale", 1.0) * halved


class Replaced(Scaled):
    """Gives parameters other data, as ``param.data = ...`` does."""

    def scale(self, param: Tensor, place: int) -> float:
        return 1.0

    def update(self, param: Tensor, rate: float) -> None:
        param.data = param.data - rate * param.grad


@pairs(kind=[Attribute, Replaced], mode=list(MODES), budget=["all", "tight"], half=[False, True])
def test_its_bits_are_those_of_plain_training(
    kind: type[Scaled], mode: str, budget: str, half: bool, tmp_path: Path
) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        return model(inputs.bfloat16() if half else inputs).float().square().mean()

    plain, net = seeded(mlp), seeded(mlp)
    if half:
        plain, net = plain.bfloat16(), net.bfloat16()
    optimizer = kind(plain.parameters())
    train_plain(plain, [optimizer], loss, range(5))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        train(model, [GeminiOptimizer(kind(net.parameters()), model, **MODES[mode])], loss, range(5))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_an_attribute_that_changes_between_steps_is_that_of_its_step() -> None:
    def run(net: nn.Module, step: Callable[[int], None]) -> None:
        for index in range(4):
            list(net.parameters())[1].lr_scale = 1.0 / (1 + index)  # type: ignore[attr-defined]
            step(index)

    plain, net = seeded(mlp), seeded(mlp)
    optimizer = Attribute(plain.parameters())
    run(plain, lambda index: train_plain(plain, [optimizer], square, range(index, index + 1)))
    with GeminiDDP(net) as model:
        managed = GeminiOptimizer(Attribute(net.parameters()), model)
        run(net, lambda index: train(model, [managed], square, range(index, index + 1)))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class Id(Scaled):
    def prepare(self, params: list[Tensor]) -> None:
        self.found: Any = {id(params[-1])}

    def scale(self, param: Tensor, place: int) -> float:
        return 0.1 if id(param) in self.found else 1.0


class Key(Id):
    def prepare(self, params: list[Tensor]) -> None:
        self.found = {params[-1]: 0.1}

    def scale(self, param: Tensor, place: int) -> float:
        return float(self.found.get(param, 1.0))


class Closure(Id):
    def prepare(self, params: list[Tensor]) -> None:
        scales = {(id(param), "scale"): 0.1 for param in params[-1:]}
        self.found = lambda param: scales.get((id(param), "scale"), 1.0)

    def scale(self, param: Tensor, place: int) -> float:
        return float(self.found(param))


class Table:
    __slots__ = ("scales",)

    def __init__(self, params: list[Tensor]) -> None:
        self.scales = [(weakref.ref(param), 0.1) for param in params[-1:]]


class Weak(Id):
    def prepare(self, params: list[Tensor]) -> None:
        self.found = Table(params)

    def scale(self, param: Tensor, place: int) -> float:
        return next((scale for kept, scale in self.found.scales if kept() is param), 1.0)


class Text(Id):
    def prepare(self, params: list[Tensor]) -> None:
        self.param_groups[0]["found"] = {str(id(params[-1])): 0.1}

    def scale(self, param: Tensor, place: int) -> float:
        return float(self.param_groups[0]["found"].get(str(id(param)), 1.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Id, Key, Closure, Weak, Text])
def test_a_parameter_that_is_known_by_its_identity_is_refused(
    kind: type[Scaled], mode: str, tmp_path: Path
) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        with pytest.raises(ConfigError, match=r"'found' keeps a parameter .* or the id of one") as refused:
            GeminiOptimizer(kind(net.parameters()), model, **MODES[mode])
        assert "without GeminiOptimizer: loss.backward(), optimizer.step()" in str(refused.value)
        train_plain(plain, [kind(plain.parameters())], square, range(3))
        train_plain(model, [kind(net.parameters())], square, range(3))  # the way that the error names
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class Sets(Scaled):
    """Counts on the parameter itself."""

    def scale(self, param: Tensor, place: int) -> float:
        param.count = getattr(param, "count", 0) + 1  # type: ignore[attr-defined]
        return 1.0 / param.count  # type: ignore[attr-defined]


class Lists(Scaled):
    """Keeps arrays in a list."""

    def update(self, param: Tensor, rate: float) -> None:
        kept = self.state[param].setdefault("means", [torch.zeros_like(param), torch.zeros_like(param)])
        kept.reverse()
        param.sub_(kept[0].lerp_(param.grad, 0.5), alpha=rate)

    def scale(self, param: Tensor, place: int) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("kind", "mode", "reason"),
    [
        (Sets, "tried", "its step sets count on parameters"),
        (Sets, "whole", "its step sets count on parameters"),
        (Sets, "elementwise", "its step writes to count, which all parameters share"),
        (Lists, "elementwise", "makes something else of means of a parameter of shape"),
    ],
)
def test_what_a_step_leaves_where_chunks_have_no_place_is_refused(
    kind: type[Scaled], mode: str, reason: str
) -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model, pytest.raises(ConfigError, match=reason):
        GeminiOptimizer(kind(net.parameters()), model, **MODES[mode])
