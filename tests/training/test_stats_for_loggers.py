"""``stats(flat=True, since_last=True)``: what a logger of numbers takes as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = gemini.GeminiDDP(model, device_bytes="100KiB", disk_dir=str(tmp_path), non_model_bytes=0)
    optimizer = gemini.GeminiAdamOptimizer(model, lr=1e-2)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()


def test_every_value_is_a_number_under_one_name(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    nested, flat = model.stats(), model.stats(flat=True)
    assert all(type(value) in (int, float) for value in flat.values())
    assert flat["device/bytes"] == nested["device"]["bytes"]
    assert flat["warmup"] == int(nested["warmup"])


def test_counters_begin_anew_and_add_up_to_the_total(trained: tuple[Any, Any]) -> None:
    model, optimizer = trained
    parts = [model.stats(flat=True, since_last=True)["disk_write/bytes"]]
    for _ in range(2):
        step(model, optimizer)
        parts.append(model.stats(flat=True, since_last=True)["disk_write/bytes"])
    assert all(part > 0 for part in parts)
    assert sum(parts) == model.stats()["disk_write"]["bytes"]


def test_levels_are_what_they_are_and_plain_calls_count_from_the_beginning(trained: tuple[Any, Any]) -> None:
    model, _ = trained
    model.stats(since_last=True)
    again, total = model.stats(since_last=True), model.stats()
    assert again["device"] == total["device"]
    assert again["step"] == total["step"]
    assert again["disk_write"]["bytes"] == 0 < total["disk_write"]["bytes"]
