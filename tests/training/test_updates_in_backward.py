"""``overlap="backward"``: chunks are updated while backward goes on; the bits stay those of the barrier."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from test_sequences import Core
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed
from training_harness import (
    KIB,
    Outcome,
    Recipe,
    assert_identical,
    assert_same_state,
    assert_within_budgets,
    managed_step,
    moved_bytes,
    seeded,
    tight,
    train_plain,
)
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.memstats.trace import LinkSpeed
from gemini.runtime import TensorState
from gemini.runtime.step import order
from gemini.runtime.storage.gradient import SlotGradient

RECIPE = Recipe(steps=8)


def adam(model: GeminiDDP, overlap: Any = "backward", **options: Any) -> GeminiOptimizer:
    return GeminiOptimizer(CPUAdam(model.parameters(), **RECIPE.adam), model, overlap=overlap, **options)


def train(
    model: GeminiDDP, loss_fn: Callable[..., Any], recipe: Recipe, overlap: Any = "backward"
) -> Outcome:
    with model:
        optimizer = adam(model, overlap)
        losses = []
        for step in range(recipe.steps):
            losses += managed_step(model, optimizer, loss_fn, recipe, step)
        assert not model.manager.chunks.table.diverged()
        stats = model.stats()
        return Outcome(losses, {key: value.clone() for key, value in model.state_dict().items()}, stats)


def small(place: Path, device_kib: int = 40, **options: Any) -> GeminiDDP:
    return GeminiDDP(seeded(lambda: Around(Core())), **tight(place, device_kib * KIB), **options)


def one_step(model: GeminiDDP, optimizer: GeminiOptimizer, index: int) -> float:
    loss = square_loss(model, index)
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


@pairs(device_kib=[160, 300, 500, 8192], precision=[None, "bf16"], accumulate=[1, 3])
def test_bits_are_those_of_plain_training(
    tmp_path: Path, device_kib: int, precision: str | None, accumulate: int
) -> None:
    recipe = replace(RECIPE, precision=precision, accumulate=accumulate, no_sync=True)
    want = train_plain(seeded(TinyGPT), gpt_loss, recipe)
    model = GeminiDDP(seeded(TinyGPT), **tight(tmp_path, device_kib * KIB), mixed_precision=precision)
    got = train(model, gpt_loss, recipe)
    assert_identical(got, want)
    assert_within_budgets(got.stats)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_bits_are_the_same_with_recomputation(tmp_path: Path, checkpointing: str, policy: str) -> None:
    want = train_plain(seeded(lambda: TinyGPT(checkpointing)), gpt_loss, RECIPE)
    model = GeminiDDP(
        seeded(lambda: TinyGPT(checkpointing)), placement_policy=policy, **tight(tmp_path, 300 * KIB)
    )
    assert_identical(train(model, gpt_loss, RECIPE), want)


def gradient_bytes(model: GeminiDDP) -> int:
    """Return the bytes of gradients that exist, on any tier."""
    slots = [slot for slot in model.storage.slots.values() if slot.grad is not None]
    there = [
        slot for slot in slots if model.manager.tensors.state(slot.grad.update_tensors[0]) != TensorState.FREE
    ]
    return sum(4 * (slot.stop - slot.start) for slot in there)


def gradients_and_moved(place: Path, overlap: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the most bytes of gradients that were there in a step, and the bytes that four steps moved."""
    with GeminiDDP(seeded(TinyGPT), **tight(place, 300 * KIB)) as model:
        seen = [0]
        collect = SlotGradient.collect

        def collect_and_look(self: SlotGradient, grad: torch.Tensor) -> None:
            collect(self, grad)
            seen.append(gradient_bytes(model))

        monkeypatch.setattr(SlotGradient, "collect", collect_and_look)
        optimizer = adam(model, overlap)
        before = 0
        for index in range(10):
            if index == 6:
                before = moved_bytes(model.stats())
                seen.clear()
            optimizer.backward(gpt_loss(model, index))
            optimizer.step()
        assert model.plan().step is not None
        monkeypatch.setattr(SlotGradient, "collect", collect)
        return max(seen), moved_bytes(model.stats()) - before


def test_gradients_are_never_all_there_and_less_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bytes decide between plans where links are slow; else what this machine measured would.
    slow = tuple(LinkSpeed(name, 1e6, 0.0) for name in ("h2d", "d2h", "disk_read", "disk_write"))
    monkeypatch.setattr(order.LinkMeter, "speeds", lambda _self: slow)
    all_there, moved = gradients_and_moved(tmp_path, True, monkeypatch)
    most, moved_in_backward = gradients_and_moved(tmp_path, "backward", monkeypatch)
    assert most < all_there / 3
    assert moved_in_backward < 0.8 * moved


def test_layers_that_come_and_go_train_as_ever(tmp_path: Path) -> None:
    sides = [small(tmp_path), small(tmp_path)]
    optimizers = [adam(sides[0]), adam(sides[1], False)]
    for index in range(12):
        losses = []
        for model, optimizer in zip(sides, optimizers, strict=True):
            model.module.core.skip = index % 3 == 2
            losses.append(one_step(model, optimizer, index))
        assert losses[0] == losses[1]
    assert_same_state(sides[0].state_dict(), sides[1].state_dict())
    for model in sides:
        model.close()


