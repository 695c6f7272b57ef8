"""Hybrid sharding: several copies of a model, each cut among ranks, trained as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from sharded_harness import (
    Recipe,
    assert_near,
    assert_same,
    mlp,
    tied,
    train_plain,
    train_sharded,
    train_step,
    wrap,
)
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini import ConfigError, GeminiDDP
from gemini.comm.ranks import ProcessGroupPeers
from gemini.parallel import Booster, GeminiPlugin
from gemini.sharding.gradient_exchange import average_over_copies

RECIPE = Recipe(clip=0.05)


def mesh(replicas: int = 2, shards: int = 2) -> Any:
    """The ranks in rows that each hold a copy of the model."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def _train_all_ways(build: Any, recipe: Recipe, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ranks = mesh()
    return {
        name: train_sharded(build, recipe, process_group=ranks, **options) for name, options in ways.items()
    }


@pytest.mark.parametrize("build", [mlp, tied])
@pytest.mark.parametrize("recipe", [RECIPE, Recipe(accumulate=2), Recipe(accumulate=2, no_sync=True)])
def test_copies_train_as_one_process_and_budgets_change_no_bit(
    build: Any, recipe: Recipe, tmp_path: Path
) -> None:
    tight = {"device_bytes": "600KiB", "disk_dir": str(tmp_path), "non_model_bytes": 0}
    ways = {"all": {"gather_bytes": "1GiB"}, "one chunk": {"min_chunk_size_mb": 1}, "DISK": tight}
    results = run_on_ranks(_train_all_ways, 4, build, recipe, ways, timeout=300.0)
    _, want = train_plain(build, recipe)
    _, first = results[0]["all"]
    assert_near(first, want)
    for result in results:
        for _, weights in result.values():
            if recipe.accumulate == 1 or recipe.no_sync:
                assert_same(weights, first)
            else:
                assert_near(weights, first)


def _mean_twice() -> tuple[list[Tensor], list[Tensor]]:
    """Return weights after the mean was taken between two backward passes, and at the end alone."""
    found = []
    for looks in (True, False):
        model, optimizer = wrap(mlp, RECIPE, process_group=mesh())
        with model:
            torch.manual_seed(dist.get_rank())
            for _ in range(2):
                optimizer.backward(model(torch.randn(3, 64)).square().mean())
                if looks:
                    assert model.manager.sharding is not None
                    model.manager.sharding.finish_gradients()
            optimizer.step()
            found.append([value.clone() for value in model.state_dict().values()])
    return found[0], found[1]


def test_a_gradient_that_was_averaged_already_is_not_averaged_away() -> None:
    for looked, never in run_on_ranks(_mean_twice, 4):
        for mine, want in zip(looked, never, strict=True):
            torch.testing.assert_close(mine, want, rtol=0, atol=2e-6)


def _traffic(reduce_dtype: str | None) -> dict[str, int]:
    model, optimizer = wrap(mlp, RECIPE, process_group=mesh(), reduce_dtype=reduce_dtype)
    with model:
        train_step(model, optimizer, RECIPE, 0)
        assert model.peers is not None
        before = vars(model.peers.traffic).copy()
        train_step(model, optimizer, RECIPE, 1)
        sent = {name: count - before[name] for name, count in vars(model.peers.traffic).items()}
        numel = sum(group.grad.spec.numel for group in model.storage.trainable_groups() if group.grad)
        return {**sent, "numel": numel}


@pytest.mark.parametrize(("reduce_dtype", "itemsize"), [(None, 4), ("bf16", 2)])
def test_copies_exchange_their_parts_alone(reduce_dtype: str | None, itemsize: int) -> None:
    for sent in run_on_ranks(_traffic, 4, reduce_dtype):
        assert sent["reduced"] == itemsize * sent["numel"] // 2
        # Of this rank's half: one half sent to be added, the other half's sum sent back.
        assert sent["replicated"] == itemsize * sent["numel"] // 2


@pytest.mark.parametrize(("precision", "travels_in"), [(None, "bf16"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_copies_in_16_bits_train_alike_in_any_budget(
    precision: str | None, travels_in: str, tmp_path: Path
) -> None:
    tight = {"device_bytes": "600KiB", "disk_dir": str(tmp_path), "non_model_bytes": 0}
    options = {"mixed_precision": precision, "reduce_dtype": travels_in}
    ways = {name: {**way, **options} for name, way in {"all": {}, "DISK": tight}.items()}
    results = run_on_ranks(_train_all_ways, 4, mlp, RECIPE, ways, timeout=300.0)
    _, want = train_plain(mlp, RECIPE)
    _, first = results[0]["all"]
    assert_near(first, want, tolerance=2e-2)
    for result in results:
        for _, weights in result.values():
            assert_same(weights, first)


def _mean(values: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Let three copies, each of one rank, take the mean of what they have."""
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert own is not None
    peers = ProcessGroupPeers(own, dist.group.WORLD, [0, 1, 2])
    mine = values[dist.get_rank()].clone()
    average_over_copies(peers, mine, torch.full((mine.numel() + 3,), torch.nan), dtype)
    return mine


@pytest.mark.parametrize("numel", [1, 2, 7, 4096])
def test_parts_are_added_in_the_order_of_the_copies(numel: int) -> None:
    torch.manual_seed(numel)
    values = [torch.randn(numel) * 10.0**power for power in (0, 4, -3)]
    want = (values[0] + values[1] + values[2]).mul(1.0 / 3)
    for got in run_on_ranks(_mean, 3, values, None):
        assert torch.equal(got, want)


@pytest.mark.parametrize("numel", [2, 6, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_in_16_bits_are_divided_first_and_added_in_fp32(numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(numel)
    values = [
        torch.randn(numel) * scale for scale in (15000.0, 1.0, 30000.0)
    ]  # an fp16 sum would be infinite
    rounded = [value.mul(1.0 / 3).to(dtype).float() for value in values]
    want = (rounded[0] + rounded[1] + rounded[2]).to(dtype).float()
    for got in run_on_ranks(_mean, 3, values, dtype):
        assert torch.equal(got, want)


def _refusals() -> None:
    with pytest.raises(ConfigError, match="last dimension shards"):
        GeminiDDP(mlp(), process_group=mesh(2, 1))
    with pytest.raises(ConfigError, match="do not ascend"):
        GeminiDDP(mlp(), process_group=DeviceMesh("cpu", [1, 0]))
    cube = init_device_mesh("cpu", (1, 1, 2))
    with pytest.raises(ConfigError, match="3 dimensions"):
        GeminiDDP(mlp(), process_group=cube)
    with GeminiDDP(mlp(), process_group=mesh(1, 2)) as model:
        assert model.peers is not None
        assert model.peers.share.replicas == 1


def test_meshes_that_do_not_shard_are_refused() -> None:
    run_on_ranks(_refusals, 2)


def _boost() -> tuple[int, dict[str, Tensor]]:
    plugin = GeminiPlugin(process_group=mesh(), min_chunk_size_mb=0.01, search_range_mb=0.01)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=2)
    model, *_ = booster.boost(mlp())
    return len(list(loader)), {key: value.clone() for key, value in model.state_dict().items()}


def test_a_booster_divides_data_among_all_copies() -> None:
    for batches, _ in run_on_ranks(_boost, 4):
        assert batches == 1
