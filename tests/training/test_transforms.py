"""Transforms of torch.func, of inputs: weights are what a level below captured, and are read right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from training_harness import (
    KIB,
    Recipe,
    assert_trains_alike,
    managed_optimizer,
    moved_bytes,
    random_batch,
    seeded,
    tight,
)

from gemini import ConfigError, CPUAdam, GeminiDDP


class Views(nn.Module):
    """Smooth layers that use views of their weights; 106 KiB of model data in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers, each in another way."""
        for index, fc in enumerate(self.fc):
            x = torch.tanh(fc(x) if index % 2 else x @ fc.weight.t() + fc.bias)
        return x * self.fc[0].weight[3]


def jacobian_per_sample(m: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return vmap(jacrev(m))(x).square().mean()


def laplacian(m: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    second = vmap(hessian(lambda y: m(y).sum()))(x)
    return second.diagonal(dim1=1, dim2=2).sum(1).square().mean() + m(x).square().mean()


def tangents_and_cotangents(m: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    out, tangent = jvp(m, (x,), (x.flip(0),))
    return (out + tangent + vjp(m, x)[1](x)[0]).square().mean()


def gradient_of_the_input(m: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return grad(lambda y: m(y).square().sum())(x).sum() + jacfwd(m)(x[0]).square().mean()


USES = [jacobian_per_sample, laplacian, tangents_and_cotangents, gradient_of_the_input]


@pairs(use=USES, device_kib=[24, 40, 1024], of_the_wrapper=[True, False])
def test_a_loss_made_by_transforms_trains_alike(
    use: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
    device_kib: int,
    of_the_wrapper: bool,
    tmp_path: Path,
) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        inner: Any = model if of_the_wrapper else getattr(model, "module", model)
        return use(inner, random_batch(index, 3, 32))

    got = assert_trains_alike(Views, loss_fn, tight(tmp_path, device_kib * KIB), Recipe(steps=4))
    assert (moved_bytes(got.stats) > 0) == (device_kib < 1024)


def test_an_evaluation_within_a_transform_sees_the_update_done(tmp_path: Path) -> None:
    plain = seeded(Views)
    want = CPUAdam(plain.parameters(), **Recipe().adam)
    x = random_batch(0, 3, 32)
    with GeminiDDP(seeded(Views), **tight(tmp_path, 24 * KIB)) as model:
        got = managed_optimizer(model)
        for _ in range(4):
            for each, optimizer in ((plain, want), (model, got)):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert model.stats()["pending_updates"] > 0
        with torch.no_grad():
            assert torch.equal(vmap(model)(x), vmap(plain)(x))


def test_a_write_to_a_parameter_within_a_transform_is_refused(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Views), **tight(tmp_path, 24 * KIB)) as model:
        weight = model.module.fc[0].weight
        before = weight.detach().clone()

        def write(x: Tensor) -> Tensor:
            with torch.no_grad():
                weight.zero_()
            return x.sum()

        with pytest.raises((ConfigError, RuntimeError)):
            grad(write)(torch.ones(3))
        assert torch.equal(weight, before)
