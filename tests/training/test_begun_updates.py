"""Updates that the CPU has begun, on its own thread, where a step is left half-way."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import (
    SMALL_CHUNKS,
    VOCAB,
    WIDTH,
    GpuModel,
    network,
    network_loss,
    optimizer_of,
    raise_in_an_operator,
    simulated,
    train,
)
from torch import Tensor, nn
from training_harness import assert_same_state, assert_within_budgets

from gemini import HybridAdam, StateError
from gemini.checkpoint import load, save
from gemini.optim import chunk_update
from gemini.runtime.gate.pending_work import GivenWork, UpdateThread

BLOCKS = 10  # of DEVICE, of about 25 that parameters, gradients and states take
STEPS = range(6)


@pytest.fixture
def managed() -> Iterator[tuple[GpuModel, Any]]:
    """Yield a model whose states are all updated by the CPU, and its optimizer."""
    gpu = simulated(max_delay_us=200)
    options = {"device_bytes": BLOCKS * gpu.block_bytes, "non_model_bytes": 0, **SMALL_CHUNKS}
    with GpuModel(network(), device=gpu, **options) as model:
        yield model, optimizer_of(model, gpu_margin_mem_ratio=0.0)


@pytest.fixture
def want() -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and weights of the same steps on a plain model."""
    plain = network()
    return train(
        plain, HybridAdam(plain.parameters(), lr=1e-2), torch.device("cpu"), STEPS
    ), plain.state_dict()


def around_updates(monkeypatch: pytest.MonkeyPatch, run: Callable[[Callable[[], None]], None]) -> None:
    """Have ``run`` called with the work of each piece that the CPU updates, in its place."""
    prepare = chunk_update.prepare_on_host

    def prepared(*arguments: Any) -> Callable[[], None]:
        return partial(run, prepare(*arguments))

    monkeypatch.setattr(chunk_update, "prepare_on_host", prepared)


