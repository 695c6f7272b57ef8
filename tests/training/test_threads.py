"""Several threads and one model: any may look, one at a time may use it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import (
    TIERS,
    Recipe,
    assert_identical,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import TinyGPT, gpt_loss

from gemini import GeminiDDP, StateError
from gemini.runtime.gate.gate import Gate
from gemini.runtime.intercept import tensors

RECIPE = Recipe(steps=4)
LOOKS: dict[str, Callable[[GeminiDDP], object]] = {
    "stats": lambda model: model.stats(),
    "timeline": lambda model: model.timeline(),
    "plan": lambda model: str(model.plan()),
    "memstats": lambda model: model.memstats(),
    "repr": repr,
}


@pytest.fixture
def switching() -> Iterator[None]:
    """Have threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_thread(function: Callable[[], Any], name: str = "second") -> list[BaseException | Any]:
    """Return what a function returns, or raises, on a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    return found


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("look", LOOKS)
def test_another_thread_may_look_while_a_model_trains(look: str, tmp_path: Path) -> None:
    want = train_plain(seeded(TinyGPT), gpt_loss, RECIPE)
    errors: list[BaseException] = []
    ended = threading.Event()
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:

        def watch() -> None:
            while not ended.is_set():
                try:
                    LOOKS[look](model)
                except BaseException as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        got = train_managed(model, gpt_loss, RECIPE)
        ended.set()
        thread.join()
    assert not errors
    assert_identical(got, want)


@pytest.mark.usefixtures("switching")
def test_stats_of_another_thread_are_of_one_moment(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    ended = threading.Event()
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:

        def watch() -> None:
            while not ended.is_set():
                seen.append(model.stats())

        thread = threading.Thread(target=watch)
        thread.start()
        train_managed(model, gpt_loss, RECIPE)
        ended.set()
        thread.join()
    for stats in seen:
        for tier in TIERS:
            assert 0 <= stats[tier]["bytes"] <= stats[tier]["peak_bytes"] <= stats[tier]["budget_bytes"]
    steps = [stats["step"] for stats in seen]
    assert steps == sorted(steps)


class Pausing(nn.Module):
    """Runs a function in the middle of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1:
                self.in_forward()
                if x.requires_grad:
                    x.register_hook(lambda _grad: self.in_backward())
        return x


def _pausing(tmp_path: Path) -> tuple[GeminiDDP, Pausing, Any]:
    model = GeminiDDP(seeded(Pausing), **tight(tmp_path, device_bytes="160KiB"))
    module = model.module
    assert isinstance(module, Pausing)
    return model, module, managed_optimizer(model)


USES: dict[str, Callable[[GeminiDDP, Any], object]] = {
    "forward": lambda model, _: model(torch.ones(2, 64)),
    "step": lambda _, optimizer: optimizer.step(),
    "zero_grad": lambda model, _: model.zero_grad(),
    "state_dict": lambda model, _: model.state_dict(),
    "load_state_dict": lambda model, _: model.load_state_dict({}, strict=False),
    "close": lambda model, _: model.close(),
    "an operator": lambda model, _: model.module.layers[0].weight.sum(),
}


DURING = ["forward", "backward", "a backward pass"]  # of the model, and one that it was not told of


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("during", DURING)
def test_a_second_thread_is_refused_by_name_and_the_first_goes_on(
    use: str, during: str, tmp_path: Path
) -> None:
    model, module, optimizer = _pausing(tmp_path)
    with model:
        want = [_step(model, optimizer, during) for _ in range(2)][-1]
    model, module, optimizer = _pausing(tmp_path)
    with model:
        found: list[Any] = []

        def intrude() -> None:
            module.in_forward = module.in_backward = lambda: None
            found.extend(in_thread(lambda: USES[use](model, optimizer)))

        if during == "forward":
            module.in_forward = intrude
        else:
            module.in_backward = intrude
        _step(model, optimizer, during)
        assert isinstance(found[0], StateError), found
        message = str(found[0])
        assert f"thread 'second' calls {use}" in message
        assert "thread 'MainThread' is in" in message
        assert during in message
        assert "threading.Lock" in message
        assert _step(model, optimizer, during) == want


def _step(model: GeminiDDP, optimizer: Any, during: str) -> float:
    loss = model(torch.ones(2, 64)).square().mean()
    if during == "a backward pass":
        loss.backward()
    else:
        optimizer.backward(loss)
    optimizer.step()
    return float(loss.detach())


def test_a_second_backward_pass_is_refused(tmp_path: Path) -> None:
    model, module, optimizer = _pausing(tmp_path)
    with model:
        other = model(torch.ones(2, 64)).sum()
        loss = model(torch.ones(2, 64)).square().mean()
        found: list[Any] = []

        def intrude() -> None:
            module.in_backward = lambda: None
            found.extend(in_thread(other.backward))

        module.in_backward = intrude
        loss.backward()
        assert isinstance(found[0], StateError), found
        optimizer.step()
        model.manager.chunks.table.check_invariants()


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("use", [torch.clone, torch.Tensor.tolist, lambda weight: weight.numpy().copy()])
def test_a_pool_of_threads_may_read_a_state_dict(use: Callable[[Tensor], Any], tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model, ThreadPoolExecutor(4) as pool:
        weights = model.module.state_dict()
        want = {name: weight.tolist() for name, weight in weights.items()}
        for _ in range(3):
            read = {name: pool.submit(use, weight) for name, weight in weights.items()}
            got = {name: future.result(60) for name, future in read.items()}
            assert {name: torch.as_tensor(found).tolist() for name, found in got.items()} == want
        model.manager.chunks.table.check_invariants()
        assert_within_budgets(model.stats())


def test_threads_may_take_turns(tmp_path: Path) -> None:
    want = train_plain(seeded(TinyGPT), gpt_loss, Recipe(steps=3)).losses
    losses: list[float] = []
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        for step in range(3):
            losses += in_thread(lambda at=step: managed_step(model, optimizer, gpt_loss, Recipe(), at))[0]
    assert losses == want


def test_models_that_one_operator_reads_are_pinned_in_the_order_of_their_making(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes first among the operands, and whatever their addresses: in another order on another
    thread or rank each would wait for the other."""
    pinned: list[Gate] = []
    within = tensors.pinned
    monkeypatch.setattr(tensors, "pinned", lambda gate, *rest: pinned.append(gate) or within(gate, *rest))
    models = [GeminiDDP(nn.Linear(8, 8), **tight(tmp_path, "8KiB")) for _ in range(2)]
    one, other = (next(model.parameters()) for model in models)
    gates = [each._ref.manager for each in (one, other)]  # type: ignore[attr-defined]
    made = [gate.number for gate in gates]
    assert made == sorted(made)
    for numbers in (made, made[::-1]):  # the second as if their memory were the other way round
        for gate, number in zip(gates, numbers, strict=True):
            monkeypatch.setattr(gate, "number", number)
        for operands in ((one, other), (other, one)):
            pinned.clear()
            torch.equal(*operands)
            assert pinned == sorted(gates, key=lambda gate: gate.number)
