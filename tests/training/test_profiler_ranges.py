"""torch.profiler shows what the runtime does; while none runs, nothing is done for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gemini
from gemini import checkpoint


def train(directory: Path, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = gemini.GeminiDDP(module, device_bytes="100KiB", disk_dir=str(directory), non_model_bytes=0)
    optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2, max_norm=1.0)
    for _ in range(steps):
        optimizer.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
    return model, optimizer


def test_each_phase_is_a_range(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model, optimizer = train(tmp_path, steps=2)
        checkpoint.save(tmp_path / "saved", model, optimizer)
        checkpoint.load(tmp_path / "saved", model, optimizer)
    counts = {event.key: event.count for event in profiler.key_averages()}
    shown = {key.removeprefix("gemini::") for key in counts if key.startswith("gemini::")}
    assert shown == {"forward", "backward", "fetch", "update", "step", "clip", "plan", "save", "load"}
    assert counts["gemini::step"] == counts["gemini::forward"] == 2


def test_no_range_is_made_while_no_profiler_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was made")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    train(tmp_path, steps=2)


def test_profiling_changes_no_bit(tmp_path: Path) -> None:
    want = train(tmp_path, steps=3)[0].state_dict()
    with profile(activities=[ProfilerActivity.CPU]):
        got = train(tmp_path, steps=3)[0].state_dict()
    assert all(torch.equal(value, want[name]) for name, value in got.items())
