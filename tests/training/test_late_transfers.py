"""Transfers that are late, each by up to ten times its own time: same bits, within budgets, to the end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from activation_harness import offloaded, store_small_tensors  # noqa: F401 -- a fixture
from late_engine import LateEngine
from test_plans import any_plan, slow_trace
from training_harness import (
    KIB,
    Outcome,
    Recipe,
    assert_identical,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    seeded,
    tight,
    train_plain,
)
from training_models import TinyGPT, gpt_loss

from gemini import _C, GeminiDDP
from gemini.memstats import Trace
from gemini.runtime.step import schedule

BUDGETS = [(72, 0), (120, 96), (200, 0), (200, 64)]  # KiB of DEVICE and HOST; the rest is on DISK


def train_late(
    options: dict[str, Any], recipe: Recipe, trace: Trace | None, monkeypatch: pytest.MonkeyPatch, seed: int
) -> Outcome:
    """Train with late transfers; the table is whole and within budgets after every step."""
    monkeypatch.setattr(_C, "TransferEngine", partial(LateEngine, seed=seed))
    with GeminiDDP(seeded(TinyGPT), **options, memstats=trace) as model:
        optimizer = managed_optimizer(model, recipe)
        losses = []
        for index in range(recipe.steps):
            losses += managed_step(model, optimizer, gpt_loss, recipe, index)
            model.manager.chunks.table.check_invariants()
            assert_within_budgets(model.stats())
        assert model.plan().step is not None
        state = {key: value.clone() for key, value in model.state_dict().items()}
        assert_every_link_was_late(model)
        return Outcome(losses, state, model.stats())


def assert_every_link_was_late(model: GeminiDDP) -> None:
    """Every link between tiers that exist has moved something, and was late with it."""
    has_host = model.stats()["host"]["budget_bytes"] > 0
    links = {link.name: late for link, late in model.manager.chunks._memory.engine.links.items()}
    used = [late for name, late in links.items() if has_host or name.startswith("DISK")]
    assert len(used) == (4 if has_host else 2)
    assert all(late.num_late > 0 and late.own_s > 0 for late in used)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("device_kib", "host_kib"), BUDGETS)
def test_late_transfers_under_any_plan_change_no_bit_and_no_budget(
    device_kib: int, host_kib: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = "bf16" if seed % 2 else None
    recipe = Recipe(steps=3, clip=("norm", 0.05), accumulate=2, precision=precision)
    options = tight(tmp_path, device_kib * KIB, host_bytes=host_kib * KIB, mixed_precision=precision)
    trace = slow_trace(tmp_path / "warmup", options, recipe)
    if seed > 1:  # else the planner's own
        monkeypatch.setattr(schedule, "choose_plan", any_plan(seed))
    got = train_late(options, recipe, trace, monkeypatch, seed)
    assert_identical(got, train_plain(seeded(TinyGPT), gpt_loss, recipe))


@pytest.mark.usefixtures("store_small_tensors")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("device_kib", "host_kib"), [(80, 0), (120, 96)])
def test_late_transfers_of_activations_and_of_a_step_that_is_learnt(
    device_kib: int, host_kib: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "choose_plan", any_plan(seed))
    recipe = Recipe(steps=6)
    options = offloaded(tmp_path, device_kib * KIB, host_bytes=host_kib * KIB)
    got = train_late(options, recipe, None, monkeypatch, seed)
    assert_identical(got, train_plain(seeded(TinyGPT), gpt_loss, recipe))
