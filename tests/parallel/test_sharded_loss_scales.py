"""Over ranks, fp16 losses through several managed models: one scale for all ranks, one verdict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import pairs
from processes import run_on_ranks
from sharded_harness import SMALL_CHUNKS, WIDTH, batch, mlp, own_part
from torch import Tensor, nn

from gemini import GeminiAdamOptimizer, GeminiDDP, StateError

Trained = tuple[GeminiDDP, GeminiAdamOptimizer]


def trained(module: nn.Module, precision: str = "fp16", **options: Any) -> Trained:
    model = GeminiDDP(module, mixed_precision=precision, **SMALL_CHUNKS)
    return model, GeminiAdamOptimizer(model, lr=1e-2, eps=1e-5, hysteresis=1, **options)


def loss_of(model: nn.Module, out: Tensor) -> Tensor:
    return model(out).float().square().mean()


def weights(model: GeminiDDP) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def as_one() -> list[Tensor]:
    model, optimizer = trained(nn.Sequential(mlp(), mlp()))
    with model:
        for index in range(3):
            optimizer.backward(loss_of(model, own_part(batch(index))))
            optimizer.step()
        return weights(model)


def as_two() -> list[Tensor]:
    (a, first), (b, second) = trained(mlp()), trained(mlp(), initial_scale=4.0)
    with a, b:
        for index in range(3):
            first.backward(loss_of(b, a(own_part(batch(index)))))
            first.step()
            second.step()
        return weights(a) + weights(b)


def test_two_models_over_ranks_train_as_one_that_holds_both() -> None:
    want = run_on_ranks(as_one, 2)[0]
    for got in run_on_ranks(as_two, 2):
        assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def overflow(where: int, on: int, order: tuple[int, int], precision: str) -> tuple[bool, float]:
    """Return whether nothing was updated in a step whose gradients overflow on one rank, and the scale."""
    two = (a, first), (b, _) = trained(mlp()), trained(mlp(), precision)
    with a, b:
        before = weights(a) + weights(b)
        param = next((a, b)[where].parameters())
        factor = torch.inf if torch.distributed.get_rank() == on else 1.0
        hook = param.register_hook(lambda grad: grad * factor)
        first.backward(loss_of(b, a(own_part(batch(0)))))
        hook.remove()
        for index in order:
            two[index][1].step()
        kept = all(torch.equal(*pair) for pair in zip(weights(a) + weights(b), before, strict=True))
        assert first.loss_scale is not None
        return kept, first.loss_scale.scale


@pairs(where=[0, 1], order=[(0, 1), (1, 0)], precision=["fp16", "bf16"])
def test_an_overflow_on_one_rank_skips_both_models_on_all(
    where: int, order: tuple[int, int], precision: str
) -> None:
    assert run_on_ranks(overflow, 2, where, 1, order, precision) == [(True, 2.0**14)] * 2


def other_scales() -> str:
    """Each rank scales by the optimizer of another model."""
    (a, first), (b, second) = trained(mlp()), trained(nn.Linear(WIDTH, WIDTH), initial_scale=4.0)
    with a, b:
        optimizer = first if torch.distributed.get_rank() == 0 else second
        optimizer.backward(loss_of(b, a(own_part(batch(0)))))
        with pytest.raises(StateError) as caught:
            first.step()
        return str(caught.value)


def test_scales_that_differ_by_rank_are_refused_by_name() -> None:
    for said in run_on_ranks(other_scales, 2):
        assert "rank 0" in said
        assert "gradients scaled by 32768.0" in said
        assert "gradients scaled by 4.0" in said