def test_frozen_parameters_stay_and_other_optimizers_may_follow(tmp_path: Path) -> None:
    sides = [small(tmp_path), small(tmp_path)]
    for model in sides:
        model.module.core.layers[1].weight.requires_grad_(False)
    losses = []
    for model, orders in zip(sides, [("backward", False, True, "backward"), (False,) * 4], strict=True):
        found = []
        state = None
        for index, overlap in enumerate(orders):
            optimizer = adam(model, overlap)
            if state is not None:
                optimizer.load_state_dict(state)
            found += [one_step(model, optimizer, 4 * index + turn) for turn in range(4)]
            assert not model.manager.chunks.table.diverged()
            state = optimizer.state_dict()
        losses.append(found)
    assert losses[0] == losses[1]
    assert_same_state(sides[0].state_dict(), sides[1].state_dict())
    for model in sides:
        model.close()


def test_plain_backward_leaves_updates_to_step(tmp_path: Path) -> None:
    sides = [small(tmp_path), small(tmp_path)]
    optimizers = [adam(sides[0]), adam(sides[1], False)]
    for index in range(8):
        losses = []
        for model, optimizer in zip(sides, optimizers, strict=True):
            loss = square_loss(model, index)
            loss.backward() if index % 3 else optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert_same_state(sides[0].state_dict(), sides[1].state_dict())
    for model in sides:
        model.close()


class Twice(nn.Module):
    """A layer in two recomputed segments: with reentrant recomputation it gets two gradients in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between, self.times = nn.Linear(32, 32), nn.Linear(32, 32), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        for _ in range(self.times):
            x = recomputed(self.shared, self.between(x), use_reentrant=True)
        return x


def test_several_gradients_in_a_pass_are_waited_for(tmp_path: Path) -> None:
    want = train_plain(seeded(lambda: Around(Twice())), square_loss, RECIPE)
    model = GeminiDDP(seeded(lambda: Around(Twice())), **tight(tmp_path, 40 * KIB))
    assert_identical(train(model, square_loss, RECIPE), want)


class Detached(nn.Module):
    """Uses a weight once more where autograd does not see it, in a segment that is recomputed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(32, 32), nn.Linear(32, 32), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the first layer behind a constant copy of the second one."""
        constant = self.second.weight.detach if self.way == "detach" else lambda: self.second.weight.data
        x = recomputed(lambda x: torch.tanh(self.first(x)) @ constant(), x, use_reentrant=False)
        return self.second(x)


@pytest.mark.parametrize("way", ["detach", "data"])
def test_weights_that_are_used_again_are_updated_later(tmp_path: Path, way: str) -> None:
    want = train_plain(seeded(lambda: Around(Detached(way))), square_loss, RECIPE)
    model = GeminiDDP(seeded(lambda: Around(Detached(way))), **tight(tmp_path, 40 * KIB))
    assert_identical(train(model, square_loss, RECIPE), want)


def test_hooks_of_the_user_see_gradients_before_their_update(tmp_path: Path) -> None:
    sides = [small(tmp_path), small(tmp_path)]
    optimizers = [adam(sides[0]), adam(sides[1], False)]

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for model in sides:
        for param in list(model.parameters())[::2]:
            param.register_post_accumulate_grad_hook(halve)
    for index in range(8):
        losses = [one_step(*side, index) for side in zip(sides, optimizers, strict=True)]
        assert losses[0] == losses[1]
    assert_same_state(sides[0].state_dict(), sides[1].state_dict())
    assert sides[0].plan().step is not None
    for model in sides:
        model.close()


class Shared(nn.Module):
    """Layers in one chunk of which micro-batches may skip the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(32) for _ in range(4))
        self.last, self.skip = nn.Linear(32, 32), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale and mix."""
        for scale in list(self.scales)[int(self.skip) :]:
            x = torch.tanh(x * scale)
        out: torch.Tensor = self.last(x)
        return out


def test_micro_batches_may_skip_a_part_of_a_chunk(tmp_path: Path) -> None:
    sides = [GeminiDDP(seeded(lambda: Around(Shared())), **tight(tmp_path, 40 * KIB)) for _ in range(2)]
    optimizers = [adam(sides[0]), adam(sides[1], False)]
    for index in range(8):
        losses = []
        for model, optimizer in zip(sides, optimizers, strict=True):
            for micro, skip in enumerate([False, True, index % 2 == 0]):
                model.module.core.skip = skip
                with model.no_sync() if micro < 2 else nullcontext():
                    loss = square_loss(model, 3 * index + micro)
                    optimizer.backward(loss)
                losses.append(loss.item())
            optimizer.step()
        assert losses[:3] == losses[3:]
    assert_same_state(sides[0].state_dict(), sides[1].state_dict())
    for model in sides:
        model.close()


def test_what_gradients_leave_behind_is_kept_for_the_next_ones(tmp_path: Path) -> None:
    probe = GeminiDDP(seeded(TinyGPT), **tight(tmp_path, "8MiB"))
    adam(probe)  # for its states
    total = sum(chunk.spec.nbytes for chunk in probe.manager.chunks.chunks)
    probe.close()
    # Not all of it fits, but what is there at any moment does: nothing moves.
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, total - 8 * KIB)) as model:
        optimizer = adam(model)
        for step in range(RECIPE.steps):
            managed_step(model, optimizer, gpt_loss, RECIPE, step)
            chunks = model.manager.chunks
            assert chunks.arena_bytes() <= total - 8 * KIB
        moved, left = moved_bytes(model.stats()), chunks._memory.parked_bytes
        assert left > 0
        managed_step(model, optimizer, gpt_loss, RECIPE, RECIPE.steps)
        assert moved_bytes(model.stats()) == moved
        assert chunks._memory.parked_bytes == left
