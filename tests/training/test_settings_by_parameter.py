"""Optimizers that treat one parameter as no other: by its attributes, its identity, its place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import pairs
from same_bits import assert_same
from test_rules import mlp, num_bytes, square, tight
from test_stepped_rules import train, train_plain
from torch import Tensor, nn
from training_harness import seeded

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, HybridAdam, Lion, StateError
from gemini.optim.marks import ParamForm, Placeholder

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
        return 1.0

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for number, group in enumerate(self.param_groups):
            rate = group["lr"] * self.group_scale(group, number)
            for place, param in enumerate(group["params"]):
                if param.grad is not None:
                    self.update(param, rate * self.scale(param, place))

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


class Index(Scaled):
    """By the index of the group, and that of the parameter in it."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0 if place == 0 else 0.1

    def scale(self, param: Tensor, place: int) -> float:
        return 0.5**place


class First(Scaled):
    """By the settings of the first group, their number, and whether it is that one."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        first = self.param_groups[0]
        same = 1.0 if group is first else 0.3
        return same * float(first["lr"]) * len(self.param_groups) + place


class Sizes(Scaled):
    """By how many elements the parameters of its group have, and how they look."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        matrices = [param for param in group["params"] if param.dim() == 2]
        return 1.0 / sum(param.numel() for param in group["params"]) + len(matrices)


class Names(Scaled):
    """By the name of a parameter."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0 if any(name.endswith("0.weight") for name in group["param_names"]) else 0.2

    def scale(self, param: Tensor, place: int) -> float:
        groups = self.param_groups
        pairs = [pair for group in groups for pair in zip(group["params"], group["param_names"], strict=True)]
        found = [name for other, name in pairs if other is param]
        return 0.5 if found[0].endswith("bias") else 1.0


class Clears(Index):
    """Takes gradients away when it is done, and first gives those that have none another look."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None if param.grad is None else param.grad * 2
                param.mul_(1.0)
        super().step()
        self.zero_grad()


class Unguarded(Scaled):
    """Takes for granted that each parameter has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                self.update(param, group["lr"] / (1 + number))


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return groups of equal settings, which chunks cross."""
    named = list(net.named_parameters())
    return [{"params": named[0::2]}, {"params": named[1::2]}]


@pairs(kind=[Index, First, Sizes, Names, Clears, Unguarded], mode=list(MODES), budget=["all", "tight"])
def test_a_group_and_a_parameter_are_found_in_their_places(
    kind: type[Scaled], mode: str, budget: str, tmp_path: Path
) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    train_plain(plain, [kind(two_groups(plain))], square, range(5))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        inner = kind(two_groups(net))
        if kind is Sizes and mode == "elementwise":  # the elements of a piece are fewer
            with pytest.raises(ConfigError, match="depends on others, or on the shape"):
                GeminiOptimizer(inner, model, elementwise=True)
            return
        train(model, [GeminiOptimizer(inner, model, **MODES[mode])], square, range(5))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_placeholder_has_no_values_and_forgets_what_is_set_on_it() -> None:
    touched: list[Placeholder] = []
    param = nn.Parameter(torch.ones(3, 4).t())
    param.rate = 0.5  # type: ignore[attr-defined]
    placeholder = Placeholder.of(ParamForm.of(param), touched)
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "rate"):
        assert getattr(placeholder, name) == getattr(param, name), name
    assert placeholder.stride() == param.stride()
    assert touched == []
    with torch.no_grad():
        assert type(placeholder.mul_(0.5).norm() + torch.tensor(1.0)) is Placeholder
        total, other = torch.tensor(1.0), torch.ones(4, 3)
        for joined in (
            lambda: placeholder + other,
            lambda: placeholder.copy_(other),
            lambda: other.copy_(placeholder),
            lambda: other.mul_(placeholder.norm()),
            lambda: total.add_(placeholder.norm()),
            lambda: torch._foreach_mul_([other, placeholder], 0.5),
            lambda: placeholder.sum().item(),
            lambda: bool(placeholder.abs().max() > 0),
        ):
            with pytest.raises(RuntimeError):
                joined()
        assert total == 1
        assert bool((other == 1).all())
    placeholder.rate, placeholder.count = 2.0, 1  # type: ignore[attr-defined]
    placeholder.grad = torch.zeros_like(placeholder)
    assert {id(each) for each in touched} == {id(placeholder)}
    placeholder.forget()
    assert placeholder.rate == 0.5  # type: ignore[attr-defined]
    assert not hasattr(placeholder, "count")
    assert placeholder.grad is None


