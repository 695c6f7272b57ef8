"""Optimizers of classes that nobody knows: stepped over one parameter after another, with their own bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pairs import pairs
from same_bits import assert_same
from test_rules import MODELS, mlp, num_bytes, square, tight
from test_stepped_rules import train, train_plain
from torch import Tensor, nn
from training_harness import seeded

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, StateError, checkpoint

STEPS = 12


class Unknown(torch.optim.Optimizer):
    """What the optimizers below share: a loop over parameters."""

    groups_count: ClassVar[bool] = False

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 1e-2, **({"count": 0} if self.groups_count else {}), **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.before()
        for group in self.param_groups:
            if self.groups_count:
                group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group)

    def before(self) -> None:
        pass

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class GroupCounter(Unknown):
    """Counts steps in its groups, and writes a rate that follows from them there."""

    groups_count = True

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["rate"] = group["lr"] / math.sqrt(group["count"])
        mean = state.setdefault("mean", torch.zeros_like(param))
        param.sub_(mean.lerp_(param.grad, 0.1), alpha=group["rate"])


class Attributes(Unknown):
    """Counts in itself, in a dict, and by a method that it keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count, self.sums, self.rate = 0, {"rates": [0.0]}, self.rate_of

    def rate_of(self) -> float:
        return 0.05 / self.count

    def before(self) -> None:
        self.count += 1
        self.sums["rates"].append(self.rate())

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=sum(self.sums["rates"]))


