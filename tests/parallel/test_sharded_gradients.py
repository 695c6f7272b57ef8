"""What a program does to gradients between backward and step, over ranks as on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import (
    WIDTH,
    Recipe,
    assert_near,
    assert_same,
    batch,
    mlp,
    wrap,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import CPUAdam

ONE_CHUNK = {"min_chunk_size_mb": 1}
TIGHT = {"device_bytes": "600KiB", "non_model_bytes": 0}  # with a DISK tier: updates stay pending

Side = tuple[nn.Module, Callable[[Tensor], Tensor], Any]  # the module, what to call, the optimizer


class Recomputed(nn.Module):
    """A norm that every block uses again, under reentrant checkpointing: several gradients in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers:
            x = checkpoint(lambda y, f=layer: torch.tanh(self.norm(f(y))), x, use_reentrant=True)
        return x


def recomputed() -> nn.Module:
    """See :class:`Recomputed`."""
    torch.manual_seed(4)
    return Recomputed()


def _loss(side: Side, index: int) -> Tensor:
    return side[1](own_part(batch(index))).square().mean()


def _one_pass(side: Side, step: int) -> None:
    _loss(side, step).backward()


def _two_losses_of_one_pass(side: Side, step: int) -> None:
    out = side[1](own_part(batch(step)))
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def _one_is_replaced(side: Side, step: int) -> None:
    _loss(side, step).backward()
    second = list(side[0].parameters())[1]
    second.grad = torch.full(second.shape, 0.1)
    if step % 2:
        _loss(side, step + 9).backward()


def _all_are_assigned(side: Side, step: int) -> None:
    # Before anything else uses the parameters, whose updates may be pending.
    for param in side[0].parameters():
        param.grad = torch.full(param.shape, 0.25 - 0.1 * step)


def _autograd_grad_is_assigned(side: Side, step: int) -> None:
    params = list(side[0].parameters())
    for param, grad in zip(params, torch.autograd.grad(_loss(side, step), params), strict=True):
        param.grad = grad


def _one_is_given_up(side: Side, step: int) -> None:
    _loss(side, step).backward()
    next(side[0].parameters()).grad = None
    if step % 2:
        _loss(side, step + 9).backward()


def _all_are_zeroed_and_one_is_made_again(side: Side, step: int) -> None:
    _loss(side, step).backward()
    side[2].zero_grad(set_to_none=False)
    list(side[0].parameters())[2].square().mean().backward()


WAYS: dict[str, tuple[Callable[[], nn.Module], Callable[[Side, int], None]]] = {
    "recomputed": (recomputed, _one_pass),
    "two losses": (mlp, _two_losses_of_one_pass),
    "one replaced": (mlp, _one_is_replaced),
    "all assigned": (mlp, _all_are_assigned),
    "autograd.grad assigned": (mlp, _autograd_grad_is_assigned),
    "one given up": (mlp, _one_is_given_up),
    "zeroed": (mlp, _all_are_zeroed_and_one_is_made_again),
}


def _train(name: str, **options: Any) -> dict[str, Tensor]:
    build, make_gradients = WAYS[name]
    model, optimizer = wrap(build, Recipe(), **options)
    with model:
        for step in range(3):
            make_gradients((model.module, model, optimizer), step)
            optimizer.step()
        model.manager.chunks.table.check_invariants()
        return {key: value.clone() for key, value in model.state_dict().items()}


def _train_every_way(directory: str) -> dict[str, list[dict[str, Tensor]]]:
    places: list[dict[str, Any]] = [ONE_CHUNK, {"gather_bytes": 1}, {**TIGHT, "disk_dir": directory}]
    return {name: [_train(name, **place) for place in places] for name in WAYS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Tensor]]]]:
    return run_on_ranks(_train_every_way, 2, str(tmp_path_factory.mktemp("disk")), timeout=120.0)


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_of_plain_pytorch(name: str, trained: Any) -> None:
    build, make_gradients = WAYS[name]
    model = build()
    optimizer = CPUAdam(model.parameters(), **Recipe().adam)
    for step in range(3):
        make_gradients((model, model, optimizer), step)
        optimizer.step()
        optimizer.zero_grad()
    for one_chunk, few_whole, tight in (rank[name] for rank in trained):
        assert_near(one_chunk, model.state_dict())
        assert_near(few_whole, model.state_dict())
        assert_same(tight, few_whole)
