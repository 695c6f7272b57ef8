"""Evaluations have an order of their own: learned, followed, and of no consequence for training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_harness import (
    KIB,
    Recipe,
    assert_identical,
    assert_same_state,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    moved_bytes,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import TinyGPT, gpt_loss, square_loss

from gemini import GeminiDDP
from gemini.errors import ConfigError
from gemini.memstats import Trace
from gemini.runtime.step.evaluations import PassNeeds


@torch.no_grad()
def evaluate(model: nn.Module, index: int = 100) -> float:
    return gpt_loss(model, index).item()


def followed(model: GeminiDDP, run: Any) -> bool:
    """Say whether what ``run()`` does is on the schedule of the table to its end."""
    table, seen = model.manager.chunks.table, []
    end_step = model.manager.order.end, model.manager.evaluations.end

    def watching(end: Any) -> Any:
        def watched(*args: Any) -> None:
            seen.append(table.diverged())
            end(*args)

        return watched

    model.manager.order.end, model.manager.evaluations.end = map(watching, end_step)
    run()
    model.manager.order.end, model.manager.evaluations.end = end_step
    assert len(seen) == 1
    return not seen[0]


class Turning(nn.Module):
    """Layers that run forwards or, at will, backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(24))
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        """Run ``x`` through all layers."""
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = torch.tanh(layer(x))
        return x


