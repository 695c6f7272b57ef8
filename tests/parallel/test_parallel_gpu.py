"""ZeRO 1 and 2 and the booster on GPUs: what they do on the CPU, behind late operators and collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from booster_models import boosted, mlp
from processes import run_on_ranks
from torch import Tensor, nn
from torch import distributed as dist
from zero_models import EVERY_WAY, adamw, assert_same, odd_net, train, train_plain, weights

from gemini import HybridAdam
from gemini.parallel import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster import Plugin

pytestmark = pytest.mark.cuda
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# A hundredth of a step of Adam. Ranks sum gradients of parts of the batch, one process sums the whole batch,
# and kernels of the CPU and of a GPU sum in other orders.
TOLERANCE = 1e-4
SMALL_CHUNKS = {"min_chunk_size_mb": 1 / 16, "search_range_mb": 1 / 16, "hidden_dim": 16}
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "gemini": lambda: GeminiPlugin("cuda", **SMALL_CHUNKS),
    "zero-1": lambda: LowLevelZeroPlugin(1),
    "zero-2": lambda: LowLevelZeroPlugin(2, overlap_communication=True),
    "zero-2 on the CPU": lambda: LowLevelZeroPlugin(2, cpu_offload=True),
}
BATCHES = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))


def hybrid_adam(params: Any) -> torch.optim.Optimizer:
    return HybridAdam(params, lr=1e-2, weight_decay=0.1)


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name].cpu(), value.cpu(), rtol=0, atol=TOLERANCE)


# -- ZeRO 1 and 2 --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, hybrid_adam])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_gpu_trains_as_the_plain_optimizer_does(make: Any, stage: int) -> None:
    want, _ = train_plain(make=make, model=odd_net().cuda())
    got, _ = train(make=make, model=odd_net().cuda(), stage=stage, overlap_communication=True)
    assert_same(weights(got), weights(want))


def _train_each(options: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    torch.cuda.set_device(dist.get_rank())
    trained = [train(make=hybrid_adam, model=odd_net().cuda(), **each)[0] for each in options]
    return [{name: value.cpu() for name, value in weights(model).items()} for model in trained]


@two_gpus
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_way_to_cut_or_to_send_changes_a_bit(precision: str) -> None:
    common = {"precision": precision, "micro_batches": 2}
    every = run_on_ranks(
        _train_each, 2, [{**common, **way} for way in EVERY_WAY], timeout=200.0, backend="nccl"
    )
    for results in every:
        for got in results:
            assert_same(got, every[0][0])
    if precision == "fp32":
        assert_close(every[0][0], weights(train_plain(make=hybrid_adam)[0]))


# -- the booster ---------------------------------------------------------------------------------


def _train_boosted(plugin: str, batches: Tensor, precision: Any = None) -> dict[str, Tensor]:
    """Train on each batch in two halves, the first without synchronization."""
    booster, model, optimizer = boosted(PLUGINS[plugin](), mlp().cuda(), precision)
    for batch in batches.cuda():
        first, second = batch.chunk(2)
        with booster.no_sync(model):
            booster.backward(model(first).float().square().mean() / 2, optimizer)
        booster.backward(model(second).float().square().mean() / 2, optimizer)
        optimizer.clip_grad_by_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def _train_on_part(plugin: str, precision: Any) -> dict[str, Tensor]:
    torch.cuda.set_device(dist.get_rank())
    return _train_boosted(plugin, BATCHES.chunk(2, dim=1)[dist.get_rank()], precision)


def _plain(batches: Tensor) -> dict[str, Tensor]:
    model: nn.Module = mlp().cuda()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)  # as boosted() makes it
    for batch in batches.cuda():
        for half in batch.chunk(2):
            (model(half).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_plugin_trains_on_a_gpu_as_torch_does(plugin: str) -> None:
    assert_close(_train_boosted(plugin, BATCHES), _plain(BATCHES))


@two_gpus
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_every_plugin_trains_on_two_gpus(plugin: str, precision: str | None) -> None:
    first, second = run_on_ranks(_train_on_part, 2, plugin, precision, timeout=200.0, backend="nccl")
    assert_same(second, first)
    assert not any(torch.equal(value, first[name]) for name, value in weights(mlp()).items())
    if precision is None:
        assert_close(first, _plain(BATCHES))


def _save_and_load(
    plugin: str, precision: Any, directory: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train, save, train on; and load in between instead."""
    torch.cuda.set_device(dist.get_rank())
    path = Path(directory)
    results = []
    for resumed in (False, True):
        booster, model, optimizer = boosted(PLUGINS[plugin](), mlp(seed=int(resumed)).cuda(), precision)
        for step, batch in enumerate(BATCHES.chunk(2, dim=1)[dist.get_rank()].cuda()):
            if step == 2 and resumed:
                booster.load_model(model, path / "model.safetensors")
                booster.load_optimizer(optimizer, path / "optimizer")
            if step == 2 and not resumed:
                booster.save_model(model, path / "model.safetensors")
                booster.save_optimizer(optimizer, path / "optimizer", shard=True)
            booster.backward(model(batch).float().square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        results.append({name: value.detach().cpu().clone() for name, value in model.state_dict().items()})
    return results


@two_gpus
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_files_of_two_gpus_go_on_with_the_same_bits(
    plugin: str, precision: str | None, tmp_path: Path
) -> None:
    arguments = (plugin, precision, str(tmp_path))
    for whole, resumed in run_on_ranks(_save_and_load, 2, *arguments, timeout=200.0, backend="nccl"):
        assert_same(resumed, whole)
