"""What is refused where memory runs out, and that what it costs comes to an end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_harness import Taken, network, network_loss, optimizer_of, simulated, train
from out_of_memory import RunsOut, assert_settled, managed, state_of, step_of
from torch import Tensor, nn
from training_harness import (
    KIB,
    Recipe,
    assert_same_state,
    managed_optimizer,
    managed_step,
    seeded,
    tight,
    train_plain,
)
from training_models import Around, square_loss

from gemini import ConfigError, GeminiDDP, OutOfBudgetError, StateError
from gemini.errors import DeviceFullError
from gemini.system.config import format_enough
from gemini.system.device import asked_bytes, ran_out_of_memory

HERE = torch.device("cpu")
NO_MEMORY = "CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has a total capacity of 14.75 GiB"


class FailsOnce:
    """A step that runs ``before`` and finds no memory, and returns a number the next time."""

    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before
        self.num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        if self.num_calls == 1:
            self._before()
            raise torch.OutOfMemoryError(NO_MEMORY)
        return self.num_calls


def small(**options: Any) -> GeminiDDP:
    """Return a managed network whose data does not fit DEVICE."""
    return managed(network, simulated(), (16, 64), **options)


def write(model: GeminiDDP) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(2.0)


def test_what_a_step_cannot_take_back_is_refused() -> None:
    with small() as model, small() as other:
        optimizer, others = optimizer_of(model), optimizer_of(other)
        refused: dict[str, Callable[[], Any]] = {
            "update had started": step_of(model, optimizer, 0),
            "wrote to parameters": lambda: write(model),
            "another managed model": step_of(other, others, 0),
        }
        for match, before in refused.items():
            step = FailsOnce(before)
            with pytest.raises(StateError, match=match) as error:
                model.retry_step(step)
            assert step.num_calls == 1
            assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


def test_gradients_from_before_a_step_are_not_lost_in_silence() -> None:
    with small() as model:
        network_loss(model, 0, HERE).backward()
        with pytest.raises(StateError, match="gradients before it"):
            model.retry_step(FailsOnce(lambda: None))
        model.zero_grad()
        assert model.retry_step(FailsOnce(lambda: network_loss(model, 0, HERE).backward())) == 2
        assert_settled(model)


def test_updates_in_backward_and_several_ranks_are_refused() -> None:
    with small() as model:
        optimizer = optimizer_of(model, overlap="backward")
        step = FailsOnce(lambda: None)
        with pytest.raises(ConfigError, match="overlap='backward' a step cannot be repeated"):
            model.retry_step(step)
        del optimizer
    with small() as model:
        model._gemini.peers = SimpleNamespace(leave=lambda _why: None)  # type: ignore[assignment]
        with pytest.raises(ConfigError, match="in one process only"):
            model.retry_step(step)
    assert step.num_calls == 0


def test_other_errors_come_through_unchanged() -> None:
    def fails() -> None:
        raise ValueError("of the user")

    with managed(network, simulated(), (8, 64)) as model:
        share = model.manager.shortage.share_bytes
        with pytest.raises(ValueError, match="of the user"):
            model.retry_step(fails)
        with pytest.raises(OutOfBudgetError, match="at once but the budget is"):
            model.retry_step(lambda: torch.cat([param.flatten() for param in model.parameters()]))
        assert model.manager.shortage.share_bytes == share


def test_parameters_and_gradients_that_came_after_wrapping_are_taken_back() -> None:
    with small() as model:
        model.module.bias = nn.Parameter(torch.ones(3))
        model.module.bias.grad = torch.ones(3)

        def accumulate() -> None:
            (model.module.bias * 5).sum().backward()

        assert model.retry_step(FailsOnce(accumulate)) == 2
        assert torch.equal(model.module.bias.grad, torch.ones(3))
        with pytest.raises(StateError, match="wrote to parameters"):
            model.retry_step(FailsOnce(lambda: nn.init.zeros_(model.module.bias)))


def test_a_resident_model_with_other_parameters_repeats_a_step() -> None:
    with managed(network, simulated(), (None, 64)) as model:
        optimizer = optimizer_of(model)
        train(model, optimizer, HERE)
        model.module.bias = nn.Parameter(torch.ones(3))
        assert model.manager.resident
        assert model.retry_step(FailsOnce(lambda: network_loss(model, 6, HERE).backward())) == 2
        assert not model.manager.resident


def test_a_recording_has_both_tries_of_a_step() -> None:
    with small() as model:
        optimizer = optimizer_of(model)
        train(model, optimizer, HERE)
        with model.record_timeline() as timeline:
            for index in range(2):
                with RunsOut([100] if index == 0 else ()):
                    model.retry_step(step_of(model, optimizer, index))
        assert [step.number for step in timeline.summary()] == [7, 7, 8]


def test_what_a_failed_call_held_is_gone_before_the_second_one() -> None:
    alive: list[weakref.ref[Tensor]] = []
    with small() as model:

        def step() -> int:
            left = sum(each() is not None for each in alive)
            activations = torch.ones(3)
            alive.append(weakref.ref(activations))
            loss = network_loss(model, 0, HERE) + activations.sum()
            if len(alive) == 1:
                raise torch.OutOfMemoryError(NO_MEMORY)
            loss.backward()
            return left

        assert model.retry_step(step) == 0


def test_an_error_that_is_kept_keeps_no_activations() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def step() -> None:
        activations = torch.ones(3)
        alive.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(NO_MEMORY)

    with small() as model, pytest.raises(OutOfBudgetError) as kept:
        model.retry_step(step)
    assert kept.value.__cause__ is not None
    assert [each() for each in alive] == [None, None]


def test_a_share_is_halved_until_there_is_nothing_to_give() -> None:
    with managed(network, simulated(), (40, 64)) as model:
        train(model, optimizer_of(model), HERE)
        shares = [model.manager.shortage.share_bytes]
        while shares[-1]:
            assert model.retry_step(FailsOnce(lambda: None)) == 2
            shares.append(model.manager.shortage.share_bytes)
            assert model.stats()["device"]["bytes"] <= shares[-1]
        assert all(after <= before // 2 for before, after in pairwise(shares))
        assert len(shares) <= 7
        plan = model.manager.order.plan
        assert model.retry_step(FailsOnce(lambda: None)) == 2
        assert model.manager.order.plan is plan
        train(model, optimizer_of(model), HERE)


def test_more_than_half_is_given_where_more_is_asked_for() -> None:
    with managed(network, simulated(), (40, 64)) as model:
        optimizer_of(model)  # whose states are the larger part of model data
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 MiB.")
        share = model.manager.shortage.share_bytes
        with pytest.raises(torch.OutOfMemoryError), model.manager.shortage.watched():
            raise error
        assert model.manager.shortage.share_bytes == share - 3 * 2**19


def test_the_cpu_and_the_gpu_say_how_much_they_lack() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**50, dtype=torch.uint8)
    assert ran_out_of_memory(full.value)
    assert asked_bytes(full.value) == 2**50
    assert asked_bytes(torch.OutOfMemoryError(NO_MEMORY)) == 64 * KIB
    assert asked_bytes(torch.OutOfMemoryError("who knows")) == 0
    for nbytes in (513, 3 * 2**30 + 12345678, 2**41 + 1):  # as csrc/gpu writes them
        assert asked_bytes(DeviceFullError(f"the GPU has no {format_enough(nbytes)} left")) >= nbytes
    # Of a kernel that is loaded when it is used first, and of a library's own memory.
    assert ran_out_of_memory(RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"))
    assert ran_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert ran_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert ran_out_of_memory(RuntimeError("CUDA driver error: out of memory"))
    assert ran_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not ran_out_of_memory(OutOfBudgetError("a budget that was kept to"))
    assert not ran_out_of_memory(RuntimeError("something else"))


def test_a_graph_from_before_chunks_could_leave_is_refused() -> None:
    with managed(network, simulated(), (None, 64)) as model:
        train(model, optimizer_of(model), HERE)
        assert model.manager.resident
        loss = network_loss(model, 0, HERE)
        with pytest.raises(torch.OutOfMemoryError), model.manager.shortage.watched():
            raise torch.OutOfMemoryError(NO_MEMORY)
        assert not model.manager.resident
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
        assert model.retry_step(step_of(model, optimizer_of(model), 6)) > 0


class Plain(Around):
    """A layer between others."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32))


