"""A model that cannot be planned says so once, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, managed_optimizer, tight

from gemini import GeminiDDP


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 32)).square().mean()  # type: ignore[no-any-return]


def test_an_optimizer_of_torch_that_ends_no_step_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with GeminiDDP(network(), **tight(tmp_path, 40 * KIB)) as model:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        for _ in range(6):
            loss_of(model).backward()
            sgd.step()
            sgd.zero_grad()
        assert model.stats()["warmup"]
    (record,) = caplog.records
    assert "use GeminiOptimizer(optimizer, model)" in record.message


def test_steps_micro_batches_and_evaluations_of_a_wrapper_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with GeminiDDP(network(), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = managed_optimizer(model)
        loss_of(model).backward()
        model.zero_grad()  # given up once
        for _ in range(3):
            for _ in range(3):
                optimizer.backward(loss_of(model))
            with torch.no_grad():
                loss_of(model)
                loss_of(model.module)
            optimizer.step()
    assert not caplog.records
