"""State formats over ranks: blocks are those of the parameters, wherever chunks are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from torch import Tensor, nn

from gemini import GeminiDDP, GeminiOptimizer, HybridAdam, checkpoint

STEPS = 4
OPTIONS = {
    "min_chunk_size_mb": 2**-8,
    "search_range_mb": 2**-8,
    "device_bytes": "2MiB",
    "host_bytes": "4MiB",
    "non_model_bytes": 0,
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 131), nn.Tanh(), nn.Linear(131, 67), nn.Linear(67, 40)).bfloat16()


def _loss(model: nn.Module, index: int) -> Tensor:
    """A loss of a batch that all ranks have: its gradient is their mean, to the bit."""
    inputs = torch.randn(4, 40, generator=torch.Generator().manual_seed(index)).bfloat16()
    return model(inputs).float().square().mean()


def _adam(params: Any, state_dtype: str) -> HybridAdam:
    return HybridAdam(params, lr=1e-2, state_dtype=state_dtype, master_remainders=True)


def _train(
    state_dtype: str, steps: range, load: Path | None, save: Path | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    module = _net()
    with GeminiDDP(module, **OPTIONS) as model:
        optimizer = GeminiOptimizer(_adam(module.parameters(), state_dtype), model)
        if load is not None:
            checkpoint.load(load, model, optimizer)
        for step in steps:
            optimizer.backward(_loss(model, step))
            optimizer.step()
        if save is not None:
            checkpoint.save(save, model, optimizer)
        return dict(model.state_dict()), optimizer.state_dict()["state"]


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_ranks_have_the_bits_of_one_and_resume_each_others_checkpoints(
    state_dtype: str, tmp_path: Path
) -> None:
    plain = _net()
    optimizer = _adam(plain.parameters(), state_dtype)
    for step in range(STEPS):
        _loss(plain, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = optimizer.state_dict()["state"]

    def assert_plain(weights: dict[str, Tensor], states: dict[int, dict[str, Tensor]]) -> None:
        for name, value in plain.state_dict().items():
            assert torch.equal(weights[name].bfloat16(), value), name
        for number, entry in want.items():
            for name, value in entry.items():
                assert torch.equal(states[number][name], value), (number, name)

    for result in run_on_ranks(_train, 2, state_dtype, range(STEPS), None, None):
        assert_plain(*result)
    run_on_ranks(_train, 3, state_dtype, range(2), None, tmp_path / "three")
    run_on_ranks(_train, 2, state_dtype, range(2, 3), tmp_path / "three", tmp_path / "two")
    assert_plain(*_train(state_dtype, range(3, STEPS), tmp_path / "two", None))
