"""A torch Adam's state means the same under GeminiOptimizer, or is refused before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_harness import KIB, assert_same_state, seeded, tight

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, HybridAdam

State = dict[str, Any]
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def square(model: nn.Module, step: int) -> torch.Tensor:
    values: torch.Tensor = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)))
    return values.square().mean()


def torch_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        square(model, step).backward()
        optimizer.step()


def managed(tmp_path: Path, weights: State | None = None) -> tuple[GeminiDDP, GeminiOptimizer]:
    """Return a managed model and optimizer that has made a step, so that there is something to lose."""
    model = GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB))
    optimizer = GeminiOptimizer(HybridAdam(model.parameters(), **SETTINGS), model)
    optimizer.backward(square(model, 9))
    optimizer.step()
    if weights is not None:
        model.load_state_dict(weights)
    return model, optimizer


def torch_state(adam: type[torch.optim.Optimizer], **settings: Any) -> tuple[nn.Module, Any]:
    """Return an unmanaged model and its optimizer after two steps."""
    model = seeded(build)
    optimizer = adam(model.parameters(), **SETTINGS, **settings)
    torch_steps(model, optimizer, range(2))
    return model, optimizer


@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_training_goes_on_as_the_torch_optimizer_would(
    adam: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    plain, other = torch_state(adam)
    model, optimizer = managed(tmp_path, plain.state_dict())
    with model:
        optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["adamw_mode"] == (adam is torch.optim.AdamW)
        for step in range(2, 4):
            optimizer.backward(square(model, step))
            optimizer.step()
        torch_steps(plain, other, range(2, 4))
        for name, value in model.state_dict().items():
            # torch rounds its updates in another order; the wrong kind of decay is off by 1e-4 and more.
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adam", [torch.optim.Adam, torch.optim.AdamW])
def test_the_kind_of_decay_survives_the_way_back_to_torch(
    adam: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    plain, other = torch_state(adam)
    model, optimizer = managed(tmp_path)
    with model:
        optimizer.load_state_dict(other.state_dict())
        back = torch.optim.Adam(plain.parameters())
        back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert back.param_groups[0]["decoupled_weight_decay"] == (adam is torch.optim.AdamW)


def test_settings_that_others_put_into_a_group_come_along_as_copies(tmp_path: Path) -> None:
    _, other = torch_state(torch.optim.AdamW)
    torch.optim.lr_scheduler.LinearLR(other)
    state = other.state_dict()
    model, optimizer = managed(tmp_path)
    with model:
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["initial_lr"] == SETTINGS["lr"]
        assert "amsgrad" not in optimizer.param_groups[0]
        assert state["param_groups"][0]["amsgrad"] is False


def _flagged(flag: str) -> Callable[[State], State]:
    return lambda state: {**state, "param_groups": [{**state["param_groups"][0], flag: True}]}


def _without(name: str) -> Callable[[State], State]:
    def edit(state: State) -> State:
        last = {key: value for key, value in state["state"][3].items() if key != name}
        return {**state, "state": {**state["state"], 3: last}}

    return edit


def _betas(state: State) -> State:
    return {**state, "param_groups": [{**state["param_groups"][0], "betas": (0.9, 1.5)}]}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_flagged("amsgrad"), "amsgrad=True is not supported"),
        (_flagged("maximize"), "maximize=True is not supported"),
        (_without("exp_avg"), r"'1\.bias' has no exp_avg: not an Adam state"),
        (_without("step"), r"'1\.bias' has no step: not an Adam state"),
        (_betas, "betas are"),
    ],
)
def test_a_state_that_cannot_be_continued_changes_nothing(
    edit: Callable[[State], State], message: str, tmp_path: Path
) -> None:
    _, other = torch_state(torch.optim.AdamW)
    model, optimizer = managed(tmp_path)
    with model:
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ConfigError, match=message):
            optimizer.load_state_dict(edit(other.state_dict()))
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for index, entry in before["state"].items():
            assert_same_state(after["state"][index], entry)


def test_parameters_that_never_had_a_gradient_have_an_empty_state(tmp_path: Path) -> None:
    _, other = torch_state(torch.optim.AdamW)
    state = other.state_dict()
    state["state"][3] = {}
    model, optimizer = managed(tmp_path)
    with model:
        optimizer.load_state_dict(state)
        assert set(optimizer.state_dict()["state"]) == {0, 1, 2}
