"""Zeros that ``zero_grad(set_to_none=False)`` leaves after a step are gradients over ranks, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import WIDTH, assert_near, assert_same, batch
from torch import Tensor, nn

from gemini import GeminiDDP, GeminiOptimizer

PLACES: list[dict[str, Any]] = [
    {"min_chunk_size_mb": 1},
    {"gather_bytes": 1},
    {"device_bytes": "600KiB", "non_model_bytes": 0},
]
CLIPS = (None, 0.01)


class Skipping(nn.Module):
    """Layers, one of which a pass may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == skipped else torch.tanh(layer(x))
        return x


def _train(
    module: nn.Module,
    optimizer: Any,
    part: Callable[[Tensor], Tensor],
    clip: Callable[[float], object],
    max_norm: float | None,
) -> None:
    for step in range(7):
        skipped = -1 if step % 3 == 0 else step % 5
        module(part(batch(step)), skipped).square().mean().backward()
        if max_norm is not None:
            clip(max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step == 4:  # of zeros alone
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def _train_managed(directory: str) -> list[dict[str, Tensor]]:
    states = []
    for max_norm, place in product(CLIPS, PLACES):
        module = Skipping()
        with GeminiDDP(module, **place, disk_dir=directory) as model:
            optimizer = GeminiOptimizer(_sgd(module), model)
            _train(model, optimizer, own_part, optimizer.clip_grad_by_norm, max_norm)
            states.append({key: value.clone() for key, value in model.state_dict().items()})
    return states


def test_zeros_of_taken_gradients_move_what_a_pass_leaves_out(tmp_path: Path) -> None:
    wanted = []
    for max_norm in CLIPS:
        module = Skipping()
        params = list(module.parameters())
        _train(
            module,
            _sgd(module),
            lambda whole: whole,
            lambda limit, params=params: nn.utils.clip_grad_norm_(params, limit),  # type: ignore[misc]
            max_norm,
        )
        wanted.append(module.state_dict())
    for states in run_on_ranks(_train_managed, 2, str(tmp_path)):
        for number, state in enumerate(states):
            assert_near(state, wanted[number // len(PLACES)])
            assert_same(state, states[number // len(PLACES) * len(PLACES)])


@pytest.mark.parametrize("max_norm", CLIPS)
def test_the_zeros_matter(max_norm: float | None) -> None:
    """Else the test above compares nothing."""
    module, other = Skipping(), Skipping()
    optimizer = _sgd(other)
    _train(module, _sgd(module), lambda whole: whole, lambda _: None, max_norm)
    optimizer.zero_grad = lambda set_to_none: torch.optim.SGD.zero_grad(optimizer)  # type: ignore[method-assign]
    _train(other, optimizer, lambda whole: whole, lambda _: None, max_norm)
    states = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    assert not all(torch.equal(one, two) for one, two in states)
