"""Errors, evaluation, other shapes and closing, between and inside steps, leave training as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from training_harness import (
    KIB,
    Recipe,
    assert_same_state,
    assert_trains_alike,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    moved_bytes,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, OutOfBudgetError, StateError

STEPS = 6


class Failing(nn.Module):
    """Two layers with a place between them where a test may raise, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 32)
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        """Raise where ``fail`` says."""
        x = torch.tanh(self.first(x))
        if self.fail == "forward":
            raise ValueError("half-way through forward")
        if self.fail == "backward":
            x.register_hook(self._raise)
        return self.second(x) @ self.first.weight

    def _raise(self, _grad: Tensor) -> None:
        raise ValueError("half-way through backward")


@pairs(
    where=["forward", "backward"],
    failing_step=[0, 1, 3],
    precision=[None, "bf16"],
    device_bytes=[None, 40 * KIB],
)
def test_a_step_that_raised_half_way_can_be_repeated(
    where: str, failing_step: int, precision: str | None, device_bytes: int | None, tmp_path: Path
) -> None:
    recipe = Recipe(steps=STEPS, precision=precision)
    want = train_plain(seeded(lambda: Around(Failing())), square_loss, recipe)
    model = GeminiDDP(
        seeded(lambda: Around(Failing())), mixed_precision=precision, **tight(tmp_path, device_bytes)
    )
    with model:
        optimizer, losses = managed_optimizer(model, recipe), []
        for step in range(STEPS):
            if step == failing_step:
                model.module.core.fail = where
                with pytest.raises(ValueError, match=where):
                    managed_step(model, optimizer, square_loss, recipe, step)
                model.module.core.fail = ""
                optimizer.zero_grad()
                model.manager.chunks.table.check_invariants()
            losses += managed_step(model, optimizer, square_loss, recipe, step)
        assert losses == want.losses
        assert_same_state(model.state_dict(), want.state)
        assert_within_budgets(model.stats())


def _evaluate(model: nn.Module) -> list[float]:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = [gpt_loss(model, 900 + i).item() for i in range(2)]
    with torch.inference_mode():
        losses.append(gpt_loss(model, 902).item())
    model.train(was_training)
    return losses


@pairs(
    when=["before the first step", "between steps", "between forward and backward"],
    precision=[None, "bf16"],
    device_bytes=[None, 72 * KIB],
)
def test_evaluation_at_any_time_gives_the_same_losses_and_changes_nothing(
    when: str, precision: str | None, device_bytes: int | None, tmp_path: Path
) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        if when == "between steps" or (when == "before the first step" and index == 0):
            evaluations.append(_evaluate(model))
        loss = gpt_loss(model, index)
        if when == "between forward and backward":
            evaluations.append(_evaluate(model))
        return loss

    evaluations: list[list[float]] = []
    assert_trains_alike(TinyGPT, loss_fn, tight(tmp_path, device_bytes), Recipe(steps=4, precision=precision))
    half = len(evaluations) // 2
    assert evaluations[:half] == evaluations[half:]
    assert half > 0


def test_a_loss_computed_with_gradients_and_never_used_changes_nothing(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        if index % 2:
            gpt_loss(model, 700)
        return gpt_loss(model, index)

    assert_trains_alike(TinyGPT, loss_fn, tight(tmp_path))


def test_the_batch_shape_may_change_between_steps(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        batch, length = [(1, 5), (3, 16), (2, 9)][index % 3]
        tokens = torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(index))
        return model(tokens).float().square().mean()

    options = tight(tmp_path, non_model_bytes=None)
    assert moved_bytes(assert_trains_alike(TinyGPT, loss_fn, options, Recipe(steps=7)).stats) > 0


def test_train_and_eval_mode_switch_dropout_and_batch_norm_as_ever(tmp_path: Path) -> None:
    def core() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 32))

    def loss_fn(model: nn.Module, index: int) -> Tensor:
        torch.manual_seed(index)
        model.train(index % 3 != 2)
        return square_loss(model, index)

    got = assert_trains_alike(lambda: Around(core()), loss_fn, tight(tmp_path, 40 * KIB), Recipe(steps=STEPS))
    assert "core.0.running_mean" in got.state


