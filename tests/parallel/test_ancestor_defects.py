"""Defects that ColossalAI's Gemini has had, by the names that the anchor study gives them: none is here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import RanksFailed, own_part, run_on_ranks
from safetensors.torch import load_file
from sharded_harness import Recipe, assert_near, assert_same, batch, mlp, train_plain, train_step, wrap
from torch import Tensor, nn
from torch import distributed as dist

import gemini
from gemini import CPUAdam, GeminiOptimizer
from gemini.checkpoint import load, save
from gemini.parallel import Booster, TorchDDPPlugin

RECIPE = Recipe(clip=0.05)
TIGHT = {"device_bytes": "600KiB", "non_model_bytes": 0}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def train(recipe: Recipe, options: Mapping[str, Any], **scaler: Any) -> dict[str, Tensor]:
    """Train on every rank; return the weights."""
    model, optimizer = wrap(mlp, recipe, **options)
    if scaler:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters(), **recipe.adam), model, **scaler)
    with model:
        for step in range(recipe.steps):
            train_step(model, optimizer, recipe, step)
        return weights(model)


def _clip_everywhere(directory: str) -> list[dict[str, Tensor]]:
    ways = ({}, {**TIGHT, "disk_dir": directory})
    return [
        train(recipe, {"mixed_precision": "bf16", **way}) for recipe in (RECIPE, Recipe()) for way in ways
    ]


@pytest.mark.dear("several optimizers over ranks")
def test_b1_bf16_gradients_are_clipped_wherever_they_are(tmp_path: Path) -> None:
    clipped, clipped_on_disk, plain, plain_on_disk = run_on_ranks(_clip_everywhere, 2, str(tmp_path))[0]
    assert_same(clipped_on_disk, clipped)
    assert_same(plain_on_disk, plain)
    assert any(not torch.equal(clipped[key], plain[key]) for key in plain)


def _grow_at_every_step() -> list[dict[str, Tensor]]:
    # With so large an eps an update is in proportion to the gradient.
    recipe = Recipe(adam={"lr": 30.0, "eps": 1.0})
    return [
        train(recipe, {"mixed_precision": "fp16"}, initial_scale=2**12, growth_interval=interval)
        for interval in (1, 1000)
    ]


def test_b2_the_scale_that_is_taken_out_is_that_of_the_backward_pass() -> None:
    growing, constant = run_on_ranks(_grow_at_every_step, 2)[0]
    start = weights(mlp())
    moved = max(float((constant[key] - start[key]).abs().max()) for key in start)
    assert moved > 0.05
    assert_near(growing, constant, tolerance=0.02 * moved)  # rounding; half a gradient would be far more


def _overflow_then_recover() -> list[dict[str, Tensor]]:
    found = []
    for overflows in (True, False):
        model, optimizer = wrap(mlp, RECIPE, mixed_precision="fp16")
        with model:
            if overflows:
                optimizer.backward(model(own_part(batch(9))).float().sum() * float("inf"))
                optimizer.step()
            for step in range(RECIPE.steps):
                train_step(model, optimizer, RECIPE, step)
            found.append(weights(model))
    return found


def test_b3_nothing_of_an_overflow_is_left_in_the_next_step() -> None:
    after_overflow, without = run_on_ranks(_overflow_then_recover, 2)[0]
    assert_same(after_overflow, without)


def _save_and_load(directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = wrap(mlp, RECIPE, mixed_precision="bf16")
    with model:
        train_step(model, optimizer, RECIPE, 0)
        save(directory, model, optimizer)
        saved = weights(model)
        train_step(model, optimizer, RECIPE, 1)
        load(directory, model, optimizer)
        return saved, weights(model)


def test_b4_masters_are_saved_and_loaded_in_fp32(tmp_path: Path) -> None:
    saved, loaded = run_on_ranks(_save_and_load, 2, str(tmp_path))[0]
    assert_same(loaded, saved)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())


def test_b5_the_wrappers_clip_and_take_no_option_that_nobody_knows() -> None:
    model = gemini.zero_model_wrapper(mlp(), 3)
    optimizer = gemini.zero_optim_wrapper(model, CPUAdam(model.parameters(), **RECIPE.adam), max_norm=0.05)
    for step in range(RECIPE.steps):
        optimizer.backward(model(batch(step)).square().mean())
        optimizer.step()
    assert_near(weights(model), train_plain(mlp, RECIPE)[1])
    with pytest.raises(TypeError, match="clipping_norm"):
        gemini.zero_optim_wrapper(model, CPUAdam(model.parameters()), clipping_norm=0.05)


def _strict(order: list[list[int]]) -> dict[str, Tensor]:
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    model = gemini.GeminiDDP(layers, strict_ddp_mode=True, min_chunk_size_mb=0.01, search_range_mb=0.01)
    optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
    with model:
        for step in range(3):
            x = own_part(batch(step))
            for index in order[dist.get_rank()]:
                x = torch.tanh(layers[index](x))
            optimizer.backward(x.square().mean())
            optimizer.step()
        return weights(model)


def test_b6_strict_ddp_mode_refuses_ranks_that_differ() -> None:
    first, second = run_on_ranks(_strict, 2, [[0, 1, 2], [0, 1, 2]])
    assert_same(second, first)
    with pytest.raises(RanksFailed, match=r"ranks \[1\] run other operators than rank 0"):
        run_on_ranks(_strict, 2, [[0, 1, 2], [2, 1, 0]], timeout=30.0)


def _norm() -> float:
    model, optimizer = wrap(mlp, RECIPE)
    with model:
        optimizer.backward(model(own_part(batch(0))).square().mean())
        return float(optimizer.clip_grad_by_norm(1.0))


def test_b7_every_rank_clips_by_the_norm_of_the_whole_gradient() -> None:
    model = mlp()
    model(batch(0)).square().mean().backward()
    want = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    norms = run_on_ranks(_norm, 3)
    assert norms == [norms[0]] * 3
    assert norms[0] == pytest.approx(want, rel=1e-6)


def _evaluate_first(directory: str) -> list[dict[str, Tensor]]:
    found = []
    for evaluates in (True, False):
        model, optimizer = wrap(mlp, RECIPE, **TIGHT, disk_dir=directory)
        with model:
            if evaluates:
                with torch.no_grad():
                    model(batch(50))
            for step in range(RECIPE.steps):
                train_step(model, optimizer, RECIPE, step)
            assert not model.manager.chunks.table.diverged()
            found.append(weights(model))
    return found


def test_b26_an_evaluation_before_the_first_step_is_not_part_of_it(tmp_path: Path) -> None:
    evaluated, without = run_on_ranks(_evaluate_first, 2, str(tmp_path))[0]
    assert_same(evaluated, without)


def _mean_of_large_gradients() -> float:
    line = nn.Linear(1, 1, bias=False)
    model = gemini.GeminiDDP(line, mixed_precision="fp16", reduce_dtype="fp16")
    optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model, initial_scale=1)
    with model:
        optimizer.backward(model(torch.tensor([[40000.0]])).sum())
        return float(optimizer.clip_grad_by_norm(1e9))


def test_b28_16_bit_gradients_are_divided_before_they_are_added() -> None:
    assert run_on_ranks(_mean_of_large_gradients, 2) == [40000.0] * 2


def test_b31_a_smaller_file_leaves_nothing_of_the_larger_one_before(tmp_path: Path) -> None:
    booster = Booster(plugin=TorchDDPPlugin())
    for width in (256, 8):
        model, *_ = booster.boost(nn.Linear(width, width))
        booster.save_model(model, tmp_path / "model.safetensors")
        found = load_file(tmp_path / "model.safetensors")
        assert torch.equal(found["weight"], model.state_dict()["weight"])


def _masters() -> dict[str, Tensor]:
    model, _ = wrap(mlp, RECIPE, mixed_precision="fp16")
    with model:
        return weights(model)


def test_b32_masters_are_made_from_the_weights_before_the_cast() -> None:
    for masters in run_on_ranks(_masters, 2):
        assert_same(masters, weights(mlp()))