def go_on(
    managed: tuple[GpuModel, Any], begun: list[float], want: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Train the rest of the steps and compare all of them."""
    model, optimizer = managed
    optimizer.zero_grad()
    losses = begun + train(model, optimizer, torch.device("cpu"), STEPS[len(begun) :])
    assert losses == want[0]
    assert_same_state(model.state_dict(), want[1])
    assert_within_budgets(model.stats())


def test_an_operator_that_raises_between_begun_updates_loses_none(
    managed: tuple[GpuModel, Any], want: tuple[list[float], dict[str, Tensor]]
) -> None:
    model, optimizer = managed
    losses = train(model, optimizer, torch.device("cpu"), STEPS[:3])
    raise_in_an_operator(model, torch.device("cpu"))
    assert model.manager.pending.begun()
    go_on(managed, losses, want)


@pytest.mark.parametrize("after_it_was_given", [False, True])
def test_ctrl_c_while_work_is_given_has_it_done_once(
    managed: tuple[GpuModel, Any],
    want: tuple[list[float], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    after_it_was_given: bool,
) -> None:
    model, optimizer = managed
    losses = train(model, optimizer, torch.device("cpu"), STEPS[:3])
    submit, times = UpdateThread.submit, Counter[Callable[[], None]]()

    def counted(update: Callable[[], None]) -> None:
        times[update] += 1
        update()

    def interrupted(thread: UpdateThread, work: Callable[[], None]) -> None:
        monkeypatch.setattr(UpdateThread, "submit", submit)
        if after_it_was_given:
            submit(thread, work)
        raise KeyboardInterrupt

    monkeypatch.setattr(UpdateThread, "submit", interrupted)
    around_updates(monkeypatch, counted)
    with pytest.raises(KeyboardInterrupt):
        network_loss(model, 3, torch.device("cpu"))
    go_on(managed, losses, want)
    assert set(times.values()) == {1}


def test_ctrl_c_while_an_update_is_waited_for_loses_none(
    managed: tuple[GpuModel, Any],
    want: tuple[list[float], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = managed
    losses = train(model, optimizer, torch.device("cpu"), STEPS[:3])
    wait = GivenWork.wait

    def interrupted(work: GivenWork, thread: UpdateThread) -> None:
        monkeypatch.setattr(GivenWork, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(GivenWork, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        network_loss(model, 3, torch.device("cpu"))
    go_on(managed, losses, want)


def test_work_that_raises_is_reported_and_refused_until_a_checkpoint_is_loaded(
    managed: tuple[GpuModel, Any],
    want: tuple[list[float], dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model, optimizer = managed
    losses = train(model, optimizer, torch.device("cpu"), STEPS[:3])
    save(tmp_path / "saved", model, optimizer)

    def fail(_update: Callable[[], None]) -> None:
        raise ValueError("as asked")

    with monkeypatch.context() as patch:
        around_updates(patch, fail)
        with pytest.raises(ValueError, match="as asked"):
            train(model, optimizer, torch.device("cpu"), STEPS[3:5])
    while model.manager.pending.begun():  # each that failed is told of once
        with pytest.raises(ValueError, match="as asked"):
            model.manager.recover()
    with pytest.raises(StateError, match="load a checkpoint"):
        optimizer.step()
    load(tmp_path / "saved", model, optimizer)
    go_on(managed, losses, want)


def test_saving_and_reading_between_begun_updates_see_all_of_them(
    managed: tuple[GpuModel, Any], want: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    model, optimizer = managed
    losses = train(model, optimizer, torch.device("cpu"), STEPS[:3])
    raise_in_an_operator(model, torch.device("cpu"))
    assert model.manager.pending.begun()
    save(tmp_path / "saved", model, optimizer)
    raise_in_an_operator(model, torch.device("cpu"))
    load(tmp_path / "saved", model, optimizer)
    go_on(managed, losses, want)


def test_leaving_by_an_exception_waits_for_what_the_cpu_is_at(
    managed: tuple[GpuModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = managed
    train(model, optimizer, torch.device("cpu"), STEPS[:3])
    ended: list[Callable[[], None]] = []

    def slowly(update: Callable[[], None]) -> None:
        time.sleep(0.2)
        update()
        ended.append(update)

    around_updates(monkeypatch, slowly)
    monkeypatch.setattr(GivenWork, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        network_loss(model, 3, torch.device("cpu"))
    num_begun = len(model.manager.pending.begun())
    assert num_begun > len(ended)
    model.manager.close(run_pending=False)
    assert len(ended) >= num_begun
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gemini-update")]


class Halves(nn.Module):
    """Layers of which a pass uses one half."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.which = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum over columns that ``network_loss`` takes for logits."""
        x = self.tokens(tokens)
        for layer in self.layers[self.which % 2 :: 2]:
            x = layer(x).tanh()
        logits: Tensor = x[..., :VOCAB]
        return logits


def test_what_a_pass_does_not_use_is_finished_before_the_next_step() -> None:
    def run(model: nn.Module, optimizer: Any, halves: Halves) -> list[float]:
        losses = []
        for step in range(8):
            halves.which = step // 3
            losses += train(model, optimizer, torch.device("cpu"), range(step, step + 1))
        return losses

    torch.manual_seed(0)
    plain = Halves()
    torch.manual_seed(0)
    module = Halves()
    expected = run(plain, HybridAdam(plain.parameters(), lr=1e-2), plain)
    gpu = simulated(max_delay_us=200)
    options = {"device_bytes": 12 * gpu.block_bytes, "non_model_bytes": 0, **SMALL_CHUNKS}
    with GpuModel(module, device=gpu, **options) as model:
        assert run(model, optimizer_of(model, gpu_margin_mem_ratio=0.0), module) == expected
        assert_same_state(model.state_dict(), plain.state_dict())


def test_a_timeline_shows_what_is_begun_and_what_is_waited_for(managed: tuple[GpuModel, Any]) -> None:
    model, optimizer = managed
    train(model, optimizer, torch.device("cpu"), STEPS[:3])
    with model.record_timeline() as recorder:
        train(model, optimizer, torch.device("cpu"), STEPS[3:4])
    updates, groups = recorder.timeline().updates, len(model.storage.groups)
    assert groups < len(updates) <= 2 * groups  # but for the first, each is begun, and later taken back
