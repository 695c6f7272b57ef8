"""Gradients that travel in 16 bits: half the bytes, divided first, added in fp32; no budget changes a bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import (
    Recipe,
    assert_near,
    assert_same,
    mlp,
    train_plain,
    train_sharded,
    train_step,
    wrap,
)
from torch import Tensor, nn
from torch import distributed as dist

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.runtime.config import GeminiConfig

RECIPE = Recipe(clip=0.05)


def _train(precision: str | None, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        name: train_sharded(mlp, RECIPE, mixed_precision=precision, **options)
        for name, options in ways.items()
    }


@pytest.mark.parametrize(("precision", "travels_in"), [(None, "bf16"), ("bf16", "bf16"), ("fp16", "fp16")])
@pytest.mark.parametrize("world", [2, 3])
def test_16_bit_gradients_train_alike_in_any_budget(
    precision: str | None, travels_in: str, world: int, tmp_path: Path
) -> None:
    tight = {"device_bytes": "600KiB", "disk_dir": str(tmp_path), "non_model_bytes": 0}
    ways = {
        name: {**way, "reduce_dtype": travels_in}
        for name, way in {"all": {}, "DISK": tight, "one chunk": {"min_chunk_size_mb": 1}}.items()
    }
    ways["fp32"] = {}
    results = run_on_ranks(_train, world, precision, ways, timeout=300.0)
    first = results[0]["all"][1]
    for result in results:
        for name in ("all", "DISK", "one chunk"):
            assert_same(result[name][1], first)
    if precision is None:  # gradients of 16 bits lose nothing, divided by two
        assert any(not torch.equal(value, results[0]["fp32"][1][name]) for name, value in first.items())
    _, want = train_plain(mlp, RECIPE)
    assert_near(first, want, tolerance=2e-2)


def _reduced_bytes(reduce_dtype: str | None) -> int:
    model, optimizer = wrap(mlp, RECIPE, reduce_dtype=reduce_dtype)
    with model:
        train_step(model, optimizer, RECIPE, 0)
        assert model.peers is not None
        return model.peers.traffic.reduced


def test_16_bit_gradients_take_half_the_bytes() -> None:
    full, half = (run_on_ranks(_reduced_bytes, 2, dtype) for dtype in (None, "bf16"))
    assert [2 * count for count in half] == full


def _mean(gradients: list[float], reduce_dtype: str, precision: str) -> float:
    """Return the mean of what the ranks' gradients are, as an optimizer with lr 1 shows it."""
    line = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(line.weight)
    model = GeminiDDP(line, mixed_precision=precision, reduce_dtype=reduce_dtype)
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1.0), model, initial_scale=1)
    with model:
        optimizer.backward(model(torch.tensor([[gradients[dist.get_rank()]]])).sum())
        norm: Tensor | float = optimizer.clip_grad_by_norm(1e9)
        return float(norm)


def test_parts_are_divided_before_they_are_rounded() -> None:
    # Their fp16 sum would be infinite.
    assert run_on_ranks(_mean, 3, [60000.0, 60000.0, 30000.0], "fp16", "fp16") == [50000.0] * 3


def test_parts_are_added_in_fp32() -> None:
    # In bf16 512 + 1 is 512.
    got = run_on_ranks(_mean, 3, [1536.0, 3.0, 3.0], "bf16", "bf16")
    assert got == [514.0] * 3


def test_fp16_gradients_need_the_loss_scale() -> None:
    with pytest.raises(ConfigError, match="loss scale"):
        GeminiDDP(mlp(), reduce_dtype="fp16")
    with pytest.raises(ConfigError, match="reduce_dtype='int8'"):
        GeminiDDP(mlp(), reduce_dtype="int8")
    with pytest.raises(ConfigError, match="both given"):
        GeminiDDP(mlp(), reduce_dtype="bf16", config=GeminiConfig())


def _backward_updates() -> None:
    model = GeminiDDP(mlp())
    with model, pytest.raises(ConfigError, match="several ranks"):
        GeminiOptimizer(CPUAdam(model.parameters()), model, overlap="backward")


def test_updates_in_backward_are_for_one_rank() -> None:
    run_on_ranks(_backward_updates, 2)