class Decays(Scaled):
    """Makes weights smaller, with and without a gradient."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        for param in group["params"]:
            param.mul_(0.9)
        return 1.0


class Counted(Scaled):
    """By the number of gradients in its group."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0 / sum(param.grad is not None for param in group["params"])


class AllAtOnce(Scaled):
    """Has lists of torch, which fail where they are empty."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            grads = [param.grad for param in group["params"]]
            torch._foreach_add_(group["params"], grads, alpha=-group["lr"])


@pairs(kind=[Decays, Unguarded, AllAtOnce], mode=list(MODES), budget=["all", "tight"])
def test_a_step_that_needs_every_gradient_is_refused_without_one(
    kind: type[Scaled], mode: str, budget: str, tmp_path: Path
) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    make = (lambda net: kind(net.parameters())) if kind is AllAtOnce else (lambda net: kind(two_groups(net)))
    train_plain(plain, [make(plain)], square, range(3))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        managed = GeminiOptimizer(make(net), model, **MODES[mode])
        train(model, [managed], square, range(3))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert_same(before, dict(plain.state_dict()))
        managed.backward(square(model, 3))
        net[0][0].bias.grad = None
        with pytest.raises(ConfigError, match=r"'0\.0\.bias' and 0 more parameters have no gradient"):
            managed.step()
        assert_same(dict(model.state_dict()), before)
        managed.zero_grad()
        train(model, [managed], square, range(4, 5))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_counts_gradients_is_refused(mode: str) -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model, pytest.raises(ConfigError, match="makes something else of"):
        GeminiOptimizer(Counted(net.parameters()), model, **MODES[mode])


class Outside(Scaled):
    """By what lies outside, and changes between steps."""

    def prepare(self, params: list[Tensor]) -> None:
        self.rates = [1.0]
        self.rate = lambda: OUTSIDE["rate"]

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return self.rate() * self.rates[0]


OUTSIDE = {"rate": 1.0}


@pytest.mark.parametrize("mode", MODES)
def test_what_lies_outside_is_that_of_its_step(mode: str, tmp_path: Path) -> None:
    def run(inner: Any, step: Callable[[int], None]) -> None:
        for index in range(4):
            OUTSIDE["rate"] = 1.0 / (1 + index)
            inner.rates[0] = 2.0 * index
            step(index)
            OUTSIDE["rate"] = inner.rates[0] = 7.0

    plain, net = seeded(mlp), seeded(mlp)
    optimizer = Outside(plain.parameters())
    run(optimizer, lambda index: train_plain(plain, [optimizer], square, range(index, index + 1)))
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        inner = Outside(net.parameters())
        managed = GeminiOptimizer(inner, model, **MODES[mode])
        run(inner, lambda index: train(model, [managed], square, range(index, index + 1)))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class Rearranged(torch.optim.Adam):
    """Adam with a part of its step replaced: every other group has a hundredth of the rate."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        place = next(i for i, each in enumerate(self.param_groups) if each is group)
        for param in group["params"]:
            if param.grad is not None and place % 2:
                param.grad = param.grad.clamp(min=0)
        return super()._init_group(group, *lists)  # type: ignore[misc]


class FreshState(Scaled):
    """Puts another dict in place of a state."""

    def update(self, param: Tensor, rate: float) -> None:
        mean = self.state[param].get("mean", torch.zeros_like(param))
        self.state[param] = {"mean": 0.9 * mean + param.grad}
        param.sub_(self.state[param]["mean"], alpha=rate)


class Sgd(torch.optim.SGD):
    def _init_group(self, group: dict[str, Any], params: Any, grads: Any, *lists: Any) -> Any:
        found = super()._init_group(group, params, grads, *lists)  # type: ignore[misc]
        grads[:] = [grad.sign() for grad in grads]
        return found


