"""A checkpoint that one rank cannot read: all ranks hear of it, and none goes on with other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from booster_models import PLUGINS, assert_same, boosted, mlp, plain
from processes import run_on_ranks
from torch import distributed as dist

from gemini import CheckpointError

BATCH = torch.ones(2, 16)


def _error_of(load: Callable[[Any, Path], None], loaded: Any, path: Path) -> str:
    """Load what rank 1 does not find: its disk is another one, say."""
    try:
        load(loaded, path if dist.get_rank() == 0 else path / "elsewhere")
    except CheckpointError as error:
        return str(error)
    return "loaded"


def _load_what_one_rank_lacks(plugin: str, directory: str) -> tuple[str, str, str]:
    booster, model, optimizer = boosted(PLUGINS[plugin](), mlp())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    where = Path(directory)
    booster.save_model(model, where / "model")
    booster.save_optimizer(optimizer, where / "optimizer")
    booster.save_lr_scheduler(scheduler, where / "scheduler")
    booster.backward(model(BATCH).square().sum(), optimizer)
    optimizer.step()
    scheduler.step()
    want, rates = plain(model.state_dict()), scheduler.state_dict()
    errors = (
        _error_of(booster.load_model, model, where / "model"),
        _error_of(booster.load_optimizer, optimizer, where / "optimizer"),
        _error_of(booster.load_lr_scheduler, scheduler, where / "scheduler"),
    )
    assert_same(model.state_dict(), want)
    assert scheduler.state_dict() == rates
    booster.backward(model(BATCH).square().sum(), optimizer)
    optimizer.step()
    return errors


@pytest.mark.parametrize("plugin", PLUGINS)
def test_load_that_fails_on_one_rank_raises_on_all_and_changes_nothing(plugin: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(_load_what_one_rank_lacks, 2, plugin, str(tmp_path))
    for here, there in zip(first, second, strict=True):
        assert "elsewhere" in there
        assert here == f"rank 1 of 2 failed: CheckpointError: {there}"


def _load_on_first_alone(directory: str) -> bool:
    booster, model, _ = boosted(PLUGINS["ddp"](), mlp(seed=1))
    booster.save_model(model, Path(directory, "model"))
    fresh = mlp(seed=2)
    if dist.get_rank() == 0:
        booster.load_model(fresh, Path(directory, "model"))
    _, replica, _ = boosted(PLUGINS["ddp"](), fresh)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), replica.parameters(), strict=True))


def test_one_rank_alone_loads_what_is_not_boosted_yet(tmp_path: Path) -> None:
    assert run_on_ranks(_load_on_first_alone, 2, str(tmp_path)) == [True, True]
