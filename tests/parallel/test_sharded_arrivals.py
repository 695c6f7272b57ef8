"""Parameters that come into a module on all ranks are cut among them like the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import WIDTH, Recipe, assert_near, batch, train_step, wrap
from torch import Tensor, nn
from torch import distributed as dist

import gemini
from gemini import ConfigError, CPUAdam, GeminiOptimizer, checkpoint

RECIPE = Recipe(clip=0.5)
STEPS = 6


def stack() -> nn.Sequential:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def change(net: nn.Sequential, step: int, seed: int = 0) -> list[nn.Parameter]:
    """Add a layer that is larger than all others, then replace the first one; ``seed``: of their values."""
    torch.manual_seed(seed + step)
    if step == 2:
        net.append(nn.Sequential(nn.Linear(WIDTH, 5 * WIDTH, bias=False), nn.BatchNorm1d(5 * WIDTH)))
        net.append(nn.Linear(5 * WIDTH, WIDTH))
        return [*net[-2].parameters(), *net[-1].parameters()]
    if step == 4:
        net[0] = nn.Linear(WIDTH, WIDTH, bias=False)
        return list(net[0].parameters())
    return []


def plain() -> dict[str, Tensor]:
    net = stack()
    optimizer = CPUAdam(net.parameters(), **RECIPE.adam)
    for step in range(STEPS):
        if new := change(net, step):
            optimizer.add_param_group({"params": new})
        half = [net(part).square().mean() / 2 for part in batch(step).chunk(2)]  # batch norm sees parts
        sum(half).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def _train(options: dict[str, Any], saved: str) -> dict[str, Tensor]:
    model, optimizer = wrap(stack, RECIPE, **options)
    for step in range(STEPS):
        if new := change(model.module, step, seed=dist.get_rank()):  # the first rank's values count
            optimizer.add_param_group({"params": new})
        train_step(model, optimizer, RECIPE, step)
    checkpoint.save(saved, model, optimizer)
    weights = model.state_dict()
    model.close()
    names = [name for name, _ in model.module.named_parameters()]
    return {name: weights[name] for name in names}


@pytest.mark.parametrize("options", [{}, {"device_bytes": "900KiB", "non_model_bytes": 0, "disk": True}])
def test_ranks_take_them_in_together(options: dict[str, Any], tmp_path: Any) -> None:
    options = dict(options)
    disk = {"disk_dir": str(tmp_path)} if options.pop("disk", False) else {}
    saved = str(tmp_path / "saved")
    found = run_on_ranks(_train, 2, {**options, **disk}, saved)
    want = plain()
    for weights in found:
        assert_near(weights, want)
        assert all(torch.equal(value, found[0][name]) for name, value in weights.items())
    net = stack()
    first = [*net[2].parameters()]
    added = change(net, 2)
    head = change(net, 4)
    with gemini.GeminiDDP(net) as model:
        adam = CPUAdam(first, **RECIPE.adam)
        for group in (added, head):
            adam.add_param_group({"params": group})
        checkpoint.load(saved, model, GeminiOptimizer(adam, model))
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in found[0].items())


def _refusal(model: gemini.GeminiDDP, call: Callable[[], object]) -> str:
    """Return what ``call`` is refused with; close the model."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    finally:
        model.close()
    return ""


def _differ() -> str:
    model, optimizer = wrap(stack, RECIPE)
    train_step(model, optimizer, RECIPE, 0)
    model.module.append(nn.Linear(WIDTH, WIDTH * (1 + dist.get_rank())))
    return _refusal(model, gemini.handle_of(model).adopt)


def test_ranks_that_take_in_different_things_are_refused() -> None:
    for said in run_on_ranks(_differ, 2):
        assert "have another chunk layout" in said


def _with_gradient() -> str:
    model, optimizer = wrap(stack, RECIPE)
    model.module.append(nn.Linear(WIDTH, WIDTH))
    model(own_part(batch(0))).square().mean().backward()
    group = {"params": list(model.module[-1].parameters())}
    return _refusal(model, lambda: optimizer.add_param_group(group))


def test_gradients_of_one_rank_alone_are_refused() -> None:
    for said in run_on_ranks(_with_gradient, 2):
        assert "zero_grad()" in said


def _exchange() -> str:
    model, optimizer = wrap(stack, RECIPE)
    model.module.append(nn.GELU())
    model.module.append(nn.Linear(WIDTH, WIDTH))
    optimizer.add_param_group({"params": list(model.module[-1].parameters())})
    net, other = model.module, 2 + 2 * dist.get_rank()
    net[0], net[other] = net[other], net[0]
    return _refusal(model, gemini.handle_of(model).adopt)


def test_ranks_that_exchange_other_layers_are_refused() -> None:
    for said in run_on_ranks(_exchange, 2):
        assert "have another chunk layout" in said
