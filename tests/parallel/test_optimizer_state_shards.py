"""A managed optimizer's state a few parameters at a time, and on the first rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import distributed as dist
from torch import nn

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer, StateError


def trained(**options: Any) -> tuple[GeminiDDP, GeminiOptimizer]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 30), nn.Linear(7, 7))
    model = GeminiDDP(net, **options)
    optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
    step(model, optimizer)
    return model, optimizer


def step(model: GeminiDDP, optimizer: GeminiOptimizer) -> None:
    rows = torch.randn(12, 40, generator=torch.Generator().manual_seed(1))
    hidden = model.module[:3](own_part(rows).to(model.module[0].weight.dtype))
    optimizer.backward(hidden.float().square().mean())
    optimizer.step()


def assert_same_state(got: dict[int, Any], want: dict[int, Any]) -> None:
    assert list(got) == list(want)
    for number, entry in want.items():
        assert got[number].keys() == entry.keys()
        assert all(torch.equal(got[number][name], value) for name, value in entry.items())


@pytest.mark.parametrize("size", [1, 5000, "18KB", "1GiB"])
@pytest.mark.parametrize("precision", [None, "fp16"])
def test_shards_together_are_the_state_and_none_is_larger_than_asked(
    size: int | str, precision: str | None, tmp_path: Path
) -> None:
    model, optimizer = trained(mixed_precision=precision, disk_dir=str(tmp_path))
    shards = list(optimizer.state_dict_shard(size))
    most = {1: 1, 5000: 5000, "18KB": 18_000, "1GiB": 2**30}[size]
    for shard, nbytes in shards:
        assert nbytes == sum(tensor.nbytes for entry in shard.values() for tensor in entry.values())
        assert nbytes <= most or len(shard) == 1
    whole = {number: entry for shard, _ in shards for number, entry in shard.items()}
    want = optimizer.state_dict()
    assert_same_state(whole, want["state"])
    assert optimizer.exported_groups() == want["param_groups"]
    optimizer.load_state_dict({"state": whole, "param_groups": optimizer.exported_groups()})
    model.close()


def test_a_step_between_two_shards_is_refused() -> None:
    model, optimizer = trained()
    shards = optimizer.state_dict_shard(1)
    next(shards)
    step(model, optimizer)
    with pytest.raises(StateError, match="start again"):
        next(shards)


def test_a_size_that_is_none_is_refused_at_once() -> None:
    _, optimizer = trained()
    for size in (0, -1, "0 B"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            optimizer.state_dict_shard(size)


def _on_first() -> tuple[Any, Any, list[Any]]:
    _, optimizer = trained()
    shards = list(optimizer.state_dict_shard(5000, only_rank_0=True))
    alone, everywhere = optimizer.state_dict(only_rank_0=True), optimizer.state_dict()
    if dist.get_rank() != 0:
        assert alone == {}
        assert shards == []
    return alone, everywhere, shards


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_the_first_rank_has_the_state_where_it_alone_is_to(world_size: int) -> None:
    (alone, everywhere, shards), *_ = run_on_ranks(_on_first, world_size)
    assert_same_state(alone["state"], everywhere["state"])
    whole = {number: entry for shard, _ in shards for number, entry in shard.items()}
    assert_same_state(whole, everywhere["state"])