class _LayerByLayer(nn.Module):
    """Calls the layers of a model, and never the model."""

    def __init__(self, model: Turning) -> None:
        super().__init__()
        self.layers = model.layers

    def forward(self, x: Tensor) -> Tensor:
        """Run ``x`` through all layers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def turned(model: GeminiDDP, backwards: bool) -> None:
    model.module.backwards = backwards
    with torch.no_grad():
        square_loss(model, 0)


@pytest.mark.parametrize("non_model_bytes", [0, None])
@pytest.mark.parametrize("before_the_first_step", [0, 1, 3])
def test_evaluations_never_change_training(
    before_the_first_step: int, non_model_bytes: int | None, tmp_path: Path
) -> None:
    device = 72 * KIB if non_model_bytes == 0 else "1GiB"
    want = train_plain(seeded(TinyGPT), gpt_loss, Recipe(steps=4))
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, device, non_model_bytes=non_model_bytes)) as model:
        for index in range(before_the_first_step):
            evaluate(model, index)
        optimizer = managed_optimizer(model)
        losses = []
        for index in range(4):
            losses += managed_step(model, optimizer, gpt_loss, Recipe(), index)
            evaluate(model)
        assert losses == want.losses
        assert_within_budgets(model.stats())
        assert_same_state({key: value.clone() for key, value in model.state_dict().items()}, want.state)


def trace_with(place: Path, *, first: int, between: int) -> tuple[Trace, Any]:
    """Return trace and plan after four steps with evaluations before the first and between them."""
    with GeminiDDP(seeded(TinyGPT), **tight(place)) as model:
        optimizer = managed_optimizer(model)
        for _ in range(first):
            evaluate(model)
        for index in range(4):
            managed_step(model, optimizer, gpt_loss, Recipe(), index)
            for _ in range(between):
                evaluate(model)
        trace = model.memstats()
        assert trace is not None
        return trace, model.plan().placement


def test_b26_evaluations_before_the_first_step_leave_no_mark_on_the_trace(tmp_path: Path) -> None:
    want, plan = trace_with(tmp_path, first=0, between=0)
    got, got_plan = trace_with(tmp_path, first=3, between=0)
    assert (got.hash(), got_plan) == (want.hash(), plan)


def test_b10_evaluations_between_steps_shift_no_moment(tmp_path: Path) -> None:
    want, plan = trace_with(tmp_path, first=0, between=0)
    got, got_plan = trace_with(tmp_path, first=0, between=2)
    assert (got.hash(), got_plan) == (want.hash(), plan)


@pytest.mark.parametrize("overlap", [True, False])
def test_b10_steps_after_evaluations_are_on_their_order(overlap: bool, tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        optimizer.overlap = overlap

        def evaluate_and_step(index: int) -> bool:
            evaluate(model)
            return followed(model, lambda: managed_step(model, optimizer, gpt_loss, Recipe(), index))

        on_order = [evaluate_and_step(index) for index in range(6)]
        assert all(on_order[2:])


def test_an_evaluation_is_followed_from_the_second_one_on(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        assert model.memstats("eval") is None
        evaluate(model)
        first = model.memstats("eval")
        assert first is not None
        assert (first.kind, model.memstats()) == ("eval", None)
        assert all(followed(model, lambda: evaluate(model)) for _ in range(3))
        final = model.memstats("eval")
        assert final is not None
        assert final.hash() == first.hash()
        assert final.seconds != first.seconds
        assert (set(final.phases), set("".join(final.modes))) == ({"forward"}, {"r"})
        with pytest.raises(ConfigError, match="'test'"):
            model.memstats("test")


def test_followed_evaluations_move_less_than_those_of_no_order(tmp_path: Path) -> None:
    moved = []
    for ordered in (True, False):
        with GeminiDDP(seeded(Turning), **tight(tmp_path, 40 * KIB)) as model, torch.no_grad():
            for _ in range(5):
                square_loss(model if ordered else _LayerByLayer(model.module), 0)
            moved.append(moved_bytes(model.stats()))
    assert 0 < moved[0] < moved[1]


def test_another_order_is_learned_when_it_repeats(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Turning), **tight(tmp_path, 40 * KIB)) as model:
        turned(model, False)
        forwards = model.memstats("eval")
        assert followed(model, lambda: turned(model, False))
        assert not followed(model, lambda: turned(model, True))
        assert model.memstats("eval").hash() == forwards.hash()
        assert not followed(model, lambda: turned(model, True))
        backwards = model.memstats("eval")
        assert backwards.accesses == forwards.accesses[::-1]
        assert followed(model, lambda: turned(model, True))


def test_an_evaluation_between_micro_batches_has_no_order(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        if isinstance(model, GeminiDDP) and index % 2:
            evaluate(model)
        return gpt_loss(model, index)

    recipe = Recipe(steps=4, accumulate=2)
    want = train_plain(seeded(TinyGPT), gpt_loss, recipe)
    model = GeminiDDP(seeded(TinyGPT), **tight(tmp_path))
    assert_identical(train_managed(model, loss_fn, recipe), want)
    assert model.memstats("eval") is None


def test_an_evaluation_that_raises_leaves_both_orders_as_they_were(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        for index in range(4):
            managed_step(model, optimizer, gpt_loss, Recipe(), index)
            evaluate(model)
        traces = model.memstats(), model.memstats("eval")
        with model.module.norm.register_forward_pre_hook(_fail), pytest.raises(ZeroDivisionError):
            evaluate(model)
        assert followed(model, lambda: managed_step(model, optimizer, gpt_loss, Recipe(), 4))
        assert followed(model, lambda: evaluate(model))
        assert (model.memstats(), model.memstats("eval")) == traces


def _fail(*_args: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("training", [True, False])
def test_a_pass_inside_an_evaluation_changes_no_number(training: bool, tmp_path: Path) -> None:
    want = train_plain(seeded(TinyGPT), gpt_loss, Recipe(steps=3))
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)

        def inner(*_args: object) -> None:
            hook.remove()
            with torch.set_grad_enabled(training):
                losses.append(gpt_loss(model, 50).item())

        losses: list[float] = []
        for index in range(3):
            hook = model.module.norm.register_forward_pre_hook(inner)
            evaluate(model)
            assert managed_step(model, optimizer, gpt_loss, Recipe(), index) == [want.losses[index]]
        assert len(losses) == 3


def test_an_evaluation_given_as_memstats_spares_its_warmup(tmp_path: Path) -> None:
    given, file = None, tmp_path / "eval.json"
    for _ in range(2):  # the second model has the layout that the order of the first asks for
        with GeminiDDP(seeded(TinyGPT), memstats=given, **tight(tmp_path)) as model:
            evaluate(model)
            evaluate(model)
            model.memstats("eval").save(file)
        given = Trace.load(file)
    with GeminiDDP(seeded(TinyGPT), memstats=given, **tight(tmp_path)) as model:
        assert (model.stats()["warmup"], model.memstats()) == (True, None)
        assert followed(model, lambda: evaluate(model))
        assert model.memstats("eval") is given


def test_long_inputs_have_a_reserve_and_a_plan_of_their_own(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))

    short, long = torch.ones(1, 512), torch.ones(2048, 512)  # activations of 2 KiB and 4 MiB
    plain = seeded(network)
    budgets = tight(tmp_path, 16 * KIB * KIB, non_model_bytes=None)
    with GeminiDDP(seeded(network), **budgets) as model, torch.no_grad():
        reserves: dict[int, set[int]] = {1: set(), 2048: set()}
        for inputs in (long, short, short, long, short, long, short):
            bytearray(24 * KIB * KIB)  # freed at once: the heap serves as much from now on
            freed = [bytearray(b"1" * 64 * KIB) for _ in range(1024)]
            del freed[:-1]  # stays resident: what a pass takes of it shows in no counter of the system
            assert torch.equal(model(inputs), plain(inputs))
            reserves[len(inputs)].add(max(model.memstats("eval").non_model_bytes))
            assert model.stats()["device"]["peak_bytes"] <= 16 * KIB * KIB
    assert min(reserves[2048]) >= 4 * KIB * KIB
    assert min(reserves[1]) < 2 * KIB * KIB


def test_a_pass_of_a_size_that_is_new_follows_the_order_of_the_others(tmp_path: Path) -> None:
    budgets = tight(tmp_path, 40 * KIB, non_model_bytes=None)
    with GeminiDDP(seeded(Turning), **budgets) as model, torch.no_grad():
        model(torch.ones(1, 32))
        for rows in (1, 3, 2, 9, 1):
            assert followed(model, lambda rows=rows: model(torch.ones(rows, 32)))


@pytest.mark.parametrize(
    ("known", "asked", "want"),
    [
        ({1: 10}, 1, 10),
        ({100: 5000, 1: 10}, 40, 5000),  # of a size that is not known: what the next larger one took
        ({100: 5000, 1: 10}, 1, 10),
        ({100: 5000}, 300, 15000),  # larger than any: in proportion
        ({100: 5000, 110: 4000}, 100, 5000),
    ],
)
def test_a_new_pass_is_given_what_larger_ones_took(known: dict[int, int], asked: int, want: int) -> None:
    needs = PassNeeds()
    assert needs.guess(asked) is None
    for numel, nbytes in known.items():
        needs.note(numel, nbytes)
    assert needs.guess(asked) == want
    assert not any(needs.is_new(numel) for numel in known)
    assert needs.is_new(10 * max(known))
