"""A planned step: the same bits and budgets as any other, and what plan() says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pairs import pairs
from training_harness import (
    KIB,
    Recipe,
    assert_identical,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    moved_bytes,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import TinyGPT, gpt_loss

from gemini import GeminiDDP
from gemini.memstats import Trace
from gemini.memstats.trace import LinkSpeed
from gemini.placement.planner import OPT, ChosenPlan
from gemini.placement.policies import make_hints
from gemini.placement.problem import Iteration, Machine, PlanProblem
from gemini.placement.simulator import simulate
from gemini.runtime.step import schedule

# Links so slow that every plan is worth the search, and the one chosen depends on no machine.
_SLOW = tuple(LinkSpeed(name, 2e6, 1e-5) for name in ("h2d", "d2h", "disk_read", "disk_write"))


def slow_trace(place: Path, options: dict[str, Any], recipe: Recipe) -> Trace:
    """Return the trace of the tiny GPT as a machine with slow links would have recorded it."""
    place.mkdir()
    with GeminiDDP(seeded(TinyGPT), **{**options, "disk_dir": place}) as model:
        optimizer = managed_optimizer(model, recipe)
        for index in range(2):
            managed_step(model, optimizer, gpt_loss, recipe, index)
        trace = model.memstats()
    assert trace is not None
    return replace(trace, links=_SLOW, seconds=(1e-3,) * trace.num_moments)


def any_plan(seed: int) -> Callable[[Iteration, Machine], ChosenPlan]:
    """Return a planner that keeps whatever chance says, whether it fits or not."""

    def choose(iteration: Iteration, machine: Machine) -> ChosenPlan:
        problem = PlanProblem.of(iteration, machine)
        keep = np.random.default_rng(seed).random(len(problem.intervals)) < 0.2 + 0.2 * seed
        hints = make_hints(problem.intervals, keep, problem.flushed_at(float(seed)))
        simulation = simulate(iteration, machine)
        return ChosenPlan("chance", hints, simulation, ((OPT, simulation.step_seconds),), 0.0)

    return choose


@pairs(budgets_kib=[(72, 0), (120, 96), (200, 0)], precision=["fp32", "bf16"], seed=range(4))
def test_any_plan_has_the_bits_of_any_other_and_keeps_the_budgets(
    budgets_kib: tuple[int, int],
    precision: str,
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_kib, host_kib = budgets_kib
    monkeypatch.setattr(schedule, "choose_plan", any_plan(seed))
    recipe = Recipe(
        steps=4, clip=("norm", 0.05), accumulate=2, precision=None if precision == "fp32" else precision
    )
    options = tight(tmp_path, device_kib * KIB, host_bytes=host_kib * KIB)
    if recipe.precision is not None:
        options["mixed_precision"] = recipe.precision
    trace = slow_trace(tmp_path / "warmup", options, recipe)
    model = GeminiDDP(seeded(TinyGPT), **options, memstats=trace)
    got = train_managed(model, gpt_loss, recipe)
    step = model.plan().step
    assert step is not None
    assert step.chosen.hints is not None
    assert_within_budgets(got.stats)
    assert_identical(got, train_plain(seeded(TinyGPT), gpt_loss, recipe))


def test_plan_says_what_stays_and_what_leaves_of_every_kind(tmp_path: Path) -> None:
    recipe = Recipe(steps=3)
    options = tight(tmp_path, 120 * KIB)
    trace = slow_trace(tmp_path / "warmup", options, recipe)
    with GeminiDDP(seeded(TinyGPT), **options, memstats=trace) as model:
        optimizer = managed_optimizer(model, recipe)
        for index in range(3):
            managed_step(model, optimizer, gpt_loss, recipe, index)
        report = model.plan()
    total = sum(trace.chunk_bytes)
    assert sum(share.nbytes for share in report.kinds) == total
    assert all(share.staying + share.leaving == share.nbytes for share in report.kinds)
    text = str(report)
    assert "120.0 KiB" in text
    assert all(share.kind in text for share in report.kinds)


def test_before_the_first_step_plan_says_that_nothing_is_planned(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        assert "No step is planned" in str(model.plan())


def test_a_model_that_fits_is_not_planned(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, 2**24)) as model:
        optimizer = managed_optimizer(model)
        for index in range(3):
            managed_step(model, optimizer, gpt_loss, Recipe(), index)
        assert model.plan().step is None


@pytest.mark.parametrize(("device_bytes", "has_room"), [("8MiB", True), ("300KiB", False)])
def test_the_policy_cpu_uses_host_only_for_what_has_no_room_where_device_is_cpu_memory(
    device_bytes: str, has_room: bool
) -> None:
    recipe = Recipe(steps=4)
    want = train_plain(seeded(TinyGPT), gpt_loss, recipe)
    chunks = {"min_chunk_size_mb": 1 / 256, "search_range_mb": 0, "non_model_bytes": 0}
    model = GeminiDDP(seeded(TinyGPT), "cpu", placement_policy="cpu", device_bytes=device_bytes, **chunks)
    got = train_managed(model, gpt_loss, recipe)
    assert_identical(got, want)
    host_bytes = got.stats["host"]["budget_bytes"]
    if has_room:
        assert host_bytes == moved_bytes(got.stats) == 0
    else:
        assert host_bytes >= got.stats["model_data_bytes"]
        assert moved_bytes(got.stats) > 0
