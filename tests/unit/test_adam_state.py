"""State dicts of CPUAdam and of torch, loaded into each other."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.optim.kernel_adam import CPUAdam


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(7, 16)).square().mean().backward()
        optimizer.step()


def ours(model: nn.Module, **options: Any) -> CPUAdam:
    return CPUAdam(model.parameters(), lr=0.01, weight_decay=0.1, **options)


def torchs(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("first", [ours, torchs])
@pytest.mark.parametrize("second", [ours, torchs])
def test_either_continues_the_others_training(first: Any, second: Any) -> None:
    want = small_model()
    train(want, torchs(want), 0, 8)
    model = small_model()
    optimizer = first(model)
    train(model, optimizer, 0, 4)
    successor = second(model)
    successor.load_state_dict(through_file(optimizer.state_dict()))
    if second is torchs:
        successor.param_groups[0]["fused"] = (
            True  # a loaded group replaces torch's settings; ours has no such
        )
    train(model, successor, 4, 8)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters(), strict=True))


def test_state_dict_looks_like_torchs() -> None:
    model = small_model()
    mine, theirs = ours(model), torchs(model)
    for optimizer in (mine, theirs):
        train(model, optimizer, 0, 2)
    got, want = mine.state_dict(), theirs.state_dict()
    assert got["state"].keys() == want["state"].keys()
    for key, state in want["state"].items():
        assert list(got["state"][key]) == list(state)
        assert all(got["state"][key][name].dtype == value.dtype for name, value in state.items())
        assert all(got["state"][key][name].shape == value.shape for name, value in state.items())
    assert got["param_groups"][0]["params"] == want["param_groups"][0]["params"]


def test_loading_adopts_the_settings_of_the_saved_groups() -> None:
    model = small_model()
    saved = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.1, 0.2)).state_dict()
    optimizer = ours(model, bias_correction=False)
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["adamw_mode"]) == (0.5, (0.1, 0.2), False)
    assert group["bias_correction"] is False  # torch has no such setting: ours stays
    assert not {"amsgrad", "foreach", "fused", "maximize"} & group.keys()


def test_exported_adam_mode_is_torchs_coupled_weight_decay() -> None:
    model = small_model()
    adam = torch.optim.Adam(model.parameters())
    adam.load_state_dict(ours(model).state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is True
    adam.load_state_dict(ours(model, adamw_mode=False).state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is False


def test_loaded_state_is_a_copy() -> None:
    model, other = small_model(), small_model()
    optimizer = ours(model)
    train(model, optimizer, 0, 2)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved["state"])
    successor = ours(other)
    successor.load_state_dict(saved)
    train(other, successor, 2, 4)
    for key, state in before.items():
        assert all(torch.equal(saved["state"][key][name], value) for name, value in state.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_moments_of_16_bit_parameters_keep_every_bit(dtype: torch.dtype) -> None:
    param = torch.randn(50).to(dtype).requires_grad_()
    param.grad = torch.randn(50).to(dtype)
    optimizer = CPUAdam([param])
    optimizer.step()
    successor = CPUAdam([param])
    successor.load_state_dict(through_file(optimizer.state_dict()))
    for name in ("exp_avg", "exp_avg_sq"):
        assert successor.state[param][name].dtype == torch.float32
        assert torch.equal(successor.state[param][name], optimizer.state[param][name])


def test_moments_are_put_into_the_parameters_memory_order() -> None:
    values, grads = torch.randn(8, 16), torch.randn(3, 8, 16)
    plain = values.clone().requires_grad_()
    permuted = values.t().clone(memory_format=torch.contiguous_format).t().requires_grad_()
    want, before = CPUAdam([plain]), CPUAdam([permuted])
    for grad in grads[:2]:
        plain.grad = grad
        want.step()
    with torch.no_grad():
        permuted.copy_(plain)
    before.load_state_dict(want.state_dict())
    plain.grad = permuted.grad = grads[2]
    want.step()
    before.step()
    assert torch.equal(permuted, plain)


def test_users_load_hooks_see_and_may_change_the_state() -> None:
    model = small_model()
    optimizer = ours(model)
    train(model, optimizer, 0, 1)
    saved = optimizer.state_dict()

    def zero_moments(_optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        cleared = {
            key: {name: torch.zeros_like(value) for name, value in values.items()}
            for key, values in state["state"].items()
        }
        return {**state, "state": cleared}

    successor = ours(model)
    successor.register_load_state_dict_pre_hook(zero_moments)
    successor.load_state_dict(saved)
    assert all(not state["exp_avg"].any() for state in successor.state.values())


@pytest.mark.parametrize("flag", ["amsgrad", "maximize"])
def test_state_that_asks_for_another_algorithm_is_refused(flag: str) -> None:
    model = small_model()
    saved = torch.optim.AdamW(model.parameters(), lr=0.7, **{flag: True}).state_dict()
    optimizer = ours(model)
    with pytest.raises(ConfigError, match=flag):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_foreign_or_misfit_state_is_refused_and_nothing_changes() -> None:
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, sgd, 0, 1)
    optimizer = ours(model)
    train(model, optimizer, 0, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigError, match="exp_avg"):
        optimizer.load_state_dict(sgd.state_dict())
    misfit = copy.deepcopy(before)
    misfit["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ConfigError, match=r"\(2, 2\)"):
        optimizer.load_state_dict(misfit)
    after = optimizer.state_dict()
    for key, state in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in state.items())


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_what_a_user_keeps_beside_the_states_is_saved_and_loaded_as_in_torch(state_dtype: str) -> None:
    model = small_model()
    optimizer = ours(model, state_dtype=state_dtype)
    for value in (1, {"exp_avg": "mine"}, torch.ones(2)):
        optimizer.state["mine"] = value
        train(model, optimizer, 0, 2)
        saved = optimizer.state_dict()
        assert saved["state"]["mine"] is value
        for successor in (ours(model), torch.optim.AdamW(model.parameters()), copy.deepcopy(optimizer)):
            successor.load_state_dict(saved)
            assert successor.state["mine"] is value