class Mixed(Unknown):
    """Keeps and does other things with matrices than with vectors; a norm for each parameter."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if param.dim() > 1:
            flat = param.grad.flatten(1)
            if "factors" not in state:
                state["factors"] = [flat.new_zeros(len(flat), len(flat)), torch.zeros_like(flat[0])]
                state["momentum"] = torch.zeros_like(param)
            left, right = state["factors"]
            left.mul_(0.9).addmm_(flat, flat.t())
            right.mul_(0.9).add_(flat.square().mean(0))
            change = (left @ flat / (1e-3 + left.norm()) / (right.sqrt() + 1e-3)).view_as(param)
            change = state["momentum"].lerp_(change, 0.3)
        else:
            change = state.setdefault("square", torch.zeros_like(param)).addcmul_(param.grad, param.grad)
            change = param.grad / (change.sqrt() + 1e-3)
        param.sub_(change / (1 + change.norm()), alpha=group["lr"])


class Slow(Unknown):
    """Weights that follow every fifth step, a gradient that is kept as it is, data that is replaced."""

    groups_count = True

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        before = state.get("before")
        change = param.grad if before is None else param.grad - 0.5 * before
        state["before"] = param.grad
        param.data = param.data.sub(change, alpha=group["lr"])
        if group["count"] % 5 == 0:
            slow = state.setdefault("slow", param.detach().clone())
            param.copy_(slow.lerp_(param, 0.5))


class Averaged(Unknown):
    """As schedule-free optimizers are: other weights in evaluation, by methods beside step()."""

    groups_count = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0, is_training=True)

    def swap(self, weight: float, is_training: bool) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                group["is_training"] = is_training
                for param in group["params"]:
                    if "fast" in self.state[param]:
                        param.lerp_(self.state[param]["fast"], weight)

    def train(self) -> None:
        self.swap(0.5, True)

    def eval(self) -> None:
        self.swap(-1.0, False)

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        assert self.param_groups[0]["is_training"]
        fast = state.setdefault("fast", param.detach().clone())
        fast.sub_(param.grad, alpha=group["lr"])
        param.lerp_(fast, 1 / group["count"])


UNKNOWN = [GroupCounter, Attributes, Mixed, Slow, Averaged]


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in net.parameters() if param.requires_grad]
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-2}]


def shared(optimizer: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def states_of(optimizer: Any) -> dict[int, Any]:
    """Return the states that are not empty."""
    return {index: state for index, state in optimizer.state_dict()["state"].items() if state}


@pairs(kind=UNKNOWN, build=list(MODELS), budget=["all", "tight"])
def test_its_bits_are_those_of_plain_training(
    kind: type[Unknown], build: str, budget: str, tmp_path: Path
) -> None:
    make_net, loss = MODELS[build]
    plain, net = seeded(make_net), seeded(make_net)
    optimizer = kind(groups_of(plain))
    train_plain(plain, [optimizer], loss, range(STEPS))
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, **options) as model:
        inner = kind(groups_of(net))
        managed = GeminiOptimizer(inner, model)
        train(model, [managed], loss, range(STEPS))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        assert_same(states_of(managed), states_of(optimizer))
        assert shared(managed) == shared(optimizer)
        if isinstance(inner, Attributes):
            assert (inner.count, inner.sums) == (optimizer.count, optimizer.sums)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_parameters_in_16_bits_keep_its_bits_too(kind: type[Unknown], tmp_path: Path) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        return model(inputs.bfloat16()).float().square().mean()

    plain, net = seeded(mlp).bfloat16(), seeded(mlp).bfloat16()
    train_plain(plain, [kind(groups_of(plain))], loss, range(STEPS))
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net))) as model:
        train(model, [GeminiOptimizer(kind(groups_of(net)), model)], loss, range(STEPS))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("kind", [GroupCounter, Mixed, Slow])
def test_it_goes_on_from_checkpoints_and_state_dicts(kind: type[Unknown], tmp_path: Path) -> None:
    plain = seeded(mlp)
    optimizer = kind(groups_of(plain))
    train_plain(plain, [optimizer], square, range(9))

    def wrap(inner: Callable[[nn.Module], Unknown]) -> tuple[GeminiDDP, GeminiOptimizer]:
        net = seeded(mlp)
        model = GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2))
        return model, GeminiOptimizer(inner(net), model)

    model, managed = wrap(lambda net: kind(groups_of(net)))
    train(model, [managed], square, range(3))
    checkpoint.save(tmp_path / "saved", model, managed)
    model.close()
    model, managed = wrap(lambda net: kind(groups_of(net)))
    checkpoint.load(tmp_path / "saved", model, managed)
    train(model, [managed], square, range(3, 6))
    weights, state = dict(model.state_dict()), managed.state_dict()
    assert sum(nbytes for _, nbytes in managed.state_dict_shard("1KiB")) > 0
    model.close()
    net = seeded(mlp)
    net.load_state_dict(weights)
    unmanaged = kind(groups_of(net))
    unmanaged.load_state_dict(state)
    train_plain(net, [unmanaged], square, range(6, 7))
    with GeminiDDP(net, **tight(tmp_path, num_bytes(net) * 2)) as model:
        managed = GeminiOptimizer(unmanaged, model)  # goes on from its state
        train(model, [managed], square, range(7, 8))
        managed.load_state_dict(managed.state_dict())
        train(model, [managed], square, range(8, 9))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
        assert_same(states_of(managed), states_of(optimizer))


class Saved(Attributes):
    """Has its state dict keep what it counts."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "sums": self.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.count, self.sums = state.pop("count"), state.pop("sums")
        super().load_state_dict(state)


class SavedAdam(torch.optim.AdamW):
    """Keeps a note beside the states of torch."""

    note = ""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.note = state.pop("note")
        super().load_state_dict(state)


def resumed(kind: Any, directory: Path, how: str, then: Callable[[Any], None]) -> dict[str, Tensor]:
    """Return the weights of six steps, by another optimizer and model from the fourth on; call ``then`` with
    the optimizer before it is saved."""
    weights: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for steps in (range(3), range(3, 6)):
        net = seeded(mlp)
        with GeminiDDP(net, **tight(directory, num_bytes(net) * 2)) as model:
            inner = kind(net.parameters())
            managed = GeminiOptimizer(inner, model)
            if steps.start and how == "checkpoint":
                checkpoint.load(directory / "saved", model, managed)
            elif steps.start:
                model.load_state_dict(weights)
                managed.load_state_dict(state)
            train(model, [managed], square, steps)
            then(inner)
            checkpoint.save(directory / "saved", model, managed)
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            state = managed.state_dict()
    return weights


