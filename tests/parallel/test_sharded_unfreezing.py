"""Parameters that are unfrozen on all ranks train as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import WIDTH, Recipe, assert_near, batch, train_step, wrap
from torch import Tensor, nn

from gemini import CPUAdam, StateError

RECIPE = Recipe(clip=0.5)
STEPS = 6


def stack() -> nn.Sequential:
    """Return layers of different sizes, of which the last trains."""
    torch.manual_seed(8)
    net = nn.Sequential(
        nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    net[:-1].requires_grad_(False)
    return net


def unfreeze(net: nn.Sequential, step: int) -> None:
    if step == 2:
        net[2].bias.requires_grad_(True)
    if step == 3:
        net.requires_grad_(True)


def _train_unfreezing(options: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = wrap(stack, RECIPE, **options)
    added = [p for p in model.parameters() if not p.requires_grad]
    optimizer.add_param_group({"params": added})
    for step in range(STEPS):
        unfreeze(model.module, step)
        train_step(model, optimizer, RECIPE, step)
    weights = model.state_dict()
    model.close()
    return weights


def _plain() -> dict[str, Tensor]:
    net = stack()
    optimizer = CPUAdam(net.parameters(), **RECIPE.adam)
    for step in range(STEPS):
        unfreeze(net, step)
        net(batch(step)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"device_bytes": "600KiB", "non_model_bytes": 0, "disk": True}])
def test_ranks_unfreeze_together(options: dict[str, Any], tmp_path: Any) -> None:
    disk = {"disk_dir": str(tmp_path)} if options.pop("disk", False) else {}
    found = run_on_ranks(_train_unfreezing, 2, {**options, **disk})
    for weights in found:
        assert_near(weights, _plain())
        assert all(torch.equal(value, found[0][name]) for name, value in weights.items())


def _unfreeze_on_one(rank_of_one: int) -> str:
    model, optimizer = wrap(stack, RECIPE)
    if model.peers.share.rank == rank_of_one:
        model.module[2].requires_grad_(True)
    try:
        optimizer.backward(model(own_part(batch(0))).square().mean())
        optimizer.step()
    except StateError as error:
        return str(error)
    finally:
        model.close()
    return ""


def test_what_one_rank_alone_unfreezes_is_refused() -> None:
    for said in run_on_ranks(_unfreeze_on_one, 2, 1):
        assert "2 parameters that train" in said
        assert "4 parameters that train" in said
