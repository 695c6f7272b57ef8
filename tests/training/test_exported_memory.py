"""State dicts with a place on DISK take no memory beside the budgets but a few MiB, however large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiAdamOptimizer, GeminiDDP
from gemini.memstats.monitor import ProcessMonitor

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 2**20
LARGE = {"device_bytes": 200 * MIB, "non_model_bytes": 0, "min_chunk_size_mb": 4, "search_range_mb": 4}


def build() -> nn.Module:
    """One large parameter, and many that the allocator keeps what it had for."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12 * 1024, 1024), *[nn.Linear(512, 512) for _ in range(12)])


def beside_device(model: GeminiDDP, export: Callable[[], Any]) -> tuple[Any, int]:
    """Return what ``export`` returns, and how far the process grew meanwhile beyond what DEVICE did."""
    chunks = model.manager.chunks
    export()  # what the first call imports, and DEVICE as full as it will be
    monitor = ProcessMonitor()
    before = monitor.resident_bytes() - chunks.arena_bytes()
    monitor.start_period()
    found = export()
    grown = monitor.end_period() - chunks.arena_bytes() - before
    monitor.close()
    return found, grown


@pytest.mark.parametrize("stowed", [False, True])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_both_state_dicts_pass_through_a_few_mebibytes(
    stowed: bool, precision: str | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**LARGE, "mixed_precision": precision, "disk_dir": str(tmp_path)}
    with GeminiDDP(build(), **options) as model:
        optimizer = GeminiAdamOptimizer(model, nvme_offload_fraction=float(stowed))
        loss = model.module[0](torch.arange(4)).float().sum()
        for layer in model.module[1:]:
            loss = loss + layer(torch.ones(1, 512, dtype=layer.weight.dtype)).float().sum()
        optimizer.backward(loss)
        optimizer.step()
        states, grown = beside_device(model, optimizer.state_dict)
        assert sum(value["exp_avg"].nbytes for value in states["state"].values()) > 48 * MIB
        assert grown < 24 * MIB
        weights, grown = beside_device(model, model.state_dict)
        assert weights["0.weight"].nbytes == 48 * MIB
        assert grown < 24 * MIB
