"""``overlap="backward"``: what a program must not do, what fails, and what is given back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap_faults import failing_acquire
from test_sequences import Core
from test_updates_in_backward import Twice, adam, one_step, small
from torch import nn
from training_harness import KIB, assert_same_state, assert_within_budgets, seeded, tight
from training_models import Around, square_loss

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, StateError, checkpoint


@contextmanager
def before_step(place: Path) -> Iterator[tuple[GeminiDDP, GeminiOptimizer]]:
    """Yield a model and its optimizer after three steps and the backward pass of the fourth."""
    with small(place) as model:
        optimizer = adam(model)
        for index in range(3):
            one_step(model, optimizer, index)
        optimizer.backward(square_loss(model, 3))
        yield model, optimizer


def test_a_gradient_behind_its_update_is_refused_not_lost(tmp_path: Path) -> None:
    with GeminiDDP(seeded(lambda: Around(Twice())), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = adam(model)
        model.module.core.times = 1
        for index in range(4):
            one_step(model, optimizer, index)
        model.module.core.times = 2
        with pytest.raises(StateError, match="got a gradient, after this backward pass had updated it"):
            optimizer.backward(square_loss(model, 4))
        with pytest.raises(StateError, match="load a checkpoint"):
            optimizer.step()


def test_step_has_to_follow(tmp_path: Path) -> None:
    with before_step(tmp_path) as (model, optimizer):
        for refused in (
            lambda: optimizer.backward(square_loss(model, 4)),
            optimizer.zero_grad,
            optimizer.state_dict,
            model.state_dict,
            lambda: checkpoint.save(tmp_path / "out", model, optimizer),
            lambda: square_loss(model, 4),
        ):
            with pytest.raises(StateError, match=r"call step\(\) next"):
                refused()
        optimizer.step()
        one_step(model, optimizer, 4)


def test_what_a_program_does_in_between_is_refused_not_lost(tmp_path: Path) -> None:
    with before_step(tmp_path) as (model, optimizer):
        weight = model.module.core.layers[0].weight
        state = {key: torch.zeros_like(value) for key, value in Around(Core()).state_dict().items()}
        refused: list[Callable[[], Any]] = [
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: setattr(weight, "grad", torch.ones(32, 32)),
            model.zero_grad,
            lambda: model.load_state_dict(state),
            lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
            lambda: weight.norm(),
            lambda: weight.data.mul_(0.9),
            lambda: model.module(torch.ones(6, 32)),
        ]
        for call in refused:
            with pytest.raises(StateError, match=r"call step\(\) next"), torch.no_grad():
                call()
        optimizer.param_groups[0]["lr"] *= 2
        with pytest.raises(StateError, match="learning rate"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
        assert_within_budgets(model.stats())
        one_step(model, optimizer, 4)


def test_closed_models_and_optimizers_are_released(tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = adam(model)
    for index in range(3):
        one_step(model, optimizer, index)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    optimizer = adam(model, False)
    one_step(model, optimizer, 3)
    model.close()
    gone_model = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone_model() is None


def test_nothing_can_be_clipped(tmp_path: Path) -> None:
    with small(tmp_path) as model:
        with pytest.raises(ConfigError, match="max_norm"):
            adam(model, max_norm=1.0)
        with pytest.raises(ConfigError, match="unknown"):
            adam(model, "forward")
        optimizer = adam(model)
        optimizer.backward(square_loss(model, 0))
        with pytest.raises(ConfigError, match="cannot be clipped or read"):
            optimizer.clip_grad_by_norm(1.0)
        with pytest.raises(ConfigError, match="cannot be clipped or read"):
            optimizer.clip_grad_by_value(1.0)
    with small(tmp_path, mixed_precision="fp16") as model, pytest.raises(ConfigError, match="fp16"):
        adam(model)
    with small(tmp_path) as model:
        halves = list(model.parameters())[:2], list(model.parameters())[2:]
        _first = GeminiOptimizer(CPUAdam(halves[0]), model)
        with pytest.raises(ConfigError, match="one optimizer"):
            GeminiOptimizer(CPUAdam(halves[1]), model, overlap="backward")


@pytest.mark.parametrize("fails_at", range(1, 40, 3))
def test_what_fails_in_backward_is_done_by_step_or_refused(tmp_path: Path, fails_at: int) -> None:
    want, model = small(tmp_path), small(tmp_path)
    barrier, optimizer = adam(want, False), adam(model)
    for index in range(4):
        one_step(want, barrier, index)
        one_step(model, optimizer, index)
    place = tmp_path / "out"
    checkpoint.save(place, model, optimizer)
    failed = False
    with failing_acquire(model, fails_at):
        try:
            one_step(model, optimizer, 4)
        except OSError:
            failed = True
    if failed:
        if optimizer.incomplete:
            checkpoint.load(place, model, optimizer)
        else:
            optimizer.zero_grad()
        one_step(model, optimizer, 4)
    one_step(want, barrier, 4)
    for index in range(5, 8):
        assert one_step(model, optimizer, index) == one_step(want, barrier, index)
    assert_same_state(model.state_dict(), want.state_dict())
    model.close()
    want.close()


def test_an_exception_in_backward_needs_a_checkpoint(tmp_path: Path) -> None:
    want, model = small(tmp_path), small(tmp_path)
    barrier, optimizer = adam(want, False), adam(model)
    for index in range(4):
        one_step(want, barrier, index)
        one_step(model, optimizer, index)
    checkpoint.save(tmp_path / "out", model, optimizer)

    def interrupt(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    x = torch.randn(6, 32, requires_grad=True)
    x.register_hook(interrupt)  # the last gradient of all
    with pytest.raises(KeyboardInterrupt):
        optimizer.backward(model(x).square().mean())
    for refused in (optimizer.step, lambda: optimizer.backward(square_loss(model, 4)), lambda: model(x)):
        with pytest.raises(StateError, match="load a checkpoint"):
            refused()
    checkpoint.load(tmp_path / "out", model, optimizer)
    square_loss(model, 4).backward()  # not one that updates
    optimizer.zero_grad()
    for index in range(4, 7):
        assert one_step(model, optimizer, index) == one_step(want, barrier, index)
    assert_same_state(model.state_dict(), want.state_dict())
    model.close()
    want.close()