class Decayed(Lion):
    """Lion whose rate falls with every step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


@pairs(kind=[Rearranged, FreshState, Sgd, Decayed], mode=list(MODES), budget=["all", "tight"])
def test_what_a_subclass_replaces_is_run(kind: Any, mode: str, budget: str, tmp_path: Path) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    train_plain(plain, [kind(two_groups(plain))], square, range(5))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        inner = kind(two_groups(net))
        if kind is Decayed and mode == "elementwise":
            with pytest.raises(ConfigError, match="writes to param_groups"):
                GeminiOptimizer(inner, model, elementwise=True)
            return
        train(model, [GeminiOptimizer(inner, model, **MODES[mode])], square, range(5))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class CountedPasses(Scaled):
    """Counts in zero_grad()."""

    passes = 1

    def zero_grad(self, *given: bool) -> None:
        self.passes += 1
        super().zero_grad(*given)

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0 / self.passes


class FirstRate(Scaled):
    """Takes a setting away once it was used."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0 if "first" not in group else float(group.pop("first"))


class WithClosure(Scaled):
    """Has the loss decide on the rate, where there is a closure."""

    loss = 1.0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.loss = 1.0 if loss is None else loss.item()
        super().step()
        return loss

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return 1.0 + self.loss


class Ascends(Scaled):
    """Runs the closure at other weights than it found, where there is one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            if param.grad is not None and closure is not None:
                param.add_(param.grad, alpha=0.05)
        if closure is not None:
            with torch.enable_grad():
                closure()
        super().step()


def step_with_closure(model: nn.Module, optimizer: Any, steps: range) -> None:
    for index in steps:

        def closure(index: int = index) -> Tensor:
            optimizer.zero_grad()
            loss = square(model, index)
            loss.backward()
            return loss

        optimizer.step(closure)


@pairs(kind=[CountedPasses, WithClosure], mode=["tried", "whole"], budget=["all", "tight"])
def test_what_a_class_does_beside_updates_is_done(
    kind: type[Scaled], mode: str, budget: str, tmp_path: Path
) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    step_with_closure(plain, kind(two_groups(plain)), range(4))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        managed = GeminiOptimizer(kind(two_groups(net)), model, **MODES[mode])
        step_with_closure(model, managed, range(4))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_that_is_to_run_at_other_weights_is_refused(mode: str) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    optimizer = Ascends(plain.parameters())
    with GeminiDDP(net) as model:
        managed = GeminiOptimizer(Ascends(net.parameters()), model, **MODES[mode])
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigError, match="runs the closure after it has changed parameters"):
            step_with_closure(model, managed, range(1))
        assert_same(dict(model.state_dict()), before)
        managed.zero_grad()
        train(model, [managed], square, range(2))  # without one it is SGD
        train_plain(plain, [optimizer], square, range(2))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("mode", MODES)
def test_a_setting_that_a_step_takes_away_is_not_kept(mode: str) -> None:
    net = seeded(mlp)
    groups = [{**group, "first": 2.0} for group in two_groups(net)]
    reason = "writes to param_groups" if mode == "elementwise" else "removes settings of a group"
    with GeminiDDP(net) as model, pytest.raises(ConfigError, match=reason):
        GeminiOptimizer(FirstRate(groups), model, **MODES[mode])


class Completes(Index):
    """Gives groups a setting when they are added."""

    added = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.added = self.added + 1
        super().add_param_group({**param_group, "order": self.added})

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return super().group_scale(group, place) / float(group["order"])


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_is_added_later_is_as_its_class_makes_it(mode: str, tmp_path: Path) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    optimizer = Completes(two_groups(plain)[:1])
    train_plain(plain, [optimizer], square, range(2))
    optimizer.add_param_group(two_groups(plain)[1])
    optimizer.zero_grad()
    train_plain(plain, [optimizer], square, range(2, 5))
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        managed = GeminiOptimizer(Completes(two_groups(net)[:1]), model, **MODES[mode])
        train(model, [managed], square, range(2))
        managed.add_param_group(two_groups(net)[1])
        managed.zero_grad()
        train(model, [managed], square, range(2, 5))
        assert [group["order"] for group in managed.param_groups] == [1, 2]
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class DecayedAdam(HybridAdam):
    def step(self, closure: Any = None, **options: Any) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure, **options)


@pytest.mark.parametrize("kind", [Decayed, DecayedAdam])
def test_a_subclass_of_ours_that_drives_itself_runs_its_step_once(kind: Any, tmp_path: Path) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    train_plain(plain, [kind(plain.parameters())], square, range(5))
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        train_plain(model, [kind(net.parameters())], square, range(5))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        if kind is DecayedAdam:
            with pytest.raises(ConfigError, match=r"has a step\(\) of its own"):
                GeminiOptimizer(kind(net.parameters()), model)


def test_a_step_that_was_put_on_the_object_is_refused() -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        inner = torch.optim.AdamW(net.parameters())
        step = inner.step
        inner.step = lambda *given: step(*given)  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="step of this AdamW was replaced"):
            GeminiOptimizer(inner, model)
        del inner.step
        torch.optim.lr_scheduler.StepLR(inner, 1)  # puts one there, too, which counts
        managed = GeminiOptimizer(inner, model)
        train(model, [managed], square, range(2))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        inner.step = lambda *given: step(*given)  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="step of this AdamW was replaced"):
            train(model, [managed], square, range(2, 3))
        assert_same(dict(model.state_dict()), before)


class SkipsNonFinite(Scaled):
    """Updates nothing where one gradient is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        if all(bool(param.grad.isfinite().all()) for param in params if param.grad is not None):
            super().step()


