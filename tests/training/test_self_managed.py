"""Optimizers of ours over managed parameters drive themselves: no GeminiOptimizer is made by the program."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from same_bits import assert_same
from test_rules import MODELS, Loss, Make, mlp, num_bytes, square, tight
from torch import nn
from training_harness import seeded

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, HybridAdam, Lamb, Lion, Muon, checkpoint

STEPS = 5
OURS: dict[str, Make] = {
    "hybrid adam": lambda params: HybridAdam(params, lr=1e-2, nvme_offload_fraction=1.0),
    "cpu adam": lambda params: CPUAdam(params, lr=1e-2, adamw_mode=False, weight_decay=0.1),
    "lion": lambda params: Lion(params, lr=1e-3),
    "lamb": lambda params: Lamb(params, lr=1e-2),
    "muon": lambda params: Muon([(str(number), param) for number, param in enumerate(params)]),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: range) -> list[float]:
    """The loop of a program that knows nothing of management."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses


@pairs(build=list(MODELS), ours=list(OURS), budget=["all", "tight"])
def test_a_loop_of_plain_torch_has_its_losses(build: str, ours: str, budget: str, tmp_path: Path) -> None:
    (make_net, loss), make = MODELS[build], OURS[ours]
    plain = seeded(make_net)
    wanted = train(plain, make(plain.parameters()), loss, range(STEPS))
    net = seeded(make_net)
    options = tight(tmp_path, 2 * num_bytes(net)) if budget == "tight" else {}
    with GeminiDDP(net, placement_policy="auto", **options) as model:
        assert train(model, make(model.parameters()), loss, range(STEPS)) == wanted
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_an_optimizer_of_before_wrapping_goes_on_under_management() -> None:
    plain, net = seeded(mlp), seeded(mlp)
    wanted = train(plain, HybridAdam(plain.parameters()), square, range(STEPS))
    optimizer = HybridAdam(net.parameters())
    losses = train(net, optimizer, square, range(2))
    optimizer.zero_grad()
    with GeminiDDP(net) as model:
        for step in range(2, STEPS):
            optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 ** (step // 2)
            value = square(model, step)
            value.backward()
            optimizer.step()
            losses.append(value.item())
    assert losses == wanted


def test_states_groups_hooks_and_files_are_those_of_any_optimizer(tmp_path: Path) -> None:
    net = seeded(mlp)
    calls: list[object] = []
    with GeminiDDP(net) as model:
        layers = list(net)
        optimizer = HybridAdam(layers[0].parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda given, *_: calls.append(given))
        train(model, optimizer, square, range(1))
        optimizer.add_param_group({"params": list(nn.ModuleList(layers[1:]).parameters()), "lr": 1e-3})
        train(model, optimizer, square, range(1, 3))
        assert calls == [optimizer] * 3
        state = optimizer.state_dict()
        assert len(state["state"]) == len(list(net.parameters()))
        assert float(optimizer.state[layers[0][0].weight]["step"]) == 3.0
        checkpoint.save(tmp_path, model, optimizer)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = train(model, optimizer, square, range(3, 5))
        checkpoint.load(tmp_path, model, optimizer)
        assert_same(dict(model.state_dict()), before)
        assert train(model, optimizer, square, range(3, 5)) == wanted
        optimizer.load_state_dict(state)
        assert float(optimizer.state[layers[0][0].weight]["step"]) == 3.0
        plain = torch.optim.AdamW([p.detach().clone() for p in net.parameters()])
        plain.load_state_dict({**state, "param_groups": [dict(plain.state_dict()["param_groups"][0])]})
        with pytest.raises(ConfigError, match="cannot be copied or pickled"):
            copy.deepcopy(optimizer)


@pytest.mark.parametrize("drives_itself", [True, False])
def test_a_named_group_that_comes_later_is_split_for_muon(drives_itself: bool) -> None:
    def run(net: Any, optimizer: Any) -> list[float]:
        losses = train(net, optimizer, square, range(2))
        with pytest.raises(ConfigError, match=r"has shape \(\d+,\); put it into"):
            optimizer.add_param_group({"params": [net[2][0].bias], "use_muon": True})
        with pytest.raises(ConfigError, match=r"names .* model\.named_parameters\(\)"):
            optimizer.add_param_group({"params": net[2].parameters()})
        late = [*net[1].named_parameters(), ("0.bias", net[0][0].bias)]  # in the second of its two groups
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": late})
        assert len(optimizer.param_groups) == 2
        optimizer.add_param_group({"params": net[1].named_parameters(), "lr": 0.1, "adam_lr": 0.2})
        found = [(group["use_muon"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
        assert found[2:] == [(True, 0.1, 1), (False, 0.2, 1)]
        return losses + train(net, optimizer, square, range(2, STEPS))

    plain = seeded(mlp)
    wanted = run(plain, Muon(plain[0].named_parameters()))
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        muon = Muon(net[0].named_parameters())
        optimizer = muon if drives_itself else GeminiOptimizer(muon, model)
        assert run(net, optimizer) == wanted
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_fp16_and_clipping_go_through_the_optimizer() -> None:
    def run(make: Any) -> dict[str, torch.Tensor]:
        net = seeded(mlp)
        with GeminiDDP(net, mixed_precision="fp16") as model:
            optimizer = make(model)
            for step in range(3):
                optimizer.backward(square(model, step))
                optimizer.clip_grad_by_norm(0.1)
                optimizer.step()
            return {name: value.clone() for name, value in model.state_dict().items()}

    wanted = run(lambda model: GeminiOptimizer(HybridAdam(model.parameters()), model))
    assert_same(run(lambda model: HybridAdam(model.parameters())), wanted)


def test_there_is_one_driver_of_an_optimizer() -> None:
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        optimizer = HybridAdam(net.parameters())
        optimizer.zero_grad()  # its own, which has made no step, gives way
        given = GeminiOptimizer(optimizer, model)
        square(model, 0).backward()
        with pytest.raises(ConfigError, match=r"is managed; .*GeminiOptimizer"):
            optimizer.step()
        given.step()
        assert not hasattr(optimizer, "backward")
    net = seeded(mlp)
    with GeminiDDP(net) as model:
        optimizer = HybridAdam(net.parameters())
        square(model, 0).backward()
        with pytest.raises(ConfigError, match="leave grad_scale out"):
            optimizer.step(grad_scale=2.0)
        optimizer.step()
        with pytest.raises(ConfigError, match="has already updated the managed model"):
            GeminiOptimizer(optimizer, model)


def test_a_plain_optimizer_has_nothing_of_it() -> None:
    optimizer = HybridAdam(mlp().parameters())
    assert not hasattr(optimizer, "backward")
    assert not hasattr(optimizer, "loss_scale")
    copy.deepcopy(optimizer)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_given_up_are_in_no_update(set_to_none: bool) -> None:
    plain, net = seeded(mlp), seeded(mlp)
    with GeminiDDP(net) as model:
        for one in (plain, model):
            optimizer = HybridAdam(one.parameters(), lr=1e-2)
            for step in range(3):
                square(one, step + 7).backward()
                optimizer.zero_grad(set_to_none)
                square(one, step).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))
