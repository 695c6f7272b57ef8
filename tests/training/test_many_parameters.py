"""What managing leaves to Python's garbage collector, which looks through all that there is."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gemini
from gemini.errors import GeminiError

COUNT = 400


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(64)) for _ in range(COUNT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x.sum()


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    gc.collect()
    yield
    gc.enable()


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("budget", ["1MiB", "1KiB"])
def test_wrapping_leaves_the_collector_as_it_was(runs: bool, budget: str) -> None:
    if not runs:
        gc.disable()
    try:
        gemini.GeminiDDP(Product(), device_bytes=budget, non_model_bytes=0)
        assert budget == "1MiB"
    except GeminiError:
        assert budget == "1KiB"
    assert gc.isenabled() is runs


def test_wrapping_does_not_collect() -> None:
    passes: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        passes.append(phase)

    module = Product()
    gc.collect()
    gc.callbacks.append(note)
    try:
        gemini.GeminiDDP(module, device_bytes="1MiB", non_model_bytes=0)
    finally:
        gc.callbacks.remove(note)
    assert len(passes) <= 4  # before and behind; 10,000 objects were one pass for every 700
