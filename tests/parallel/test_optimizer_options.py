"""Options of optimizers and wrappers that are unknown, or have no effect: both are said, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import (
    CPUAdam,
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiOptimizer,
    HybridAdam,
    zero_model_wrapper,
    zero_optim_wrapper,
)
from gemini.parallel import Booster, GeminiPlugin, LowLevelZeroOptimizer, LowLevelZeroPlugin


def gemini(precision: str | None, **options: Any) -> Any:
    model = GeminiDDP(nn.Linear(4, 4), mixed_precision=precision)
    return GeminiOptimizer(CPUAdam(model.parameters()), model, **options)


def gemini_adam(precision: str | None, **options: Any) -> Any:
    return GeminiAdamOptimizer(GeminiDDP(nn.Linear(4, 4), mixed_precision=precision), **options)


def low_level(precision: str | None, **options: Any) -> Any:
    adam = CPUAdam(nn.Linear(4, 4).parameters())
    return LowLevelZeroOptimizer(adam, precision=precision, **options)


def by_wrapper(precision: str | None, stage: int = 3, **options: Any) -> Any:
    config = {"mixed_precision": precision} if stage == 3 else None
    model = zero_model_wrapper(nn.Linear(4, 4), stage, config)
    return zero_optim_wrapper(model, CPUAdam(model.parameters()), **options)


def boosted(plugin: Any) -> Any:
    model = nn.Linear(4, 4)
    return Booster(plugin=plugin).boost(model, CPUAdam(model.parameters()))[1]


def by_low_level_plugin(precision: str | None, **options: Any) -> Any:
    return boosted(LowLevelZeroPlugin(precision=precision, **options))


def by_gemini_plugin(precision: str | None, **options: Any) -> Any:
    return boosted(GeminiPlugin(mixed_precision=precision, **options))


EVERY = [gemini, gemini_adam, low_level, by_wrapper, by_low_level_plugin, by_gemini_plugin]


@pytest.mark.parametrize("make", EVERY)
def test_loss_scale_options_without_fp16_are_said_once_to_have_no_effect(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for precision in (None, "bf16", "fp16"):
        make(precision)
    make("fp16", initial_scale=256.0, growth_interval=7)
    assert not caplog.messages
    for precision in (None, "bf16"):
        make(precision, initial_scale=256.0, growth_interval=7)
        (said,) = caplog.messages
        assert "initial_scale, growth_interval" in said
        assert "fp16" in said
        caplog.clear()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: CPUAdam([torch.zeros(2)], learning_rate=1), "CPUAdam"),
        (lambda: HybridAdam([torch.zeros(2)], learning_rate=1), "HybridAdam"),
        (lambda: gemini(None, learning_rate=1), "GeminiOptimizer"),
        (lambda: gemini_adam(None, learning_rate=1), "GeminiAdamOptimizer"),
        (lambda: low_level(None, learning_rate=1), "LowLevelZeroOptimizer"),
        (lambda: by_wrapper(None, learning_rate=1), "zero_optim_wrapper"),
        (lambda: by_wrapper(None, stage=1, learning_rate=1), "zero_optim_wrapper"),
        (lambda: zero_model_wrapper(nn.Linear(2, 2), 3, {"learning_rate": 1}), "zero_model_wrapper"),
        (lambda: by_gemini_plugin(None, learning_rate=1), "GeminiPlugin"),
        (lambda: by_low_level_plugin(None, learning_rate=1), "LowLevelZeroPlugin"),
    ],
)
def test_an_unknown_keyword_is_named_after_what_was_called(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\b.*'learning_rate'"):
        call()


def test_the_adam_of_one_call_takes_torchs_flags_at_their_defaults() -> None:
    optimizer = gemini_adam(None, lr=0.5, amsgrad=False, fused=None, max_norm=1.0)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.max_norm == 1.0
