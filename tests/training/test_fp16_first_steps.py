"""fp16: the default loss scale trains from the first step, and what is skipped is said once."""

from __future__ import annotations

import logging

import pytest
import torch
from test_rules import MODELS, square
from training_harness import seeded

from gemini import GeminiAdamOptimizer, GeminiDDP
from gemini.optim.gradients import INITIAL_SCALE, LossScale, LossScaleConfig


@pytest.mark.parametrize("build", MODELS)
def test_the_default_scale_skips_no_step_of_a_usual_model(
    build: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_net, loss = MODELS[build]
    with GeminiDDP(seeded(make_net), mixed_precision="fp16") as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-3)
        for step in range(3):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer.backward(loss(model, step))
            optimizer.step()
            assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert optimizer.loss_scale is not None
        assert optimizer.loss_scale.scale == INITIAL_SCALE
    assert "skipped" not in caplog.text


def test_a_loss_in_fp16_has_a_finite_gradient(caplog: pytest.LogCaptureFixture) -> None:
    with GeminiDDP(torch.nn.Linear(32, 32), mixed_precision="fp16") as model:
        optimizer = GeminiAdamOptimizer(model)
        loss = square(model, 0).half()
        assert loss.dtype == torch.float16
        before = model.state_dict()["weight"].clone()
        optimizer.backward(loss)
        optimizer.step()
        assert not torch.equal(model.state_dict()["weight"], before)


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


def test_skipped_steps_are_said_once_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scale = LossScale(LossScaleConfig(initial_scale=2.0**18))
    for overflowed in (True, True, True, True):
        scale.update(overflowed)
    assert not caplog.records
    scale.update(False)
    scale.update(False)
    said = "steps were skipped, in which gradients overflowed fp16: the loss scale went from 262144 to 32768"
    assert messages(caplog) == [(logging.WARNING, f"4 {said}")]
    scale.update(True)
    scale.update(False)
    assert [(level, text[:23]) for level, text in messages(caplog)[1:]] == [
        (logging.INFO, "1 step was skipped, in ")
    ]


def test_steps_that_no_scale_saves_are_said_at_once_and_once(caplog: pytest.LogCaptureFixture) -> None:
    scale = LossScale(LossScaleConfig(initial_scale=4, hysteresis=1))
    for _ in range(10):
        scale.update(True)
    assert [text for _, text in messages(caplog)] == [
        "3 steps in a row were skipped: gradients overflow even at the smallest loss scale, 1; they may "
        "not be finite even without a scale: check the loss, lower the learning rate, or lower min_scale"
    ]