class Largest(Scaled):
    """Updates less where a gradient is large."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        largest = max(float(p.grad.abs().max()) for p in group["params"] if p.grad is not None)
        return 1.0 if largest < 1e5 else 0.1


@pytest.mark.parametrize("mode", ["tried", "whole"])
@pytest.mark.parametrize("kind", [SkipsNonFinite, Largest])
def test_a_step_that_one_gradient_decides_is_refused(kind: type[Scaled], mode: str) -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model, pytest.raises(ConfigError, match="something else of one of several"):
        GeminiOptimizer(kind(net.parameters()), model, **MODES[mode])


class Table2d(Scaled):
    """Has an array of numpy among its settings."""

    def group_scale(self, group: dict[str, Any], place: int) -> float:
        return float(group["table"][1500])


@pairs(mode=list(MODES), budget=["all", "tight"])
def test_an_array_among_settings_is_that_of_its_group(mode: str, budget: str, tmp_path: Path) -> None:
    def groups(net: nn.Module) -> list[dict[str, Any]]:
        tables = [np.zeros(3000), np.zeros(3000)]  # repr leaves the middle out
        tables[0][1500], tables[1][1500] = 0.5, 2.0
        return [{**group, "table": table} for group, table in zip(two_groups(net), tables, strict=True)]

    plain, net = seeded(mlp), seeded(mlp)
    train_plain(plain, [Table2d(groups(plain))], square, range(3))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        train(model, [GeminiOptimizer(Table2d(groups(net)), model, **MODES[mode])], square, range(3))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_a_state_that_is_written_to_through_the_driven_optimizer_is_refused() -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        inner = torch.optim.AdamW(net.parameters())
        managed = GeminiOptimizer(inner, model)
        train(model, [managed], square, range(2))
        param = net[0][0].weight
        assert torch.equal(inner.state[param]["exp_avg"], managed.state[param]["exp_avg"])
        with pytest.raises(StateError, match=r"optimizer\.state is read-only"):
            inner.state[param]["exp_avg"].zero_()
        with pytest.raises(StateError, match=r"optimizer\.state is read-only"):
            inner.state.clear()


def test_states_that_are_no_parameters_are_refused_by_name() -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        inner = Scaled(net.parameters())
        inner.state["steps"] = 0  # type: ignore[index, assignment]
        for options in MODES.values():
            with pytest.raises(ConfigError, match="its state has entries that are no parameter's"):
                GeminiOptimizer(inner, model, **options)


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


class Group(Id):
    def prepare(self, params: list[Tensor]) -> None:
        self.found = {id(self.param_groups[0]): 0.1}

    def scale(self, param: Tensor, place: int) -> float:
        return float(self.found.get(id(self.param_groups[0]), 1.0))


class Text(Id):
    def prepare(self, params: list[Tensor]) -> None:
        self.param_groups[0]["found"] = {str(id(params[-1])): 0.1}

    def scale(self, param: Tensor, place: int) -> float:
        return float(self.param_groups[0]["found"].get(str(id(param)), 1.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Id, Key, Closure, Weak, Text, Group])
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
