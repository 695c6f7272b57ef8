"""What compiling costs is said, and never taken for what training costs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, managed_optimizer, random_batch, seeded, tight

from gemini import GeminiDDP

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def layers() -> nn.Module:
    """Layers that no list of blocks holds."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def test_a_model_without_blocks_is_compiled_as_one_operator_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with GeminiDDP(seeded(layers)) as model, caplog.at_level(logging.WARNING, logger="gemini"):
        model.compile(backend="eager")
        model(random_batch(0, 4, 32))
    said = [message for message in caplog.messages if "no blocks" in message]
    assert len(said) == 1
    assert "16.4 KiB" in said[0]


def test_a_step_in_which_anything_was_compiled_is_not_the_one_that_is_recorded(tmp_path: Path) -> None:
    @torch.compile(backend="eager")
    def compiled_loss(x: Tensor) -> Tensor:
        return (x * 2).square().mean()

    with GeminiDDP(seeded(layers), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = managed_optimizer(model)
        recorded = []
        for step in range(3):
            optimizer.backward(compiled_loss(model(random_batch(step, 4, 32))))
            optimizer.step()
            recorded.append(model.memstats() is not None)
        assert recorded == [False, True, True]
