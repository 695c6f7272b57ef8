"""Several processes with a GPU each: simulated ones over gloo, and real ones over NCCL where there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sharded_harness
import torch
from gpu_harness import GpuModel, LateDevice, make_gpu
from late_collectives import LateCollectives, at_once
from pairs import pairs
from processes import run_on_ranks
from sharded_harness import WIDTH, Recipe, assert_near, assert_same, mlp, tied, train_plain, train_step
from torch import Tensor, nn

from gemini import CPUAdam, GeminiOptimizer, HybridAdam
from gemini.checkpoint import load, save, save_async
from gemini.chunk.memory import ComputeDevice
from gemini.optim import gradients as gradients_module
from gemini.optim.gradients import squares_by_operators

SMALL_CHUNKS = {"min_chunk_size_mb": 1 / 16, "search_range_mb": 1 / 16, "hidden_dim": WIDTH}


@contextmanager
def gpu_of_this_rank(kind: str) -> Iterator[ComputeDevice]:
    """Make this rank's GPU; where operators are late, collectives are."""
    if kind == "cuda":
        torch.cuda.set_device(torch.distributed.get_rank())
    gpu = make_gpu(kind)
    if not isinstance(gpu, LateDevice):
        yield gpu
        return
    collectives = LateCollectives(gpu)

    def exact_squares(values: Tensor) -> Tensor:
        gpu.synchronize()
        return at_once(squares_by_operators)(values)

    with pytest.MonkeyPatch.context() as patch:
        collectives.patch(patch)
        patch.setattr(gradients_module, "exact_squares", exact_squares)
        patch.setattr(sharded_harness, "mean_over_ranks", at_once(sharded_harness.mean_over_ranks))
        with gpu.running(patch):
            yield gpu
        collectives.close()
        assert collectives.num_late > 0


def budgets(directory: str, gpu: ComputeDevice) -> dict[str, dict[str, Any]]:
    """Ways to place the same training."""
    block = gpu.block_bytes
    tight = {"device_bytes": 18 * block, "non_model_bytes": 0, "gather_bytes": 1}
    return {
        "all on DEVICE": {"device_bytes": 256 * block, "host_bytes": 0},
        "HOST": {**tight, "host_bytes": 64 * block},
        "DISK": {**tight, "host_bytes": 0, "disk_dir": directory},
        "large chunks": {"device_bytes": 256 * block, "host_bytes": 0, "min_chunk_size_mb": 0.25},
    }


def wrap(
    build: Callable[[], nn.Module], gpu: ComputeDevice, recipe: Recipe, **options: Any
) -> tuple[GpuModel, GeminiOptimizer]:
    """Return the managed model on this rank's GPU, and its optimizer."""
    of_optimizer = {key: options.pop(key) for key in ("gpu_margin_mem_ratio", "overlap") if key in options}
    model = GpuModel(build(), device=gpu, **{**SMALL_CHUNKS, **options})
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = CPUAdam if gpu.torch_device.type == "cpu" else HybridAdam
    return model, GeminiOptimizer(kind(trained, **recipe.adam), model, **of_optimizer)


def weights_of(model: GpuModel) -> dict[str, Tensor]:
    """Return the weights with their values there, in host memory."""
    state = {key: value.cpu().clone() for key, value in model.state_dict().items()}
    model._gemini.device.synchronize()
    return state


