"""Compiled blocks where DEVICE is a GPU: a real one where there is one, else simulated ones."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import KINDS, SMALL_CHUNKS, GpuModel, LateDevice, make_gpu, network, optimizer_of, train
from torch import nn
from training_harness import assert_same_state, moved_bytes

from gemini import HybridAdam
from gemini.chunk import ComputeDevice

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
