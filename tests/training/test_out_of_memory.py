"""A step that runs out of memory anywhere is taken back and repeated with the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from gpu_harness import KINDS, LateDevice, make_gpu, network, network_loss, optimizer_of, simulated
from out_of_memory import RunsOut, assert_settled, managed, noisy, state_of, step_of
from pairs import pairs
from torch import nn
from training_harness import assert_same_state, assert_within_budgets

from gemini import OutOfBudgetError, StateError
from gemini.chunk.memory import ComputeDevice
from gemini.runtime import manager as manager_module

# Blocks of DEVICE and HOST, of the 43 or more that the network's model data takes; None: all there is.
BUDGETS: dict[str, tuple[int | None, int]] = {"everything": (None, 64), "host": (16, 64)}
STEPS = 8
CLIP = {"max_norm": 0.1}
ALL = range(1000)  # calls


@pytest.fixture(autouse=True)
def _little_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that runs out collect the youngest garbage only: all of it takes longer than a step."""
    monkeypatch.setattr(manager_module.gc, "collect", lambda collect=gc.collect: collect(0))


@contextmanager
def running(gpu: ComputeDevice) -> Iterator[None]:
    """Have operators run late where that is the kind of ``gpu``."""
    with ExitStack() as stack:
        if isinstance(gpu, LateDevice):
            stack.enter_context(gpu.running(stack.enter_context(pytest.MonkeyPatch.context())))
        yield


def undisturbed(
    build: Callable[[], nn.Module], steps: int = STEPS, *, gpu: ComputeDevice | None = None, **options: Any
) -> tuple[Any, int]:
    """Return losses and state of a run that never lacks memory, on a simulated GPU if none is given, and how
    many calls its steps have at most."""
    calls = 0
    with managed(build, gpu or simulated(), BUDGETS["everything"], **options) as model:
        optimizer, losses = optimizer_of(model, **CLIP), []
        for index in range(steps):
            with RunsOut() as counted:
                losses.append(model.retry_step(step_of(model, optimizer, index)))
            calls = max(calls, counted.num_calls)
        return (losses, state_of(model)), calls


@pytest.mark.dear("a step is run again for each of its allocations")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_runs_out_at_any_call_changes_no_number(kind: str, budget: str) -> None:
    # A real GPU has bits of its own.
    (want, state), calls = undisturbed(network, gpu=make_gpu("cuda") if kind == "cuda" else None)
    pending = 0
    for first in range(1, calls + 6, 6 if kind == "simulated" else 45):
        gpu = make_gpu(kind)
        with running(gpu), managed(network, gpu, BUDGETS[budget]) as model:
            optimizer, losses = optimizer_of(model, **CLIP), []
            for index in range(STEPS):
                call = first + (index * 5) % 6  # all six from the third step on
                fails = index > 1 or first // 6 % 2 == 0  # others begin with updates pending
                pending += model.stats()["pending_updates"] if fails else 0
                with RunsOut([call] if fails else (), written=call % 3 == 0) as device:
                    losses.append(model.retry_step(step_of(model, optimizer, index)))
                assert device.num_failed == (fails and call <= device.num_calls)
                assert_settled(model)
            assert losses == want
            assert_same_state(state_of(model), state)
            assert_within_budgets(model.stats())
    assert pending > 0


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_buffers_and_random_numbers_are_taken_back(precision: str | None) -> None:
    options = {"mixed_precision": precision, "force_outputs_fp32": True}
    (want, state), calls = undisturbed(noisy, **options)
    for first in range(1, calls + STEPS, 3 * STEPS):
        with managed(noisy, simulated(max_delay_us=100), (16, 64), **options) as model:
            optimizer, losses = optimizer_of(model, **CLIP), []
            torch.manual_seed(0)
            noisy()
            for index in range(STEPS):
                with RunsOut([first + 3 * ((index * 5) % STEPS)], written=index % 2 == 0):
                    losses.append(model.retry_step(step_of(model, optimizer, index)))
            assert losses == want
            assert_same_state(state_of(model), state)


