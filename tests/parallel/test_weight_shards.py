"""A managed model's weights a few at a time, and on the first rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from torch import distributed as dist
from torch import nn

from gemini import ConfigError, GeminiAdamOptimizer, GeminiDDP, StateError


class Net(nn.Module):
    """Tied weights, a buffer and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Parameter(torch.randn(16, 48).t())
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.tokens(tokens)) @ self.mix.t() @ self.mix)
        return logits

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def trained(**options: Any) -> tuple[GeminiDDP, GeminiAdamOptimizer]:
    torch.manual_seed(3)
    model = GeminiDDP(Net(), **options)
    optimizer = GeminiAdamOptimizer(model)
    step(model, optimizer)
    return model, optimizer


def step(model: GeminiDDP, optimizer: GeminiAdamOptimizer) -> None:
    optimizer.backward(model(own_part(torch.arange(8))).float().square().mean())
    optimizer.step()


def assert_same_state(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        assert same, name


@pytest.mark.parametrize("size", [1, 3000, "4KB", "1GiB"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_shards_together_are_the_state_and_none_is_larger_than_asked(
    size: int | str, precision: str | None, tmp_path: Path
) -> None:
    model, _ = trained(mixed_precision=precision, disk_dir=str(tmp_path))
    shards = list(model.state_dict_shard(size))
    most = {1: 1, 3000: 3000, "4KB": 4000, "1GiB": 2**30}[size]
    for shard, nbytes in shards:
        tensors = {id(value): value for value in shard.values() if isinstance(value, torch.Tensor)}
        assert nbytes == sum(tensor.nbytes for tensor in tensors.values())
        assert nbytes <= most or len(tensors) == 1
    whole = {name: value for shard, _ in shards for name, value in shard.items()}
    assert_same_state(whole, model.state_dict())
    assert whole["head.weight"] is whole["tokens.weight"]
    model.load_state_dict(whole)
    model.close()


def test_a_step_between_two_shards_is_refused() -> None:
    model, optimizer = trained()
    shards = model.state_dict_shard(1)
    next(shards)
    step(model, optimizer)
    with pytest.raises(StateError, match="start again"):
        next(shards)


def test_a_size_that_is_none_is_refused_at_once() -> None:
    model, _ = trained()
    for size in (0, -1, "0 B"):
        with pytest.raises(ConfigError, match="max_shard_size"):
            model.state_dict_shard(size)


def _on_first() -> tuple[Any, Any, list[Any]]:
    model, _ = trained()
    shards = list(model.state_dict_shard(3000, only_rank_0=True))
    alone, everywhere = model.state_dict(only_rank_0=True), model.state_dict()
    if dist.get_rank() != 0:
        assert alone == {}
        assert shards == []
    return alone, everywhere, shards


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_the_first_rank_has_the_weights_where_it_alone_is_to(world_size: int) -> None:
    (alone, everywhere, shards), *_ = run_on_ranks(_on_first, world_size)
    assert_same_state(alone, everywhere)
    assert_same_state({name: value for shard, _ in shards for name, value in shard.items()}, everywhere)
