"""Does each feature work on a GPU at all? A few tiny steps each, the first look on a machine that is lent.

What they prove is proven elsewhere at length; here a failure names the feature within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import SMALL_CHUNKS, network, network_loss, train
from torch import nn
from training_harness import assert_within_budgets, moved_bytes

from gemini import GeminiDDP, GeminiOptimizer, HybridAdam
from gemini.checkpoint import load, save, save_async

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")
_MIB = 2**20
TIGHT = {"device_bytes": 28 * _MIB, "non_model_bytes": 0}
HOST = {**TIGHT, "host_bytes": 128 * _MIB}


@contextmanager
def managed(module: nn.Module | None = None, **options: Any) -> Iterator[GeminiDDP]:
    """Yield the network in chunks of one block, on the GPU because there is one."""
    with GeminiDDP(module or network(), **{**SMALL_CHUNKS, **options}) as model:
        yield model


def adam(model: GeminiDDP, **options: Any) -> GeminiOptimizer:
    """Return the optimizer that :func:`plain` has, over chunks."""
    return GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), model, **options)


def plain(steps: range = range(6)) -> list[float]:
    """Return the losses of training that nobody manages."""
    model = network().to(CUDA)
    return train(model, HybridAdam(model.parameters(), lr=1e-2), CUDA, steps)


def test_resident() -> None:
    with managed() as model:
        assert train(model, adam(model), CUDA) == plain()
        assert moved_bytes(model.stats()) == 0


@pytest.mark.parametrize("ratio", [None, 0.0, "auto"], ids=["updates on DEVICE", "on HOST", "auto"])
def test_host(ratio: Any) -> None:
    with managed(**HOST) as model:
        assert train(model, adam(model, gpu_margin_mem_ratio=ratio), CUDA) == plain()
        assert moved_bytes(model.stats()) > 0
        assert_within_budgets(model.stats())


@pytest.mark.parametrize("host_mib", [0, 24])
def test_disk(host_mib: int, tmp_path: Path) -> None:
    with managed(**TIGHT, host_bytes=host_mib * _MIB, disk_dir=str(tmp_path)) as model:
        assert train(model, adam(model), CUDA) == plain()
        assert model.stats()["disk_write"]["bytes"] > 0


@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_policies(policy: str) -> None:
    budget = HOST if policy == "cpu" else {}
    with managed(placement_policy=policy, **budget) as model:
        assert train(model, adam(model), CUDA) == plain()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_with_clipping(precision: str) -> None:
    losses = []
    for budget in ({}, HOST):
        with managed(mixed_precision=precision, force_outputs_fp32=True, **budget) as model:
            losses.append(train(model, adam(model, max_norm=0.1, initial_scale=2**10), CUDA))
    assert losses[0] == losses[1]


def test_accumulation_and_evaluation() -> None:
    seen: list[list[float]] = []
    for budget in ({}, HOST):
        with managed(**budget) as model:
            optimizer = adam(model)
            seen.append([])
            for step in range(3):
                for micro in range(2):
                    optimizer.backward(network_loss(model, 2 * step + micro, CUDA))
                optimizer.step()
                with torch.no_grad():
                    seen[-1].append(network_loss(model, 99, CUDA).item())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("overlap", [False, "backward"])
def test_overlap(overlap: Any) -> None:
    with managed(**HOST) as model:
        assert train(model, adam(model, overlap=overlap), CUDA) == plain()


def test_activation_offload() -> None:
    with managed(**HOST, activation_offload=True) as model:
        assert train(model, adam(model), CUDA) == plain()


@pytest.mark.parametrize("compiled", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks(compiled: dict[str, Any]) -> None:
    losses = []
    for budget in ({}, HOST):
        module = network()
        for layer in module.layers:
            layer.compile(**compiled)
        with managed(module, **budget) as model:
            losses.append(train(model, adam(model), CUDA))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("saving", [save, lambda *what: save_async(*what).wait()], ids=["save", "save_async"])
def test_checkpoint(saving: Callable[..., Any], tmp_path: Path) -> None:
    with managed(**HOST) as model:
        optimizer = adam(model)
        got = train(model, optimizer, CUDA, range(3))
        saving(tmp_path / "saved", model, optimizer)
    with managed(**HOST) as model:
        optimizer = adam(model)
        load(tmp_path / "saved", model, optimizer)
        assert got + train(model, optimizer, CUDA, range(3, 6)) == plain()


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 8))
    with managed(module, **HOST) as model:
        assert model(torch.ones(2, 128, device=CUDA)).isfinite().all()