def test_a_step_that_fails_twice_says_so_and_can_be_tried_again() -> None:
    (want, state), calls = undisturbed(network)
    refused: list[OutOfBudgetError] = []
    for first in range(1, calls, 2 * STEPS):
        with managed(network, simulated(), (16, 64)) as model:
            optimizer, losses = optimizer_of(model, **CLIP), []
            for index in range(STEPS):
                call = first + 2 * ((index * 5) % STEPS)
                step = step_of(model, optimizer, index)
                try:
                    with RunsOut([call, call + 60]):
                        losses.append(model.retry_step(step))
                except OutOfBudgetError as error:
                    refused.append(error)
                    assert_settled(model)
                    losses.append(model.retry_step(step))
            assert losses == want
            assert_same_state(state_of(model), state)
    assert len(refused) > 10
    for error in refused:
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        assert "device_bytes is 1.0 MiB" in str(error)
        assert "smaller batch or torch.utils.checkpoint" in str(error)


def test_a_pending_update_that_finds_no_memory_stays_and_runs_once() -> None:
    (want, state), _ = undisturbed(network)
    refused = 0
    for call in range(1, 60, 4):
        with managed(network, simulated(), (16, 64)) as model:
            optimizer = optimizer_of(model, **CLIP)
            losses = [step_of(model, optimizer, index)() for index in range(3)]
            assert model.stats()["pending_updates"] > 0
            for index in range(3, STEPS):
                step = step_of(model, optimizer, index)
                try:
                    with RunsOut(ALL[call:] if index == 3 else (), operator="as_strided"):
                        losses.append(model.retry_step(step))
                except OutOfBudgetError:
                    refused += 1
                    losses.append(model.retry_step(step))
            assert losses == want
            assert_same_state(state_of(model), state)
    assert refused > 10


def test_an_evaluation_is_repeated_and_changes_nothing() -> None:
    (want, state), _ = undisturbed(network)
    with managed(network, simulated(), (16, 64)) as model:
        optimizer, losses = optimizer_of(model, **CLIP), []

        def evaluate() -> float:
            with torch.no_grad():
                return network_loss(model, 99, torch.device("cpu")).item()

        for index in range(STEPS):
            losses.append(model.retry_step(step_of(model, optimizer, index)))
            seen = set()
            for call in range(index + 1, 60, STEPS):
                with RunsOut([call]):
                    seen.add(model.retry_step(evaluate))
            assert len(seen) == 1
        assert losses == want
        assert_same_state(state_of(model), state)


WHERE = {"forward": "tanh", "backward": "tanh_backward", "norm": "linalg_vector_norm"}


@pairs(where=WHERE, failing_step=[0, 1, 5], budget=BUDGETS)
def test_without_help_the_error_comes_through_and_the_next_try_has_less(
    where: str, failing_step: int, budget: str
) -> None:
    (want, state), _ = undisturbed(network)
    with managed(network, simulated(), BUDGETS[budget]) as model:
        optimizer, losses = optimizer_of(model, **CLIP), []
        for index in range(STEPS):
            step = step_of(model, optimizer, index)
            if index == failing_step:
                share = model.manager.shortage.share_bytes
                with pytest.raises(torch.OutOfMemoryError), RunsOut(ALL, operator=WHERE[where]):
                    step()
                assert 0 < model.manager.shortage.share_bytes <= share // 2
                model.zero_grad()
                assert_settled(model)
            losses.append(step())
        assert losses == want
        assert_same_state(state_of(model), state)


def test_half_an_update_is_refused() -> None:
    """An update inside the step goes on where it stopped; where there is no memory for that, nobody does."""
    with managed(network, simulated(), (16, 64)) as model:
        optimizer = optimizer_of(model, overlap=False)
        with RunsOut() as counted:
            model.retry_step(step_of(model, optimizer, 0))
        with (
            RunsOut(ALL[counted.num_calls - 24 :]),  # steps that keep views of the one before make 8 fewer
            pytest.raises(StateError, match=r"half-way.*load a checkpoint") as refused,
        ):
            model.retry_step(step_of(model, optimizer, 1))
        assert isinstance(refused.value.__cause__, torch.OutOfMemoryError)
        with pytest.raises(StateError, match="half-way"):
            optimizer.step()
