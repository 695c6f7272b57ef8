"""What an optimizer says of the gradients that it has: each parameter's mean over ranks, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import nn

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.parallel import LowLevelZeroOptimizer
from gemini.parallel.booster.optimizer import BoostedOptimizer

ROWS = 12


def net() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    model.unused = nn.Parameter(torch.ones(7))
    return model


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows.to(next(model.parameters()).dtype)).float().square().mean()
    return loss


def batch() -> torch.Tensor:
    return torch.randn(ROWS, 40, generator=torch.Generator().manual_seed(1))


def gemini(max_norm: float = 0.0, **options: Any) -> tuple[nn.Module, GeminiOptimizer]:
    model = GeminiDDP(net(), **options)
    return model, GeminiOptimizer(CPUAdam(model.parameters()), model, max_norm=max_norm)


def low_level(max_norm: float = 0.0, **options: Any) -> tuple[nn.Module, LowLevelZeroOptimizer]:
    model = net()
    return model, LowLevelZeroOptimizer(CPUAdam(model.parameters()), clip_grad_norm=max_norm, **options)


def expected(max_norm: float | None) -> tuple[float, list[torch.Tensor | None]]:
    model = net()
    loss_of(model, batch()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if max_norm is None else max_norm)
    return float(norm), [param.grad for param in model.parameters()]


def seen(kind: str, options: dict[str, Any], max_norm: float | None) -> tuple[Any, ...]:
    model, optimizer = {"gemini": gemini, "low_level": low_level}[kind](**options)
    optimizer.backward(loss_of(model, own_part(batch())))
    if max_norm is not None:
        optimizer.clip_grad_by_norm(max_norm)
    grads = [optimizer.get_param_grad(param) for param in model.parameters()]
    again = [optimizer.get_param_grad(param) for param in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert optimizer.get_grad_norm() is None
    optimizer.step()
    assert all(optimizer.get_param_grad(param) is None for param in model.parameters())
    return optimizer.get_grad_norm(), grads


KINDS = [
    ("gemini", {}),
    ("gemini", {"mixed_precision": "fp16"}),
    ("gemini", {"device_bytes": 256 * 1024, "host_bytes": "1MiB", "non_model_bytes": 0}),
    ("low_level", {}),
    ("low_level", {"stage": 2, "overlap_communication": True}),
    ("low_level", {"precision": "bf16"}),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_the_gradient_of_a_parameter_is_the_mean_over_ranks_as_the_update_sees_it(
    world_size: int, max_norm: float | None
) -> None:
    norm, want = expected(max_norm)
    for kind, options in KINDS:
        rough = 0.05 if {"mixed_precision", "precision"} & options.keys() else 1e-5
        for got_norm, got in run_on_ranks(seen, world_size, kind, options, max_norm):
            assert (got_norm is None) == (max_norm is None)
            assert got_norm is None or got_norm == pytest.approx(norm, rel=rough)
            for mine, theirs in zip(got, want, strict=True):
                assert (mine is None) == (theirs is None)
                if theirs is not None:
                    assert mine.shape == theirs.shape
                    assert mine.dtype == torch.float32
                    assert (mine - theirs).norm() <= rough * theirs.norm()


@pytest.mark.parametrize("make", [gemini, low_level])
def test_a_limit_that_clips_nothing_measures_the_norm_of_every_step(make: Callable[..., Any]) -> None:
    norm, _ = expected(None)
    model, optimizer = make(max_norm=math.inf)
    plain_model, plain = make()
    for trained, by in ((model, optimizer), (plain_model, plain)):
        by.backward(loss_of(trained, batch()))
        by.step()
    assert optimizer.get_grad_norm() == pytest.approx(norm)
    assert plain.get_grad_norm() is None
    pairs = zip(model.state_dict().values(), plain_model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_reading_gradients_between_micro_batches_changes_no_bit() -> None:
    for make in (gemini, low_level):
        (model, optimizer), (other, silent) = make(), make()
        for part in batch().chunk(3):
            optimizer.backward(loss_of(model, part))
            optimizer.get_param_grad(next(model.parameters()))
            silent.backward(loss_of(other, part))
        optimizer.step()
        silent.step()
        pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_boosted_optimizer_says_the_same() -> None:
    norm, want = expected(0.01)
    model = net()
    optimizer = BoostedOptimizer(CPUAdam(model.parameters()))
    optimizer.backward(loss_of(model, batch()))
    optimizer.clip_grad_by_norm(0.01)
    got = [optimizer.get_param_grad(param) for param in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))
    optimizer.step()
    assert optimizer.get_grad_norm() == norm


def test_a_parameter_of_another_model_is_refused() -> None:
    for make in (gemini, low_level):
        _, optimizer = make()
        with pytest.raises(ConfigError, match="does not belong to this optimizer"):
            optimizer.get_param_grad(nn.Parameter(torch.ones(3)))
    model = GeminiDDP(net())
    optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model, overlap="backward")
    with pytest.raises(ConfigError, match="overlap=True"):
        optimizer.get_param_grad(next(model.parameters()))