def train(
    build: Callable[[], nn.Module], gpu: ComputeDevice, recipe: Recipe, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank's part of each batch; return the mean losses and the weights."""
    model, optimizer = wrap(build, gpu, recipe, **options)
    with model:
        losses = [loss for step in range(recipe.steps) for loss in train_step(model, optimizer, recipe, step)]
        model.manager.chunks.table.check_invariants()
        for tier in ("device", "host", "disk"):
            stats = model.stats()[tier]
            assert stats["peak_bytes"] <= stats["budget_bytes"]
        return losses, weights_of(model)


def _train_all_ways(kind: str, build: Any, recipe: Recipe, directory: str) -> dict[str, Any]:
    with gpu_of_this_rank(kind) as gpu:
        return {
            name: train(build, gpu, recipe, **options) for name, options in budgets(directory, gpu).items()
        }


def assert_all_alike(results: list[dict[str, Any]]) -> tuple[list[float], dict[str, Tensor]]:
    """See that all ranks had the same losses and weights in every way; return them."""
    first_losses, first = results[0]["all on DEVICE"]
    for result in results:
        for losses, weights in result.values():
            assert losses == first_losses
            assert_same(weights, first)
    return first_losses, first


@pairs(kind=["simulated", "late copies", "late operators"], build=[mlp, tied], world=[2, 3])
def test_ranks_train_as_one_and_budgets_change_no_bit(
    kind: str, build: Any, world: int, tmp_path: Path
) -> None:
    recipe = Recipe(clip=0.05, accumulate=2, no_sync=True)
    want_losses, want = train_plain(build, recipe)
    results = run_on_ranks(_train_all_ways, world, kind, build, recipe, str(tmp_path), timeout=100.0)
    first_losses, first = assert_all_alike(results)
    assert first_losses == pytest.approx(want_losses, rel=1e-5)
    assert_near(first, want)


def _train_otherwise(kind: str, precision: str | None, directory: str) -> dict[str, Any]:
    recipe = Recipe(clip=0.05)
    with gpu_of_this_rank(kind) as gpu:
        all_on_device, on_host, on_disk, _ = budgets(directory, gpu).values()
        on_host = {**on_host, "mixed_precision": precision}
        on_disk = {**on_disk, "mixed_precision": precision}
        all_on_host = {**on_host, "host_bytes": 256 * gpu.block_bytes}
        return {
            "all on DEVICE": train(mlp, gpu, recipe, **all_on_device, mixed_precision=precision),
            "updates on HOST": train(mlp, gpu, recipe, **all_on_host, gpu_margin_mem_ratio=0.0),
            "some on HOST": train(mlp, gpu, recipe, **all_on_host, gpu_margin_mem_ratio=0.5),
            "each otherwise": train(
                mlp, gpu, recipe, **all_on_host, gpu_margin_mem_ratio=float(torch.distributed.get_rank())
            ),
            "activations": train(mlp, gpu, recipe, **on_disk, activation_offload=True),
            "no overlap": train(mlp, gpu, recipe, **on_host, overlap=False),
        }


def _train_with_a_break(kind: str, precision: str | None, directory: str) -> dict[str, Any]:
    recipe = Recipe(clip=0.05)
    with gpu_of_this_rank(kind) as gpu:
        all_on_device, on_host, on_disk, _ = budgets(directory, gpu).values()
        on_host = {**on_host, "mixed_precision": precision}
        on_disk = {**on_disk, "mixed_precision": precision}
        return {
            "all on DEVICE": train(mlp, gpu, recipe, **all_on_device, mixed_precision=precision),
            "saved": _resume(gpu, recipe, f"{directory}/now", save, **on_disk),
            "saved beside training": _resume(gpu, recipe, f"{directory}/later", save_async, **on_host),
        }


def _resume(
    gpu: ComputeDevice, recipe: Recipe, path: str, save_to: Callable[..., Any], **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Train half, save, train on another model from there."""
    losses, half = [], recipe.steps // 2
    model, optimizer = wrap(mlp, gpu, recipe, **options)
    with model:
        losses += [loss for step in range(half) for loss in train_step(model, optimizer, recipe, step)]
        saved = save_to(path, model, optimizer)
        train_step(model, optimizer, recipe, half)  # beside a save that goes on
        if save_to is save_async:
            saved.wait()
    model, optimizer = wrap(mlp, gpu, recipe, **options)
    with model:
        load(path, model, optimizer)
        rest = range(half, recipe.steps)
        losses += [loss for step in rest for loss in train_step(model, optimizer, recipe, step)]
        return losses, weights_of(model)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("kind", ["late copies", "late operators"])
def test_what_is_done_on_the_way_changes_no_bit(kind: str, precision: str | None, tmp_path: Path) -> None:
    assert_all_alike(run_on_ranks(_train_otherwise, 2, kind, precision, str(tmp_path), timeout=100.0))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_checkpoint_of_ranks_goes_on_with_the_same_bits(precision: str | None, tmp_path: Path) -> None:
    done = run_on_ranks(_train_with_a_break, 2, "late copies", precision, str(tmp_path), timeout=100.0)
    assert_all_alike(done)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.cuda
@two_gpus
@pytest.mark.parametrize("build", [mlp, tied])
def test_two_gpus_train_as_one_and_budgets_change_no_bit(build: Any, tmp_path: Path) -> None:
    recipe = Recipe(clip=0.05, accumulate=2, no_sync=True)
    arguments = ("cuda", build, recipe, str(tmp_path))
    assert_all_alike(run_on_ranks(_train_all_ways, 2, *arguments, timeout=200.0, backend="nccl"))


@pytest.mark.cuda
@two_gpus
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("job", [_train_otherwise, _train_with_a_break])
def test_what_two_gpus_do_on_the_way_changes_no_bit(job: Any, precision: str | None, tmp_path: Path) -> None:
    arguments = ("cuda", precision, str(tmp_path))
    assert_all_alike(run_on_ranks(job, 2, *arguments, timeout=200.0, backend="nccl"))
