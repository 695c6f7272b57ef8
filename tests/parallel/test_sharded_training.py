"""A model cut among ranks trains as one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import own_part, run_on_ranks
from sharded_harness import (
    SMALL_CHUNKS,
    Recipe,
    assert_near,
    assert_same,
    batch,
    mlp,
    tied,
    train_plain,
    train_sharded,
    train_step,
    wrap,
)
from torch import Tensor, nn
from torch import distributed as dist

import gemini
from gemini import ConfigError, GeminiDDP, GeminiOptimizer

Budgets = dict[str, dict[str, Any]]


def budgets(directory: Path) -> Budgets:
    """Ways to place the same training: where chunks are, how large they are, how many are whole."""
    tight = {"device_bytes": "600KiB", "disk_dir": str(directory), "non_model_bytes": 0}
    return {
        "all on DEVICE": {"gather_bytes": "1GiB"},
        "one chunk": {"min_chunk_size_mb": 1},
        "few whole": {"gather_bytes": 1},
        "DISK": tight,
        "HOST": {"device_bytes": "600KiB", "host_bytes": "8MiB", "non_model_bytes": 0, "gather_bytes": 1},
        "activations": {**tight, "activation_offload": True},
    }


def _train_all_ways(build: Any, recipe: Recipe, ways: Budgets) -> dict[str, Any]:
    return {name: train_sharded(build, recipe, **options) for name, options in ways.items()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("build", [mlp, tied])
def test_ranks_train_as_one_and_budgets_change_no_bit(world: int, build: Any, tmp_path: Path) -> None:
    recipe = Recipe(clip=0.05)
    results = run_on_ranks(_train_all_ways, world, build, recipe, budgets(tmp_path), timeout=300.0)
    want_losses, want = train_plain(build, recipe)
    first_losses, first = results[0]["all on DEVICE"]
    assert_near(first, want)
    assert first_losses == pytest.approx(want_losses, rel=1e-5)
    for result in results:
        for losses, weights in result.values():
            assert losses == first_losses
            assert_same(weights, first)


def _train_precisions(ways: Budgets) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for precision in ("bf16", "fp16"):
        for name, options in ways.items():
            results[f"{precision} {name}"] = train_sharded(
                mlp, Recipe(clip=0.1), mixed_precision=precision, keep_fp32=["3"], **options
            )
    return results


def test_16_bit_ranks_keep_fp32_masters_that_no_budget_changes(tmp_path: Path) -> None:
    ways = {
        name: way for name, way in budgets(tmp_path).items() if name in ("few whole", "DISK", "one chunk")
    }
    results = run_on_ranks(_train_precisions, 2, ways, timeout=300.0)
    _, want = train_plain(mlp, Recipe(clip=0.1))
    for precision in ("bf16", "fp16"):
        _, first = results[0][f"{precision} few whole"]
        assert_near(first, want, tolerance=5e-2)
        for result in results:
            for name in ways:
                assert_same(result[f"{precision} {name}"][1], first)


def _masters_after_wrapping() -> dict[str, Tensor]:
    model = GeminiDDP(mlp(), mixed_precision="bf16", **SMALL_CHUNKS)
    with model:
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_masters_are_made_from_the_original_fp32_weights() -> None:
    want = {key: value.detach() for key, value in mlp().state_dict().items()}
    for got in run_on_ranks(_masters_after_wrapping, 2):
        assert_same(got, want)


def _accumulate(recipe: Recipe) -> tuple[Any, int]:
    model, optimizer = wrap(mlp, recipe, gather_bytes="1GiB")
    with model:
        losses = [loss for step in range(recipe.steps) for loss in train_step(model, optimizer, recipe, step)]
        assert model.peers is not None
        reduced = model.peers.traffic.reduced
        return (losses, {key: value.clone() for key, value in model.state_dict().items()}), reduced


def test_accumulation_without_sync_exchanges_gradients_once_per_step() -> None:
    each = run_on_ranks(_accumulate, 2, Recipe(accumulate=3, clip=0.1))
    once = run_on_ranks(_accumulate, 2, Recipe(accumulate=3, clip=0.1, no_sync=True))
    _, want = train_plain(mlp, Recipe(accumulate=3, clip=0.1))
    assert each[0][1] == 3 * once[0][1] > 0
    for (_, weights), _ in (*each, *once):
        assert_near(weights, want)
    assert_same(once[0][0][1], once[1][0][1])


class Branching(nn.Module):
    """Each rank runs other layers, in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


ORDERS = [[[0, 1, 2], [2, 1], [3]], [[0, 2, 1, 3, 0], [1], [3, 2]]]  # per rank and step; 4 is used by nobody


def _train_diverging(**options: Any) -> dict[str, Tensor]:
    model, optimizer = wrap(Branching, Recipe(), **options)
    with model:
        for step, order in enumerate(ORDERS[dist.get_rank()]):
            optimizer.backward(model(own_part(batch(step)), order).square().mean())
            optimizer.clip_grad_by_norm(0.1)
            optimizer.step()
        model.manager.chunks.table.check_invariants()
        return {key: value.clone() for key, value in model.state_dict().items()}


def _train_diverging_all_ways() -> list[dict[str, Tensor]]:
    return [_train_diverging(gather_bytes="1GiB"), _train_diverging(gather_bytes=1)]


