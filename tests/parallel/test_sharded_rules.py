"""Update rules over ranks: each updates its part of every piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import SMALL_CHUNKS, assert_near, batch, mlp
from torch import Tensor

from gemini import GeminiDDP, GeminiOptimizer, Lion

STEPS = 5


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
