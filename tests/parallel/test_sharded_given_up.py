"""Gradients that are given up where the ranks' passes have ended at different places."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import WIDTH, Recipe, assert_near, assert_same, batch, train_plain, wrap
from torch import Tensor, nn
from torch import distributed as dist

LAYERS = 5
ONE_CHUNK = {"min_chunk_size_mb": 1}


class Interrupted(Exception):
    """What a rank's own code raises in a pass."""


class Skipping(nn.Module):
    """Layers of which a pass may leave some out, or raise behind one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.skipped: set[int] = set()
        self.raises_behind = LAYERS
        self.raises_in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.skipped:
                x = x + torch.tanh(layer(x))
            if index == self.raises_behind:
                if not self.raises_in_backward:
                    raise Interrupted
                x.register_hook(self._raise)
        return x

    def _raise(self, _grad: Tensor) -> None:
        raise Interrupted


def _skip_others(module: Skipping, rank: int) -> bool:
    module.skipped = {2, 4} if rank else {1}
    return True


def _skip_more(module: Skipping, rank: int) -> bool:
    module.skipped = set(range(LAYERS - 1)) if rank else set()
    return True


def _raise_in_forward(module: Skipping, rank: int) -> bool:
    module.raises_behind = 2 if rank else LAYERS
    return True


def _raise_in_backward(module: Skipping, rank: int) -> bool:
    module.raises_in_backward = True
    module.raises_behind = LAYERS if rank else 2
    return True


def _leave_out(_module: Skipping, rank: int) -> bool:
    return rank == 0


WAYS: dict[str, Callable[[Skipping, int], bool]] = {
    "other layers": _skip_others,
    "one layer": _skip_more,
    "raised in forward": _raise_in_forward,
    "raised in backward": _raise_in_backward,
    "no pass": _leave_out,
}


def _train(way: str, places: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Train two steps, each after a pass whose gradients were given up."""
    found = []
    for place in places:
        model, optimizer = wrap(Skipping, Recipe(), **place)
        module = model.module
        assert isinstance(module, Skipping)
        with model:
            for step in range(2):
                if WAYS[way](module, dist.get_rank()):
                    with suppress(Interrupted):
                        optimizer.backward(model(own_part(batch(7 + step))).square().mean())
                module.skipped, module.raises_behind = set(), LAYERS
                (model if step else optimizer).zero_grad()
                optimizer.zero_grad()  # once more does no harm
                optimizer.backward(model(own_part(batch(step))).square().mean())
                optimizer.step()
            model.manager.chunks.table.check_invariants()
            found.append({key: value.clone() for key, value in model.state_dict().items()})
    model.zero_grad()  # a model that was closed waits for nobody
    return found


@pytest.mark.parametrize("way", WAYS)
def test_gradients_given_up_come_to_no_other_step(way: str) -> None:
    _, want = train_plain(Skipping, Recipe(steps=2))
    places = [{}, ONE_CHUNK, {"gather_bytes": 1}]
    if way.startswith("raised"):
        places.append({"strict_ddp_mode": True})
    ranks = run_on_ranks(_train, 2, way, places)
    for first, second in zip(*ranks, strict=True):
        assert_same(first, second)
        assert_near(first, want)