@pytest.mark.parametrize(
    ("kind", "how"), [(Attributes, "checkpoint"), (Saved, "checkpoint"), (Saved, "state")]
)
def test_what_its_steps_count_in_itself_goes_on(kind: type[Unknown], how: str, tmp_path: Path) -> None:
    plain = seeded(mlp)
    optimizer = kind(plain.parameters())
    train_plain(plain, [optimizer], square, range(6))
    counts: list[int] = []
    weights = resumed(kind, tmp_path, how, lambda inner: counts.append(inner.count))
    assert counts == [3, 6]
    assert_same(weights, dict(plain.state_dict()))


def test_entries_that_a_subclass_adds_to_state_dicts_are_kept(tmp_path: Path) -> None:
    plain = seeded(mlp)
    optimizer = SavedAdam(plain.parameters())
    train_plain(plain, [optimizer], square, range(6))
    notes: list[str] = []

    def note(inner: Any) -> None:
        inner.note += "x"
        notes.append(inner.note)

    weights = resumed(SavedAdam, tmp_path, "state", note)
    assert notes == ["x", "xx"]
    assert_same(weights, dict(plain.state_dict()))


def test_a_checkpoint_with_an_attribute_that_no_step_sets_is_damaged(tmp_path: Path) -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        inner = Attributes(net.parameters())
        managed = GeminiOptimizer(inner, model)
        train(model, [managed], square, range(1))
        for name in ("update", "param_groups", "_optimizer_step_pre_hooks"):
            with pytest.raises(
                ConfigError, match=f"'{name}' is no attribute that a step of Attributes changes"
            ):
                managed.rule.check_attributes([name])
        managed.rule.check_attributes(["count", "sums"])


def test_its_other_methods_see_states_and_write_to_parameters() -> None:
    def run(net: nn.Module, optimizer: Any, inner: Any, backward: Any) -> list[float]:
        losses = []
        for step in range(4):
            backward(square(net, step))
            optimizer.step()
            optimizer.zero_grad()
            inner.eval()
            losses.append(square(net, 100).item())
            inner.train()
        return losses

    plain, net = seeded(mlp), seeded(mlp)
    optimizer = Averaged(plain.parameters())
    wanted = run(plain, optimizer, optimizer, Tensor.backward)
    assert len(set(wanted)) > 2
    with GeminiDDP(net) as model:
        inner = Averaged(net.parameters())
        managed = GeminiOptimizer(inner, model)
        assert run(model, managed, inner, managed.backward) == wanted
        managed.eval()
        assert not managed.param_groups[0]["is_training"]


class Clipped(Unknown):
    """The norm of all gradients limits the step, as a tensor or as a number of Python."""

    limit = 1.0

    def before(self) -> None:
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        self.norm = self.norm_of([grad for grad in grads if grad is not None])

    def norm_of(self, grads: list[Tensor]) -> Any:
        return torch.stack([grad.norm() for grad in grads]).norm()

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.norm > self.limit:
            param.sub_(param.grad / self.norm, alpha=group["lr"])
        else:
            param.sub_(param.grad, alpha=group["lr"])


class ClippedByNumber(Clipped):
    def norm_of(self, grads: list[Tensor]) -> Any:
        return sum(float(grad.norm()) ** 2 for grad in grads) ** 0.5


class RarelyClipped(Clipped):
    limit = 1e30


class Noisy(Unknown):
    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(torch.randn_like(param) * param.grad, alpha=group["lr"])


class CountsParameters(Unknown):
    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["seen"] = group.get("seen", 0) + 1
        param.sub_(param.grad, alpha=group["lr"])


class Keeps(Unknown):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.first = self.param_groups[0]["params"][0]

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"])


