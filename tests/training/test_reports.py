"""What a model says about itself: stats, timeline, plan, the recorded iteration and its reuse."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_harness import (
    KIB,
    LINKS,
    TIERS,
    Recipe,
    assert_identical,
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

PHASES = ["forward", "backward", "optimizer"]


def test_stats_is_plain_data_with_tiers_links_and_counters(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        assert model.stats()["warmup"] is True
        optimizer = managed_optimizer(model)
        for step in range(3):
            managed_step(model, optimizer, gpt_loss, Recipe(), step)
        stats = model.stats()
    for tier in TIERS:
        assert set(stats[tier]) == {"bytes", "peak_bytes", "budget_bytes"}
        assert 0 <= stats[tier]["bytes"] <= stats[tier]["peak_bytes"] <= stats[tier]["budget_bytes"]
    for link in LINKS:
        assert stats[link]["bytes"] >= 0
        assert stats[link]["seconds"] >= 0
    assert stats["disk_read"]["bytes"] > 0
    assert stats["disk_write"]["bytes"] > 0
    assert stats["h2d"]["bytes"] == stats["d2h"]["bytes"] == 0
    assert (stats["step"], stats["warmup"]) == (3, False)
    assert stats["stall_seconds"] > 0
    assert stats["num_chunks"] > 10
    parameters = sum(param.numel() for param in TinyGPT().parameters())
    assert stats["model_data_bytes"] >= 16 * parameters
    assert 0 <= stats["wasted_bytes"] < stats["model_data_bytes"]


def test_timeline_has_every_moment_of_the_last_step_within_budgets(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, host_bytes=64 * KIB)) as model:
        assert model.timeline() == []
        optimizer = managed_optimizer(model)
        for step in range(3):
            managed_step(model, optimizer, gpt_loss, Recipe(), step)
        timeline, stats, trace = model.timeline(), model.stats(), model.memstats()
    assert trace is not None
    assert [entry["moment"] for entry in timeline] == list(range(trace.num_moments))
    assert sorted({entry["phase"] for entry in timeline}) == sorted(PHASES)
    order = [PHASES.index(entry["phase"]) for entry in timeline]
    assert order == sorted(order)
    for entry in timeline:
        for tier in TIERS:
            assert 0 <= entry[f"{tier}_bytes"] <= stats[tier]["budget_bytes"]


def test_the_plan_keeps_to_the_budget_less_what_is_reserved(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, 100 * KIB, non_model_bytes=20 * KIB)) as model:
        optimizer = managed_optimizer(model)
        assert model.plan().placement.device_limit_bytes == 80 * KIB
        for step in range(3):
            managed_step(model, optimizer, gpt_loss, Recipe(), step)
        assert model.plan().placement.device_limit_bytes == 80 * KIB
        assert max(entry["device_bytes"] for entry in model.timeline()) <= 80 * KIB


@pytest.mark.parametrize("non_model_bytes", [0, None])
def test_a_recorded_iteration_spares_the_warmup_and_changes_no_number(
    non_model_bytes: int | None, tmp_path: Path
) -> None:
    options = tight(
        tmp_path, "1GiB" if non_model_bytes is None else 72 * KIB, non_model_bytes=non_model_bytes
    )
    recipe = Recipe(steps=4)
    want = train_plain(seeded(TinyGPT), gpt_loss, recipe)
    first = GeminiDDP(seeded(TinyGPT), **options)
    assert_identical(train_managed(first, gpt_loss, recipe), want)
    file = tmp_path / "trace.json"
    first.memstats().save(file)
    again = GeminiDDP(seeded(TinyGPT), memstats=Trace.load(file), **options)
    assert again.stats()["warmup"] is False
    got = train_managed(again, gpt_loss, recipe)
    assert_identical(got, want)


def test_memstats_of_another_layout_give_its_order_and_warm_up_again(tmp_path: Path) -> None:
    class Backwards(nn.Module):
        """Runs its layers against the order of registration."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
            return x

    def loss_fn(model: nn.Module, index: int) -> Tensor:
        return model(torch.randn(4, 32, generator=torch.Generator().manual_seed(index))).square().mean()

    options, recipe = tight(tmp_path, 40 * KIB), Recipe(steps=4)
    want = train_plain(seeded(Backwards), loss_fn, recipe)
    models = [GeminiDDP(seeded(Backwards), **options)]
    for warm in (True, False):
        assert_identical(train_managed(models[-1], loss_fn, recipe), want)
        models.append(GeminiDDP(seeded(Backwards), memstats=models[-1].memstats(), **options))
        assert models[-1].stats()["warmup"] is warm
    got = train_managed(models[-1], loss_fn, recipe)
    assert_identical(got, want)
    assert moved_bytes(got.stats) > 0
    names = list(models[-1].memstats().param_order)
    assert names[0] == "layers.4.weight"
    assert set(names) == set(dict(Backwards().named_parameters()))


def test_the_search_report_is_logged_and_printed_only_when_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gemini.chunk"), GeminiDDP(seeded(TinyGPT), **tight(tmp_path)):
        assert capsys.readouterr().out == ""
        assert "used number:" in caplog.messages[1]
        assert len(caplog.messages) == 3
    with GeminiDDP(seeded(TinyGPT), verbose=True, **tight(tmp_path)):
        out = capsys.readouterr().out
    assert "searching chunk configuration is completed in" in out
    assert "used number:" in out
    assert "total wasted percentage is" in out