def test_ranks_that_run_different_operators_finish_their_steps() -> None:
    results = run_on_ranks(_train_diverging_all_ways, 2)
    model = Branching()
    optimizer = gemini.CPUAdam(model.parameters(), **Recipe().adam)
    for step in range(3):
        losses = [
            model(part, ORDERS[rank][step]).square().mean() for rank, part in enumerate(batch(step).chunk(2))
        ]
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    want = model.state_dict()
    for ways in results:
        for weights in ways:
            assert_near(weights, want)
    assert torch.equal(results[0][0]["layers.4.weight"], Branching().layers[4].weight)


def _overflow_on_one_rank() -> tuple[list[float], bool]:
    recipe = Recipe()
    model, optimizer = wrap(mlp, recipe, mixed_precision="fp16")
    with model:
        assert optimizer.loss_scale is not None
        scales = []
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for step in range(3):
            loss = model(own_part(batch(step))).float().square().mean()
            if dist.get_rank() == 1 and step < 2:
                loss = loss * float("inf")
            optimizer.backward(loss)
            optimizer.step()
            scales.append(optimizer.loss_scale.scale)
            if step == 1:
                unchanged = all(torch.equal(before[k], v) for k, v in model.state_dict().items())
        changed = any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
        return scales, unchanged and changed


def test_overflow_on_one_rank_skips_the_step_on_all_and_leaves_no_trace() -> None:
    results = run_on_ranks(_overflow_on_one_rank, 2)
    assert results[0] == results[1]
    scales, as_wanted = results[0]
    assert scales == [2.0**15, 2.0**14, 2.0**14]  # the first is forgiven
    assert as_wanted


def _evaluate_first(directory: str) -> tuple[Any, Any]:
    recipe = Recipe(steps=3)
    model, optimizer = wrap(mlp, recipe, device_bytes="600KiB", disk_dir=directory, non_model_bytes=0)
    with model:
        seen = []
        for step in range(3):
            with torch.no_grad():
                seen.append(model(batch(50)).sum().item())
            train_step(model, optimizer, recipe, step)
        return seen, {key: value.clone() for key, value in model.state_dict().items()}


def test_evaluations_between_steps_see_the_weights_and_change_nothing(tmp_path: Path) -> None:
    results = run_on_ranks(_evaluate_first, 2, str(tmp_path))
    _, want = train_plain(mlp, Recipe(steps=3))
    model = mlp()
    with torch.no_grad():
        assert results[0][0][0] == model(batch(50)).sum().item()
    for seen, weights in results:
        assert seen == results[0][0]
        assert_near(weights, want)


def _bytes_and_traffic(steps: int) -> dict[str, Any]:
    model, optimizer = wrap(mlp, Recipe(), gather_bytes=1)
    with model:
        peers = model.peers
        assert peers is not None
        for step in range(2):
            train_step(model, optimizer, Recipe(), step)
        before = (peers.traffic.gathered, peers.traffic.reduced)
        for step in range(2, 2 + steps):
            train_step(model, optimizer, Recipe(), step)
        after = (peers.traffic.gathered, peers.traffic.reduced)
        windows = sum(group.param.spec.nbytes for group in model.storage.groups)
        return {
            "gathered": (after[0] - before[0]) / steps,
            "reduced": (after[1] - before[1]) / steps,
            "windows": windows,
            "kept": model.stats()["device"]["bytes"],
        }


@pytest.mark.parametrize("world", [2, 4])
def test_traffic_and_memory_are_those_of_zero_3(world: int) -> None:
    for found in run_on_ranks(_bytes_and_traffic, world, 3, timeout=120.0):
        part = found["windows"] * (world - 1) / world
        # Whole for forward and again for backward, but for what backward begins with.
        assert part <= found["gathered"] <= 2 * part
        assert found["reduced"] == part
        # Parameters and two moments, but for moments of parts that are padding alone.
        assert found["windows"] / world < found["kept"] <= 3 * found["windows"] / world


def _different_models() -> None:
    width = 64 + dist.get_rank()
    GeminiDDP(nn.Linear(width, width), **SMALL_CHUNKS)


def _refused() -> str:
    with pytest.raises(ConfigError) as refused:
        _different_models()
    return str(refused.value)


def test_ranks_with_different_models_are_refused() -> None:
    for message in run_on_ranks(_refused, 2):
        assert "ranks [1] have another chunk layout" in message


def _first_rank_decides() -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model[1].running_mean.fill_(float(dist.get_rank() + 1))
    own = model[0].weight.detach().clone()
    with GeminiDDP(model, **SMALL_CHUNKS) as managed:
        return {key: value.clone() for key, value in managed.state_dict().items()}, own


def test_all_ranks_start_with_the_first_ranks_weights_and_buffers() -> None:
    (first, own), (second, _) = run_on_ranks(_first_rank_decides, 2)
    assert torch.equal(first["0.weight"], own)
    assert_same(second, first)
    assert float(second["1.running_mean"][0]) == 1.0


def _on_subgroup() -> dict[str, Tensor] | None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    model = GeminiDDP(mlp(), process_group=group, **SMALL_CHUNKS)
    optimizer = GeminiOptimizer(gemini.CPUAdam(model.parameters(), **Recipe().adam), model)
    with model:
        for step in range(4):
            part = batch(step).chunk(2)[dist.get_rank() // 2]
            optimizer.backward(model(part).square().mean())
            optimizer.step()
        return {key: value.clone() for key, value in model.state_dict().items()}


def test_a_process_group_of_some_ranks_is_used() -> None:
    results = run_on_ranks(_on_subgroup, 3)
    _, want = train_plain(mlp, Recipe())
    assert results[1] is None
    assert_near(results[0], want)
    assert_same(results[2], results[0])
