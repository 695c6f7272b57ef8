"""Update rules over ranks: each updates its part of every piece."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from same_bits import assert_same
from sharded_harness import SMALL_CHUNKS, assert_near, batch, mlp
from torch import Tensor, nn

from gemini import GeminiDDP, GeminiOptimizer, Lion, checkpoint

STEPS = 5
TINY = {"min_chunk_size_mb": 2**-8, "search_range_mb": 2**-8, "device_bytes": "1MiB", "non_model_bytes": 0}


def _make(rule: str, params: Any) -> torch.optim.Optimizer:
    if rule == "lion":
        return Lion(params, lr=1e-3, weight_decay=0.1)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def _train(rule: str) -> tuple[dict[str, Tensor], set[str]]:
    model = GeminiDDP(mlp(), **SMALL_CHUNKS, device_bytes="1MiB", host_bytes="4MiB", non_model_bytes=0)
    optimizer = GeminiOptimizer(_make(rule, model.parameters()), model)
    for step in range(STEPS):
        optimizer.backward(model(own_part(batch(step))).square().mean())
        optimizer.step()
    names = {name for entry in optimizer.state_dict()["state"].values() for name in entry}
    weights = model.state_dict()
    model.close()
    return weights, names


@pytest.mark.parametrize(("rule", "state"), [("lion", "exp_avg"), ("sgd", "momentum_buffer")])
def test_ranks_update_as_one(rule: str, state: str) -> None:
    plain = mlp()
    optimizer = _make(rule, plain.parameters())
    for step in range(STEPS):
        plain(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    want = {name: value.detach() for name, value in plain.state_dict().items()}
    # Where gradients cancel, their last bits choose Lion's sign.
    tolerance = 2 * STEPS * 1e-3 if rule == "lion" else 2e-5
    for weights, names in run_on_ranks(_train, 2, rule):
        assert names == {state}
        assert_near(weights, want, tolerance)


def _nadam(saved: Path, load: bool) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Train with batches that all ranks have, whose mean gradient is each rank's to the bit."""
    model = GeminiDDP(mlp(), **TINY)
    optimizer = GeminiOptimizer(torch.optim.NAdam(model.parameters()), model)
    if load:
        checkpoint.load(saved, model, optimizer)
    for step in range(3 if load else 0, STEPS if load else 3):
        optimizer.backward(model(batch(step)).square().mean())
        optimizer.step()
    if not load:
        checkpoint.save(saved, model, optimizer)
    weights, states = dict(model.state_dict()), optimizer.state_dict()["state"]
    model.close()
    return weights, states


@pytest.mark.usefixtures("one_thread")  # as many as a rank has
def test_small_states_are_those_of_ranks_that_have_no_part_of_a_parameter_too(tmp_path: Path) -> None:
    plain = mlp()
    optimizer = torch.optim.NAdam(plain.parameters())
    for step in range(STEPS):
        plain(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    want = optimizer.state_dict()["state"]
    run_on_ranks(_nadam, 2, tmp_path, False)
    for weights, states in [*run_on_ranks(_nadam, 2, tmp_path, True), _nadam(tmp_path, True)]:
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name], value), name
        for number, entry in want.items():
            assert states[number].keys() == entry.keys()
            for name, value in entry.items():
                assert torch.equal(states[number][name], value), (number, name)


class ByPlace(torch.optim.Optimizer):
    """Of a class that nobody knows: a rate by the places of groups and parameters, and by the loss."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        super().__init__([{"params": named[0::2]}, {"params": named[1::2]}], {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = 1.0 if loss is None else 1.0 + loss.item()
        for number, group in enumerate(self.param_groups):
            for place, (param, name) in enumerate(zip(group["params"], group["param_names"], strict=True)):
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    mean.lerp_(param.grad, 0.3)
                    param.sub_(mean, alpha=group["lr"] * scale * 0.5**place / (1 + number) / len(name))
        return loss


def _by_place(options: dict[str, Any]) -> dict[str, Tensor]:
    """Train with batches that all ranks have; every other step has a closure."""
    model = GeminiDDP(mlp(), **TINY)
    optimizer = GeminiOptimizer(ByPlace(model.module), model, **options)
    _steps(optimizer, model)
    weights = dict(model.state_dict())
    model.close()
    return weights


def _steps(optimizer: Any, model: nn.Module) -> None:
    def loss(step: int) -> Tensor:
        found = model(batch(step)).square().mean()
        found.backward()
        return found

    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 2:
            optimizer.step(partial(loss, step))
        else:
            loss(step)
            optimizer.step()


@pytest.mark.usefixtures("one_thread")  # as many as a rank has
@pytest.mark.parametrize("options", [{}, {"elementwise": True}], ids=["tried", "elementwise"])
def test_ranks_find_parameters_in_their_places(options: dict[str, Any]) -> None:
    plain = mlp()
    _steps(ByPlace(plain), plain)
    for weights in run_on_ranks(_by_place, 2, options):
        assert_same(weights, dict(plain.state_dict()))


class ByLoss(torch.optim.Optimizer):
    """Has the loss decide on the rate; of a class that is not known."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = torch.ones(()) if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=group["lr"] * loss.item())
        return loss


def _step_by_loss(model: nn.Module, optimizer: Any, inputs: list[Tensor]) -> list[float]:
    backward = getattr(optimizer, "backward", Tensor.backward)

    def closure(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        backward(loss)
        return loss.detach()

    return [float(optimizer.step(partial(closure, x))) for x in inputs]


def _train_by_loss(options: dict[str, bool]) -> tuple[dict[str, Tensor], list[float]]:
    model = GeminiDDP(mlp(), **TINY)
    optimizer = GeminiOptimizer(ByLoss(model.parameters()), model, **options)
    losses = _step_by_loss(model, optimizer, [own_part(batch(step)) for step in range(STEPS)])
    weights = dict(model.state_dict())
    model.close()
    return weights, losses


@pytest.mark.parametrize("options", [{}, {"elementwise": True}, {"whole": True}], ids=str)
def test_a_class_gets_the_loss_of_the_whole_batch_from_its_closure(options: dict[str, bool]) -> None:
    plain = mlp()
    want = _step_by_loss(plain, ByLoss(plain.parameters()), [batch(step) for step in range(STEPS)])
    every = run_on_ranks(_train_by_loss, 2, options)
    for weights, _ in every:
        assert_near(weights, {name: value.detach() for name, value in plain.state_dict().items()}, 2e-6)
    for whole, *own in zip(want, *(losses for _, losses in every), strict=True):
        assert own[0] != own[1]
        assert sum(own) / 2 == pytest.approx(whole, abs=2e-6)
