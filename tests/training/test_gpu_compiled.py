"""Compiled blocks where DEVICE is a GPU: a real one where there is one, else simulated ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu_harness import (
    KINDS,
    SMALL_CHUNKS,
    GpuModel,
    LateDevice,
    make_gpu,
    network,
    network_loss,
    optimizer_of,
    simulated,
    train,
)
from torch import Tensor, nn
from training_harness import assert_same_state, moved_bytes

from gemini import HybridAdam, StateError
from gemini.chunk.memory import ComputeDevice

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled_network(**options: Any) -> nn.Module:
    """Return the network with each layer compiled."""
    model = network()
    for layer in model.layers:
        layer.compile(**options)
    return model


def assert_compiled_trains_alike(gpu: ComputeDevice, tmp_path: Path, **options: Any) -> None:
    """Train a compiled network that nobody manages, and one in a third of its memory."""
    plain = compiled_network(**options).to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    torch._dynamo.reset()
    budgets = {
        "device_bytes": 14 * gpu.block_bytes,
        "host_bytes": 12 * gpu.block_bytes,
        "disk_dir": str(tmp_path),
        "non_model_bytes": 0,
    }
    with GpuModel(compiled_network(**options), device=gpu, **budgets, **SMALL_CHUNKS) as model:
        assert train(model, optimizer_of(model), gpu.torch_device) == want
        state = {key: value.cpu().clone() for key, value in model.state_dict().items()}
        gpu.synchronize()
        assert moved_bytes(model.stats()) > 0
    assert_same_state(state, {key: value.cpu() for key, value in plain.state_dict().items()})


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_train_to_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = make_gpu(kind)
    with gpu.running(monkeypatch) if isinstance(gpu, LateDevice) else nullcontext():
        assert_compiled_trains_alike(gpu, tmp_path, backend="aot_eager")


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the second: CUDA graphs
def test_machine_code_and_cuda_graphs(mode: str, tmp_path: Path) -> None:
    assert_compiled_trains_alike(make_gpu("cuda"), tmp_path, mode=mode)


@pytest.mark.cuda
@pytest.mark.parametrize("device_blocks", [14, 200])
def test_cuda_graphs_of_evaluations_and_micro_batches(device_blocks: int, tmp_path: Path) -> None:
    gpu = make_gpu("cuda")
    results = []
    for managed in (False, True):
        torch._dynamo.reset()
        model = compiled_network(mode="reduce-overhead")
        if managed:
            budgets = {"device_bytes": device_blocks * gpu.block_bytes, "disk_dir": str(tmp_path)}
            model = GpuModel(model, device=gpu, non_model_bytes=0, **budgets, **SMALL_CHUNKS)
        else:
            model = model.to(gpu.torch_device)
            for (
                param
            ) in model.parameters():  # else a gradient lies in the graph's memory, until the next pass
                param.register_hook(Tensor.clone)
        optimizer = optimizer_of(model) if managed else HybridAdam(model.parameters(), lr=1e-2)
        results.append(_losses_with_evaluations(model, optimizer, gpu))
    assert results[0] == results[1]


def _losses_with_evaluations(model: nn.Module, optimizer: Any, gpu: ComputeDevice) -> list[float]:
    """Train on two micro-batches a step, with an evaluation between and one after; return all losses."""
    losses = []
    for step in range(5):
        for micro in range(2):
            loss = network_loss(model, 2 * step + micro, gpu.torch_device)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                losses.append(network_loss(model, 100, gpu.torch_device).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_compiler_with_cuda_graphs_is_told_where_passes_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", ModuleType("loaded"))
    told: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append(1))
    gpu = simulated()
    with (
        GpuModel(compiled_network(backend="eager"), device=gpu, **SMALL_CHUNKS) as model,
        GpuModel(compiled_network(backend="eager"), device=gpu, **SMALL_CHUNKS) as teacher,
    ):
        optimizer = optimizer_of(model)

        def new_passes(run: Callable[[], Any]) -> int:
            before = len(told)
            run()
            return len(told) - before

        def forward(index: int) -> Tensor:
            return network_loss(model, index, gpu.torch_device)

        losses: list[Tensor] = []
        for _ in range(3):
            assert new_passes(lambda: losses.append(forward(0))) == 1
            with torch.no_grad():
                assert new_passes(lambda: forward(1)) == 0  # backward still needs the pass before
                assert new_passes(lambda: network_loss(teacher, 1, gpu.torch_device)) == 0
            assert new_passes(lambda: losses.append(forward(2))) == 0
            (losses.pop() + losses.pop()).backward()
            with torch.no_grad():
                assert new_passes(lambda: [forward(index) for index in range(3)]) == 3
                assert new_passes(lambda: network_loss(teacher, 1, gpu.torch_device)) == 1
            assert new_passes(lambda: forward(3).backward()) == 1  # a micro-batch more
            optimizer.step()


def test_gradients_of_compiled_blocks_on_a_gpu_are_copied() -> None:
    gpu = simulated()
    with GpuModel(compiled_network(backend="eager"), device=gpu, **SMALL_CHUNKS) as model:
        optimizer = optimizer_of(model)
        train(model, optimizer, gpu.torch_device, range(3))
        assert model.manager.resident
        handed_over = []
        bias = model.module.norm.bias
        bias.register_hook(lambda grad: handed_over.append(grad.data_ptr()))
        network_loss(model, 3, gpu.torch_device).backward()
        assert bias.grad.data_ptr() not in handed_over


@pytest.mark.cuda
def test_a_pass_that_would_be_captured_is_refused() -> None:
    gpu = make_gpu("cuda")
    with GpuModel(network(), device=gpu, **SMALL_CHUNKS) as model:
        optimizer = optimizer_of(model)
        train(model, optimizer, gpu.torch_device, range(2))
        tokens = torch.zeros(4, 16, dtype=torch.int64, device=gpu.torch_device)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(StateError, match="captured into a CUDA graph"), torch.cuda.graph(graph):
            model(tokens)
        train(model, optimizer, gpu.torch_device, range(2))
