"""Models of many parameters: what managing leaves to Python's garbage collector, which looks through all that
there is, and a first step that is not recorded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from training_harness import Recipe, assert_identical, seeded, train_managed, train_plain
from training_models import TinyGPT, gpt_loss

import gemini
from gemini.errors import GeminiError
from gemini.runtime import manager as manager_module

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


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_first_step_that_need_not_be_recorded_has_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, precision: str | None
) -> None:
    monkeypatch.setattr(manager_module, "_MOST_RECORDED", 4)
    recipe = Recipe(steps=4, accumulate=2, clip=("norm", 0.1), precision=precision)
    model = gemini.GeminiDDP(
        seeded(TinyGPT), device_bytes="64MiB", non_model_bytes=0, mixed_precision=precision
    )
    managed = train_managed(model, gpt_loss, recipe)
    assert model.memstats() is None
    assert_identical(train_plain(seeded(TinyGPT), gpt_loss, recipe), managed)


def test_a_step_that_is_not_recorded_is_no_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_MOST_RECORDED", 4)
    with gemini.GeminiDDP(Product(), device_bytes="64MiB", non_model_bytes=0) as model:
        assert model.stats()["warmup"]
        model(torch.ones(64))
        assert not model.stats()["warmup"]


@pytest.mark.parametrize(
    "budgets", [{"device_bytes": "64MiB"}, {"device_bytes": "192KiB", "host_bytes": "64MiB"}]
)
def test_a_step_is_recorded_where_tensors_may_have_to_leave(
    monkeypatch: pytest.MonkeyPatch, budgets: dict[str, str]
) -> None:
    monkeypatch.setattr(manager_module, "_MOST_RECORDED", 4)
    given = {"non_model_bytes": 0} if "host_bytes" in budgets else {}
    model = gemini.GeminiDDP(seeded(TinyGPT), **budgets, **given)
    train_managed(model, gpt_loss, Recipe(steps=2))
    assert model.memstats() is not None
