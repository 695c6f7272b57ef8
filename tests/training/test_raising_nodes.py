"""A backward pass that raised half-way leaves nothing pinned for the one after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import KIB, seeded, tight
from training_models import Around, square_loss

from gemini import GeminiDDP


def raising(weight: Tensor) -> Tensor:
    """Return a loss whose backward raises in the node that reads ``weight``."""
    x = torch.ones(4, 32, requires_grad=True) * 1
    loss = (x @ weight.t()).sum()
    x.detach().add_(1)
    return loss


def around(x: Tensor, weight: Tensor, within: Callable[[], Any]) -> Tensor:
    """Return ``x @ weight``, whose backward node calls ``within`` before it reads ``weight``."""

    def unpack(saved: Tensor) -> Tensor:
        with torch.enable_grad():
            within()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        return x @ weight


def fails(loss: Tensor) -> None:
    """Run the backward pass of a loss that raises."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[GeminiDDP]:
    """Yield a managed model, most of its chunks evicted."""
    with GeminiDDP(seeded(lambda: Around(nn.Linear(32, 32))), **tight(tmp_path, 40 * KIB)) as managed:
        yield managed


def _pinned(model: GeminiDDP) -> list[int]:
    table = model.manager.chunks.table
    return [chunk.id for chunk in model.manager.chunks.chunks if table.pins(chunk.id)]


def _assert_gradients(model: GeminiDDP, *indices: int) -> None:
    plain = seeded(lambda: Around(nn.Linear(32, 32)))
    for index in indices:
        square_loss(plain, index).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad)


def _raising_losses(model: GeminiDDP, nested: bool) -> list[Tensor]:
    """Return a loss for each of three weights whose backward node raises, itself or in a pass within it."""
    module = model.module
    losses = [raising(w) for w in (module.before.weight, module.core.weight, module.after[0].weight)]
    if not nested:
        return losses
    x = torch.ones(4, 32, requires_grad=True)
    return [around(x, module.after[2].weight, loss.backward).sum() for loss in losses]


@pytest.mark.parametrize("nested", [False, True])
def test_a_backward_right_after_some_that_raised_runs_within_the_budget(
    model: GeminiDDP, nested: bool
) -> None:
    losses = [square_loss(model, index) for index in range(2)]
    for failing in _raising_losses(model, nested):
        fails(failing)
    for loss in losses:
        loss.backward()
    assert len(_pinned(model)) <= 1  # by the last node
    _assert_gradients(model, 0, 1)


@pytest.mark.parametrize("nested", [False, True])
def test_a_raise_is_noticed_while_the_next_backward_pass_runs(model: GeminiDDP, nested: bool) -> None:
    weight, seen = model.module.after[2].weight, []
    x = torch.ones(4, 32, requires_grad=True)
    loss = around(x, weight, lambda: seen.extend(_pinned(model))).sum()
    losses = _raising_losses(model, nested)
    for failing in losses:
        fails(failing)
    loss.backward()
    assert set(seen) == {weight._slot.group.param.id}


def test_a_node_survives_passes_within_it_that_raise(model: GeminiDDP) -> None:
    module = model.module
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    plain_weight = module.core.weight.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad((x @ plain_weight).square().sum(), plain_weight)
    pinned: list[int] = []

    def within() -> None:
        for weight in (module.before.weight, module.after[0].weight):
            fails(raising(weight))
        module.after[2].weight.norm()
        pinned.extend(_pinned(model))

    losses = [around(x, module.core.weight, within).square().sum() for _ in range(3)]
    for loss in losses:
        loss.backward()
    assert torch.equal(module.core.weight.grad, want + want + want)
    assert set(pinned) == {module.core.weight._slot.group.param.id}
    assert module.before.weight.norm().item() > 0
    assert _pinned(model) == []
