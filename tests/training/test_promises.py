"""What a model promises of its next steps follows what the last ones took; nothing else follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_harness import (
    KIB,
    Recipe,
    assert_identical,
    managed_optimizer,
    managed_step,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import TinyGPT, gpt_loss

from gemini import GeminiDDP
from gemini.memstats import Trace
from gemini.memstats.trace import LinkSpeed
from gemini.placement.report import PlannedStep

# As of a machine on which a step computes for an hour.
_HOUR = 3600.0
_LINKS = tuple(LinkSpeed(name, 2e6, 1e-5) for name in ("disk_read", "disk_write"))


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    """The trace of the tiny GPT as a slow machine would have recorded it."""
    recipe = Recipe()
    (tmp_path / "warmup").mkdir()
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path / "warmup", 120 * KIB)) as model:
        optimizer = managed_optimizer(model, recipe)
        for index in range(2):
            managed_step(model, optimizer, gpt_loss, recipe, index)
        trace = model.memstats()
    assert trace is not None
    return replace(trace, links=_LINKS, seconds=(_HOUR / trace.num_moments,) * trace.num_moments)


@pytest.fixture
def model(tmp_path: Path, trace: Trace) -> Iterator[GeminiDDP]:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, 120 * KIB), memstats=trace) as model:
        yield model


def planned(model: GeminiDDP) -> PlannedStep:
    step = model.plan().step
    assert step is not None
    return step


@pytest.mark.usefixtures("one_thread")
def test_the_promise_of_another_machine_gives_way_to_this_one_and_its_plan_stays(model: GeminiDDP) -> None:
    optimizer = managed_optimizer(model)
    promised = []
    for index in range(6):
        managed_step(model, optimizer, gpt_loss, Recipe(), index)
        promised.append(planned(model))
    # The first step has no update before it, so it is not the one that was planned.
    assert [step.promise.pace.num_steps for step in promised[:4]] == [0, 0, 0, 3]
    assert promised[0].promise.simulation.step_seconds >= _HOUR
    assert promised[-1].promise.simulation.step_seconds < _HOUR / 100
    assert {id(step.chosen) for step in promised} == {id(promised[0].chosen)}
    assert "at the pace of the last" in str(model.plan())


@pytest.mark.usefixtures("one_thread")
def test_asking_changes_no_number(tmp_path: Path, trace: Trace) -> None:
    recipe = Recipe(steps=8)
    model = GeminiDDP(seeded(TinyGPT), **tight(tmp_path, 120 * KIB), memstats=trace)

    def asking_loss(module: torch.nn.Module, index: int) -> torch.Tensor:
        model.plan()
        return gpt_loss(module, index)

    assert_identical(
        train_managed(model, asking_loss, recipe), train_plain(seeded(TinyGPT), gpt_loss, recipe)
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("interrupted", [True, False])
def test_a_step_that_left_the_order_does_not_count(model: GeminiDDP, interrupted: bool) -> None:
    optimizer = managed_optimizer(model)
    for index in range(3):  # of which two are as planned
        managed_step(model, optimizer, gpt_loss, Recipe(), index)
    if interrupted:
        with pytest.raises(IndexError):
            model(torch.full((1, 4), 10**6))
        model.zero_grad()
    managed_step(model, optimizer, gpt_loss, Recipe(accumulate=1 if interrupted else 2), 3)
    assert planned(model).promise.pace.num_steps == 0
    managed_step(model, optimizer, gpt_loss, Recipe(), 4)
    assert planned(model).promise.pace.num_steps == 3