@pytest.mark.parametrize("left", [4, 8, 16])
@pytest.mark.parametrize("failing_step", [0, 3])
def test_memory_that_others_have_is_no_end(left: int, failing_step: int) -> None:
    with managed(network, simulated(), (None, 64)) as model:
        want = train(model, optimizer_of(model), HERE)
        state = state_of(model)
    gpu = simulated()
    with managed(network, gpu, (40, 64)) as model:
        optimizer, taken, losses, refused = optimizer_of(model), Taken(gpu), [], []
        for index in range(6):
            if index == failing_step:
                taken.all_but(left if index == 0 else 0)
            while len(losses) == index:
                try:
                    losses.append(model.retry_step(step_of(model, optimizer, index)))
                except OutOfBudgetError as error:
                    refused.append(str(error))
                    assert_settled(model)
        assert len(refused) <= 2
        assert all("smaller batch" in text for text in refused)
        assert losses == want
        assert_same_state(state_of(model), state)


def test_the_cpu_repeats_a_step_as_well(tmp_path: Path) -> None:
    recipe = Recipe(steps=5)
    want = train_plain(seeded(Plain), square_loss, recipe)
    with GeminiDDP(seeded(Plain), **tight(tmp_path, 40 * KIB)) as model:
        optimizer, losses = managed_optimizer(model, recipe), []

        def lacking(model: nn.Module, index: int) -> Tensor:
            loss = square_loss(model, index)
            if len(losses) == len(lacked):
                lacked.append(index)
                torch.empty(2**50, dtype=torch.uint8)
            return loss

        lacked: list[int] = []
        for index in range(5):
            run = partial(managed_step, model, optimizer, lacking, recipe, index)
            losses += model.retry_step(run)
        assert lacked == [0, 1, 2, 3, 4]
        assert losses == want.losses
        assert_same_state(model.state_dict(), want.state)
