"""A pending update that fails is neither lost nor done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sequences import Core
from torch import Tensor
from training_harness import KIB, assert_same_state, assert_within_budgets, seeded, tight
from training_models import Around, square_loss

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, IoError, StateError, checkpoint
from gemini.optim import rule
from gemini.runtime.gate.pending_work import PendingUpdate, PendingUpdates

STEPS = 4


class FailingAcquire:
    """Raises IoError in the n-th call of ``acquire`` and passes every other call on."""

    def __init__(self, acquire: Any, fails_at: int) -> None:
        self._acquire = acquire
        self.left = fails_at

    def __call__(self, tensors: Any, **where: bool) -> None:
        self.left -= 1
        if self.left == 0:
            raise IoError(5, "injected")
        self._acquire(tensors, **where)


@contextmanager
def failing_acquire(model: GeminiDDP, fails_at: int) -> Iterator[FailingAcquire]:
    """Let one acquire of ``model`` fail during the block."""
    chunks = model.manager.chunks
    acquire = chunks.acquire
    failing = FailingAcquire(acquire, fails_at)
    chunks.acquire = failing  # type: ignore[method-assign]
    try:
        yield failing
    finally:
        chunks.acquire = acquire  # type: ignore[method-assign]


def start(place: Path, steps: int = 2, *, overlap: bool = True, **options: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer after some steps, the last update pending."""
    model = GeminiDDP(seeded(lambda: Around(Core())), **tight(place, 40 * KIB, **options))
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model, overlap=overlap, max_norm=0.05)
    for index in range(steps):
        train(model, optimizer, index)
    return model, optimizer


def train(model: GeminiDDP, optimizer: GeminiOptimizer, index: int) -> float:
    loss = square_loss(model, index)
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def undisturbed(place: Path, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses after the second step and weights of a run whose updates run in the step."""
    model, optimizer = start(place, overlap=False, **options)
    with model:
        losses = [train(model, optimizer, index) for index in range(2, STEPS)]
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


WHERE: dict[str, Callable[[GeminiDDP], Any]] = {
    "forward": lambda model: square_loss(model, 2),
    "evaluation": lambda model: torch.no_grad()(square_loss)(model, 2),
    "state_dict": lambda model: model.state_dict(),
    "read": lambda model: [param.sum() for param in model.parameters()],
}


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("where", WHERE)
def test_a_pending_update_that_failed_anywhere_is_done_later(
    where: str, precision: str | None, tmp_path: Path
) -> None:
    want_losses, want = undisturbed(tmp_path, mixed_precision=precision)
    fails_at, failed = 0, True
    while failed:
        fails_at += 1
        model, optimizer = start(tmp_path, mixed_precision=precision)
        with model:
            with failing_acquire(model, fails_at) as failing:
                try:
                    WHERE[where](model)
                except IoError:
                    optimizer.zero_grad()
            failed = failing.left <= 0
            model.manager.chunks.table.check_invariants()
            assert [train(model, optimizer, index) for index in range(2, STEPS)] == want_losses
            assert_same_state(model.state_dict(), want)
            assert_within_budgets(model.stats())
    assert fails_at > 5


def test_an_update_interrupted_in_the_kernel_is_refused_until_a_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want_losses, want = undisturbed(tmp_path)
    model, optimizer = start(tmp_path)
    with model:
        checkpoint.save(tmp_path / "run", model, optimizer)
        train(model, optimizer, 2)

        def interrupted(*arguments: Any) -> bool:
            run_rows(*arguments)
            raise KeyboardInterrupt

        run_rows = rule.run_rows
        monkeypatch.setattr(rule, "run_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            square_loss(model, 3)
        monkeypatch.undo()
        optimizer.zero_grad()
        for refused in (
            optimizer.step,
            optimizer.state_dict,
            lambda: checkpoint.save(tmp_path / "run", model, optimizer),
        ):
            with pytest.raises(StateError, match="failed half-way"):
                refused()
        checkpoint.load(tmp_path / "run", model, optimizer)
        assert [train(model, optimizer, index) for index in range(2, STEPS)] == want_losses
        assert_same_state(model.state_dict(), want)


def test_closing_runs_what_is_pending_and_reports_its_failure(tmp_path: Path) -> None:
    model, _ = start(tmp_path)
    with failing_acquire(model, 2), pytest.raises(IoError, match="injected"):
        model.close()
    assert model.manager.chunks.arena_bytes() == 0
    assert list(tmp_path.iterdir()) == []
    model.close()
    with pytest.raises(StateError, match="closed"):
        next(model.parameters()).sum()


def test_an_exception_on_the_way_out_is_not_hidden_by_what_is_pending(tmp_path: Path) -> None:
    model, _ = start(tmp_path)
    with failing_acquire(model, 1), pytest.raises(ValueError, match="of the user"), model:
        raise ValueError("of the user")
    assert model.manager.chunks.arena_bytes() == 0


def test_a_forward_that_raised_keeps_what_is_pending(tmp_path: Path) -> None:
    want_losses, want = undisturbed(tmp_path)
    model, optimizer = start(tmp_path)
    with model:
        pending = model.stats()["pending_updates"]
        model.module.core.fail = True
        with pytest.raises(ValueError, match="as asked"):
            square_loss(model, 2)
        model.module.core.fail = False
        optimizer.zero_grad()
        assert 0 < model.stats()["pending_updates"] < pending
        assert [train(model, optimizer, index) for index in range(2, STEPS)] == want_losses
        assert_same_state(model.state_dict(), want)


def test_ctrl_c_while_an_update_that_has_run_is_forgotten_loses_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want_losses, want = undisturbed(tmp_path)

    def interrupted_removal(pending: PendingUpdates, update: PendingUpdate) -> None:
        for tensor in update.tensors[:cut]:
            pending.by_tensor.pop(tensor, None)
        raise KeyboardInterrupt

    cut, left = 0, True
    while left:
        model, optimizer = start(tmp_path)
        with model:
            left = any(cut < len(update.tensors) for update in model.manager.pending.all())
            with monkeypatch.context() as patch:
                patch.setattr(PendingUpdates, "remove", interrupted_removal)
                with pytest.raises(KeyboardInterrupt):
                    model.manager.run_pending()
            assert [train(model, optimizer, index) for index in range(2, STEPS)] == want_losses
            assert_same_state(model.state_dict(), want)
        cut += 1
    assert cut > 5
