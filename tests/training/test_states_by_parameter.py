"""The states of hidden matrices under Muon, and those of the parameters that AdamW updates beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_rules import WIDTH, square
from torch import nn
from training_harness import seeded

from gemini import CheckpointError, ConfigError, GeminiDDP, GeminiOptimizer, Muon, checkpoint


def hidden_matrices() -> nn.Module:
    """Hidden matrices with biases and norms between them, and a head."""
    net = nn.Sequential()
    for index in range(4):
        net.add_module(f"linear{index}", nn.Linear(WIDTH, WIDTH))
        net.add_module(f"norm{index}", nn.LayerNorm(WIDTH))
    net.add_module("lm_head", nn.Linear(WIDTH, 24))
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        square(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_matrices(net: nn.Module, *, use_muon: bool) -> Muon:
    matrices = [each.weight for each in net if isinstance(each, nn.Linear)]  # type: ignore[attr-defined]
    return Muon([{"params": matrices, "use_muon": use_muon}])


def test_a_state_of_other_groups_is_refused_by_name(tmp_path: Path) -> None:
    saved_net = seeded(hidden_matrices)
    with GeminiDDP(saved_net) as model:
        saved = GeminiOptimizer(of_matrices(saved_net, use_muon=False), model)
        train(model, saved, range(1))
        checkpoint.save(tmp_path, model, saved)
        state = saved.state_dict()
    refusal = "group 0 of the state has use_muon=False, and that of the optimizer use_muon=True"
    net = seeded(hidden_matrices)
    with GeminiDDP(net) as model:
        optimizer = GeminiOptimizer(of_matrices(net, use_muon=True), model)
        before = optimizer.state_dict()
        for each in (of_matrices(seeded(hidden_matrices), use_muon=True), optimizer):
            with pytest.raises(ConfigError, match=refusal):
                each.load_state_dict(state)
            groups = [{**group, "use_muon": None} for group in state["param_groups"]]
            with pytest.raises(ConfigError, match="use_muon=None"):
                each.load_state_dict({**state, "param_groups": groups})
        with pytest.raises(CheckpointError, match=f"was saved with another optimizer: {refusal}"):
            checkpoint.load(tmp_path, model, optimizer)
        assert optimizer.state_dict() == before
