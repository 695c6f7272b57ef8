"""Training for long costs what training for short does."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
import torch
from pairs import first
from torch import Tensor, nn
from training_harness import KIB, Recipe, managed_optimizer, managed_step, seeded, tight
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import GeminiDDP, GeminiOptimizer

MIB = 2**20


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _train(model: GeminiDDP, optimizer: GeminiOptimizer, steps: range) -> None:
    for step in steps:
        managed_step(model, optimizer, gpt_loss, Recipe(), step)


# What may be under way between two steps: two prefetches and, where a plan asks for them, four flushes.
MOST_IN_FLIGHT = 2 + 4


@pytest.mark.dear("250 steps")
@pytest.mark.parametrize(
    ("host_bytes", "precision"), first([(0, "bf16"), (96 * KIB, None), (0, None), (96 * KIB, "bf16")], 2)
)
def test_two_hundred_steps_leave_no_more_behind_than_fifty(
    host_bytes: int, precision: str | None, tmp_path: Path
) -> None:
    options = tight(tmp_path, host_bytes=host_bytes, mixed_precision=precision)
    with GeminiDDP(seeded(TinyGPT), **options) as model:
        optimizer = managed_optimizer(model)
        _train(model, optimizer, range(50))
        resident, files = _resident(), _open_files()
        threads, arena = psutil.Process().num_threads(), model.manager.chunks.arena_bytes()
        hooks = len(model.manager.backward_pins._hooks)
        _train(model, optimizer, range(50, 200))
        assert _open_files() == files
        assert psutil.Process().num_threads() == threads
        assert model.manager.chunks.arena_bytes() <= max(arena, 72 * KIB)
        assert len(model.manager.backward_pins._hooks) == hooks
        assert model.manager.chunks.table.num_in_flight() <= MOST_IN_FLIGHT
        assert model.stats()["disk"]["peak_bytes"] <= model.stats()["disk"]["budget_bytes"]
        assert _resident() - resident < 4 * MIB
        assert list(tmp_path.iterdir()) == []


def test_a_model_that_never_repeats_an_order_leaves_nothing_behind(tmp_path: Path) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            for index in torch.randperm(6, generator=self.generator).tolist():
                x = torch.tanh(self.layers[index](x))
            return x

    with GeminiDDP(seeded(lambda: Around(Shuffled())), **tight(tmp_path, 40 * KIB)) as model:
        optimizer = managed_optimizer(model)
        for step in range(50):
            managed_step(model, optimizer, square_loss, Recipe(), step)
        resident, files = _resident(), _open_files()
        for step in range(50, 200):
            managed_step(model, optimizer, square_loss, Recipe(), step)
        assert _open_files() == files
        assert _resident() - resident < 4 * MIB


def test_evaluating_and_saving_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        _train(model, optimizer, range(3))

        def use() -> None:
            with torch.no_grad():
                gpt_loss(model, 500)
            model.state_dict()
            optimizer.state_dict()
            repr(next(model.parameters()))

        for _ in range(10):
            use()
        resident, files = _resident(), _open_files()
        for _ in range(40):
            use()
        gc.collect()
        assert _open_files() == files
        assert _resident() - resident < 4 * MIB


@pytest.mark.dear("two hundred models")
@pytest.mark.parametrize("close", [True, False])
def test_models_that_come_and_go_leave_nothing_behind(close: bool, tmp_path: Path) -> None:
    def live(seed: int) -> None:
        model = GeminiDDP(seeded(TinyGPT, seed), **tight(tmp_path, non_model_bytes=None))
        _train(model, managed_optimizer(model), range(2))
        if close:
            model.close()

    for seed in range(4):
        live(seed)
    resident, files, threads = _resident(), _open_files(), psutil.Process().num_threads()
    for seed in range(20):
        live(seed)
        gc.collect()
    assert _open_files() == files
    assert psutil.Process().num_threads() == threads
    assert _resident() - resident < 8 * MIB
