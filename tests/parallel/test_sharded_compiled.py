"""Compiled blocks over ranks: all parameters of a block are gathered at once, and no bit changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import WIDTH, Recipe, assert_same, train_sharded, train_step, wrap
from torch import Tensor, nn

TRACED = {"backend": "aot_eager"}  # has the bits of operators that nobody compiled


class Block(nn.Module):
    """Two layers and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's sum."""
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def blocks() -> nn.Module:
    """Return a model of blocks."""
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, WIDTH))


def compiled_blocks() -> nn.Module:
    """Return the same, with compiled blocks."""
    model = blocks()
    for index in range(3):
        model[index].compile(**TRACED)
    return model


def _train_all_ways(directory: str) -> dict[str, Any]:
    tight = {"device_bytes": "800KiB", "disk_dir": directory, "non_model_bytes": 0}
    recipe = Recipe(clip=0.05, accumulate=2)
    return {
        "nothing compiled": train_sharded(blocks, recipe),
        "all on DEVICE": train_sharded(compiled_blocks, recipe),
        "few whole": train_sharded(compiled_blocks, recipe, gather_bytes=1),
        "DISK": train_sharded(compiled_blocks, recipe, **tight),
        "later": _compiled_later(recipe),
    }


def _compiled_later(recipe: Recipe) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = wrap(blocks, recipe, gather_bytes=1)
    with model:
        losses = []
        for step in range(recipe.steps):
            if step == 1:
                model.compile(**TRACED)
            losses += train_step(model, optimizer, recipe, step)
        return losses, {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.dear("the compiler runs on each rank")
def test_compiled_blocks_over_ranks(tmp_path: Path) -> None:
    for result in run_on_ranks(_train_all_ways, 2, str(tmp_path), timeout=300.0):
        want_losses, want = result.pop("nothing compiled")
        for losses, weights in result.values():
            assert losses == want_losses
            assert_same(weights, want)