@pytest.fixture(params=[None, 40 * KIB], ids=["unbounded", "tight"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[GeminiDDP, GeminiOptimizer]]:
    """Yield a model after two steps and its optimizer."""
    model = GeminiDDP(seeded(lambda: Around(nn.Linear(32, 32))), **tight(tmp_path, request.param))
    with model:
        optimizer = managed_optimizer(model)
        for step in range(2):
            managed_step(model, optimizer, square_loss, Recipe(), step)
        yield model, optimizer


AFTER_CLOSE: dict[str, Callable[[GeminiDDP, GeminiOptimizer], Any]] = {
    "forward": lambda m, o: square_loss(m, 0),
    "forward of the module": lambda m, o: square_loss(m.module, 0),
    "evaluation": lambda m, o: _no_grad(lambda: square_loss(m, 0)),
    "read": lambda m, o: next(m.parameters()).norm(),
    "write": lambda m, o: _no_grad(lambda: next(m.parameters()).zero_()),
    "state_dict": lambda m, o: m.state_dict(),
    "load_state_dict": lambda m, o: m.load_state_dict(Around(nn.Linear(32, 32)).state_dict()),
    "optimizer state": lambda m, o: o.state_dict(),
    "step": lambda m, o: o.step(),
    "print": lambda m, o: repr(next(m.parameters())),
}


def _no_grad(use: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return use()


@pytest.mark.parametrize("use", AFTER_CLOSE)
def test_using_a_closed_model_raises_state_error(
    trained: tuple[GeminiDDP, GeminiOptimizer], use: str
) -> None:
    model, optimizer = trained
    loss = square_loss(model, 5)
    loss.backward()
    model.close()
    model.close()
    with pytest.raises(StateError, match="closed"):
        AFTER_CLOSE[use](model, optimizer)
    assert model.stats()["device"]["budget_bytes"] > 0
    assert model.manager.chunks.arena_bytes() == 0


def test_backward_after_close_raises_state_error(trained: tuple[GeminiDDP, GeminiOptimizer]) -> None:
    model, _ = trained
    loss = square_loss(model, 5)
    model.close()
    with pytest.raises(StateError, match="closed"):
        loss.backward()


def test_closing_gives_the_memory_back_and_leaves_no_file(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        train_managed(model, gpt_loss, Recipe(steps=2))
        assert list(tmp_path.iterdir()) == []
    assert model.manager.chunks.arena_bytes() == 0


def test_an_operator_that_cannot_fit_is_refused_with_numbers_and_training_goes_on(tmp_path: Path) -> None:
    recipe = Recipe(steps=4)
    want = train_plain(seeded(TinyGPT), gpt_loss, recipe)
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, non_model_bytes=None)) as model:
        optimizer, losses = managed_optimizer(model, recipe), []
        for step in range(recipe.steps):
            loss = gpt_loss(model, step)
            with pytest.raises(
                OutOfBudgetError, match=r"needs [0-9.]+ KiB on DEVICE at once but the budget is 72.0 KiB"
            ):
                torch.cat([param.flatten() for param in model.parameters()])
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        assert losses == want.losses
        assert_same_state(model.state_dict(), want.state)
        assert_within_budgets(model.stats())


def test_a_budget_too_small_for_one_update_is_refused_before_anything_changes(tmp_path: Path) -> None:
    module = seeded(TinyGPT)
    before = {
        name: (id(p), type(p), p.data_ptr(), p.detach().clone()) for name, p in module.named_parameters()
    }
    with pytest.raises(
        OutOfBudgetError, match=r"needs 48.0 KiB on DEVICE .* device_bytes is 32.0 KiB.* at least 48.0KiB"
    ):
        GeminiDDP(module, **tight(tmp_path, 32 * KIB), optimizer_rule="adam")
    for name, param in module.named_parameters():
        identity, kind, address, value = before[name]
        assert (id(param), type(param), param.data_ptr()) == (identity, kind, address)
        assert torch.equal(param, value)
    assert list(tmp_path.iterdir()) == []
    gpt_loss(module, 0).backward()
    CPUAdam(module.parameters()).step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement_policy": "cuda", "device_bytes": 100 * KIB}, "keeps all 512.0 KiB of model data"),
        ({"device_bytes": 100 * KIB, "disk_dir": None}, "the tiers hold"),
        ({"device_bytes": 100 * KIB, "disk_bytes": 200 * KIB}, "the tiers hold"),
        ({"device_bytes": 100 * KIB, "non_model_bytes": 60 * KIB}, "reserved for non-model data"),
    ],
)
def test_budgets_that_cannot_hold_the_model_are_refused_with_numbers(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module = seeded(TinyGPT)
    with pytest.raises(OutOfBudgetError, match=message):
        GeminiDDP(module, **{**tight(tmp_path), **options}, optimizer_rule="adam")
    assert all(type(param) is nn.Parameter for param in module.parameters())