class Closed(Unknown):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Global(Unknown):
    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.state["all"]["count"] = 1
        param.sub_(param.grad, alpha=group["lr"])


REFUSED: dict[type[Unknown], str] = {
    Clipped: r"its step runs stack\(\) on several parameters",
    ClippedByNumber: "something else of one of several parameters|depends on the parameter",
    RarelyClipped: r"its step runs stack\(\) on several parameters",
    Noisy: "draws random numbers",
    CountsParameters: "groups' settings once for each parameter",
    Keeps: "'first' keeps a parameter among its attributes",
    Closed: "failed with TypeError",
    Global: "entries that are no parameter's",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_needs_all_parameters_is_refused_and_works_by_itself(
    kind: type[Unknown], tmp_path: Path
) -> None:
    net = seeded(mlp)
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        with pytest.raises(ConfigError, match=REFUSED[kind]) as refused:
            GeminiOptimizer(kind(net.parameters()), model)
        assert "without GeminiOptimizer: loss.backward(), optimizer.step()" in str(refused.value)
        assert {chunk.spec.label for chunk in model.manager.chunks.chunks} == {"param", "grad"}
        if kind in (Noisy, Closed):
            return
        plain = seeded(mlp)
        train_plain(plain, [kind(plain.parameters())], square, range(4))
        train_plain(model, [kind(net.parameters())], square, range(4))  # the way that the error names
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class Logs(Clipped):
    """Keeps a norm that limits nothing."""

    def before(self) -> None:
        super().before()
        self.norm = 0.0


class Untried(GroupCounter):
    """Takes parameters of the sizes that it knows alone."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if param.abs().max() > 1:
            raise ValueError("not one of mine")
        super().update(param, state, group)


@pytest.mark.parametrize("kind", [Logs, Untried])
def test_what_a_trial_does_not_see_can_be_said(kind: type[Unknown], tmp_path: Path) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    train_plain(plain, [kind(plain.parameters())], square, range(4))
    with GeminiDDP(net, **tight(tmp_path, 2 * num_bytes(net))) as model:
        with pytest.raises(ConfigError, match=r"stack\(\)|not one of mine"):
            GeminiOptimizer(kind(net.parameters()), model)
        with pytest.raises(ConfigError, match="contradict"):
            GeminiOptimizer(kind(net.parameters()), model, whole=True, elementwise=True)
        with pytest.raises(ConfigError, match="'norm' depends on the parameter"):
            GeminiOptimizer(Clipped(net.parameters()), model, whole=True)
        train(model, [GeminiOptimizer(kind(net.parameters()), model, whole=True)], square, range(4))
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


class Late(GroupCounter):
    """Sees all parameters in one step that no trial reaches."""

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        super().update(param, state, group)
        if group["count"] == 20:
            group["lr"] *= 1 + float(param.norm())


def test_what_comes_after_the_trial_is_not_trained_in_silence() -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        optimizer = GeminiOptimizer(Late(net.parameters()), model)
        train(model, [optimizer], square, range(19))
        optimizer.backward(square(model, 19))
        with pytest.raises(StateError, match=r"Late does .*'lr' depends on the parameter"):
            optimizer.step()
        with pytest.raises(StateError, match="half-way"):
            optimizer.step()


def test_a_step_without_any_gradient_counts() -> None:
    plain, net = seeded(mlp), seeded(mlp)
    optimizer = GroupCounter(plain.parameters())
    with GeminiDDP(net) as model:
        managed = GeminiOptimizer(GroupCounter(net.parameters()), model)
        optimizer.step()
        managed.step()
        train_plain(plain, [optimizer], square, range(2))
        train(model, [managed], square, range(2))
        assert managed.param_groups[0]["count"] == 3
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_updates_in_backward_are_refused() -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model, pytest.raises(ConfigError, match="an unknown class"):
        GeminiOptimizer(GroupCounter(net.parameters()), model, overlap="backward")
