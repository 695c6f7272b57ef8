"""Options of optimizers and wrappers that are unknown, or have no effect: both are said, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import distributed as dist
from torch import nn

from gemini import (
    CPUAdam,
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiOptimizer,
    HybridAdam,
    StateError,
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


def _differ(change: str) -> tuple[str, bool]:
    """Step with a setting that rank 1 has otherwise, then with the same one; return what was said, and
    whether the step that was refused has changed anything."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = LowLevelZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2)))
    (group,) = optimizer.param_groups
    optimizer.backward(model(torch.ones(2, 4)).square().mean())
    before = model.weight.detach().clone()
    rank = dist.get_rank()
    lr, betas = group["lr"].clone(), group["betas"]
    if change == "lr":
        group["lr"].mul_(1 + rank)
    elif change == "betas":
        group["betas"] = (0.9, 0.99 + rank / 1000)
    elif change == "clip_grad_norm":
        optimizer.clip_grad_norm = 0.5 + rank
    with pytest.raises(StateError) as caught:
        optimizer.clip_grad_by_norm(1.0 + rank) if change == "max_norm" else optimizer.step()
    is_same = torch.equal(model.weight, before)
    group["lr"].copy_(lr)
    group["betas"], optimizer.clip_grad_norm = betas, 0.5
    optimizer.step()
    return str(caught.value), is_same and not torch.equal(model.weight, before)


@pytest.mark.parametrize("change", ["lr", "betas", "clip_grad_norm", "max_norm"])
def test_settings_that_differ_by_rank_are_refused_and_the_step_can_be_repeated(change: str) -> None:
    for said, can_be_repeated in run_on_ranks(_differ, 2, change):
        assert "rank 0: " in said
        assert "rank 1: " in said
        assert can_be_repeated
