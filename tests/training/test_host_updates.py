"""Updates by the CPU, where states lie on HOST: the bits of training do not depend on who updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
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
    raise_in_an_operator,
    simulated,
    train,
)
from pairs import pairs
from torch import Tensor, nn
from training_harness import assert_same_state, assert_within_budgets

from gemini import ConfigError, GeminiDDP, GeminiOptimizer, HybridAdam
from gemini.checkpoint import load, save
from gemini.chunk.memory import ComputeDevice
from gemini.optim import chunk_update, managed_groups
from gemini.optim.host_update import elements_per_second

NUM_PIECES = 11  # of the network's states, that hold parameters

# DEVICE and HOST in blocks, of the 48 or more that the network's model data takes. Where HOST is nearly full,
# some updates find no room there.
BUDGETS = {"roomy": (60, 90), "tight": (14, 64), "full": (14, 42)}


@pytest.fixture(params=KINDS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComputeDevice]:
    """Yield a GPU of each kind, with its operators running late where that is its kind."""
    gpu = make_gpu(request.param)
    with gpu.running(monkeypatch) if isinstance(gpu, LateDevice) else nullcontext():
        yield gpu


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, gpu: ComputeDevice) -> list[int]:
    """Return a list that gets the first element of each piece that the CPU updates."""
    updated: list[int] = []
    prepare = chunk_update.prepare_on_host

    def noted(*managed_groups: Any) -> Callable[[], None]:
        updated.append(managed_groups[2].start)
        return prepare(*managed_groups)

    monkeypatch.setattr(chunk_update, "prepare_on_host", noted)
    return updated


def options(gpu: ComputeDevice, budget: str = "tight", **more: Any) -> dict[str, Any]:
    """Return keywords of GpuModel for one of :data:`BUDGETS`."""
    device, host = BUDGETS[budget]
    return {
        "device": gpu,
        "device_bytes": device * gpu.block_bytes,
        "host_bytes": host * gpu.block_bytes,
        "non_model_bytes": 0,
        **SMALL_CHUNKS,
        **more,
    }


def state_of(model: nn.Module, gpu: ComputeDevice) -> dict[str, Tensor]:
    """Return the weights with their values there, in host memory."""
    state = {key: value.cpu().clone() for key, value in model.state_dict().items()}
    gpu.synchronize()
    return state


@pairs("gpu", gpu=KINDS, overlap=[True, False, "backward"], budget=BUDGETS)
def test_who_updates_never_changes_the_numbers(
    gpu: ComputeDevice, on_host: list[int], budget: str, overlap: Any
) -> None:
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    with GpuModel(network(), **options(gpu, budget)) as model:
        optimizer = optimizer_of(model, overlap=overlap, gpu_margin_mem_ratio=0.0)
        assert train(model, optimizer, gpu.torch_device) == want
        assert_same_state(state_of(model, gpu), state_of(plain, gpu))
        assert_within_budgets(model.stats())
    assert on_host


@pairs("gpu", gpu=KINDS, precision=["bf16", "fp16"], budget=["tight", "roomy"], overlap=[True, False])
def test_who_updates_never_changes_the_numbers_of_16_bits(
    gpu: ComputeDevice, on_host: list[int], precision: str, budget: str, overlap: bool
) -> None:
    outcomes = []
    for ratio in (None, 0.0):
        chosen = options(gpu, budget, mixed_precision=precision, force_outputs_fp32=True)
        with GpuModel(network(), **chosen) as model:
            # The first steps overflow under fp16, and are skipped.
            optimizer = optimizer_of(
                model,
                max_norm=0.1,
                initial_scale=2**24,
                hysteresis=1,
                overlap=overlap,
                gpu_margin_mem_ratio=ratio,
            )
            losses = train(model, optimizer, gpu.torch_device, range(10))
            outcomes.append((losses, state_of(model, gpu)))
            assert optimizer.loss_scale is None or optimizer.loss_scale.scale < 2**24
        assert bool(on_host) == (ratio == 0.0)
    assert outcomes[0][0] == outcomes[1][0]
    assert_same_state(outcomes[0][1], outcomes[1][1])


def test_accumulation_evaluation_and_writes_see_every_update(gpu: ComputeDevice, on_host: list[int]) -> None:
    outcomes = []
    for ratio in (None, 0.0):
        chosen = options(gpu, mixed_precision="bf16", force_outputs_fp32=True)
        with GpuModel(network(), **chosen) as model:
            optimizer, seen = optimizer_of(model, gpu_margin_mem_ratio=ratio), []
            for step in range(5):
                for micro in range(2):
                    optimizer.backward(network_loss(model, 2 * step + micro, gpu.torch_device))
                optimizer.step()
                with torch.no_grad():
                    seen.append(network_loss(model, 99, gpu.torch_device).item())
                    if step >= 2:  # the master follows what user code writes
                        model.module.layers[step - 2].weight.mul_(0.5)
            outcomes.append((seen, state_of(model, gpu)))
    assert on_host
    assert outcomes[0][0] == outcomes[1][0]
    assert_same_state(outcomes[0][1], outcomes[1][1])


def test_states_that_the_cpu_updates_do_not_cross_the_link(gpu: ComputeDevice, on_host: list[int]) -> None:
    moved = []
    for ratio in (None, 0.0):
        with GpuModel(network(), **options(gpu)) as model:
            optimizer = optimizer_of(model, gpu_margin_mem_ratio=ratio)
            train(model, optimizer, gpu.torch_device)
            before = model.stats()
            num_before = len(on_host)
            train(model, optimizer, gpu.torch_device, range(6, 9))
            after = model.stats()
            moved.append(sum(after[link]["bytes"] - before[link]["bytes"] for link in ("h2d", "d2h")))
            assert not model.manager.chunks.table.diverged()
            assert len(on_host) - num_before == (3 * NUM_PIECES if ratio == 0.0 else 0)
    params = sum(group.param.spec.nbytes for group in model.storage.groups)
    # Gradients down, parameters up, and up once more for backward.
    assert moved[1] <= 3 * 3 * params < moved[0]


@pairs("gpu", gpu=KINDS, ratio=[0.0, "auto"], overlap=[True, "backward"])
def test_a_disk_beside_a_host_that_holds_everything_changes_nothing(
    gpu: ComputeDevice,
    on_host: list[int],
    ratio: Any,
    overlap: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(managed_groups, "elements_per_second", lambda *_: 1e12)
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    with GpuModel(network(), **options(gpu, disk_dir=str(tmp_path))) as model:
        optimizer = optimizer_of(model, gpu_margin_mem_ratio=ratio, overlap=overlap)
        assert train(model, optimizer, gpu.torch_device) == want
        assert_same_state(state_of(model, gpu), state_of(plain, gpu))
        assert_within_budgets(model.stats())
        assert model.stats()["disk_write"]["bytes"] == 0
    assert on_host


def test_a_share_of_the_margin_is_updated_on_the_gpu(gpu: ComputeDevice, on_host: list[int]) -> None:
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    per_step = []
    for ratio in (0.0, 0.25, 1.0):
        with GpuModel(network(), **options(gpu, "roomy")) as model:
            optimizer = optimizer_of(model, gpu_margin_mem_ratio=ratio, overlap=False)
            assert train(model, optimizer, gpu.torch_device) == want
            on_host.clear()
            train(model, optimizer, gpu.torch_device, range(6, 7))
            assert not model.manager.chunks.table.diverged()
            per_step.append(len(on_host))
    assert per_step[0] > per_step[1] > per_step[2] == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "late operators"])
def test_a_kernel_that_raises_leaves_nothing_pinned(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = make_gpu(kind)
    with GpuModel(network(), **options(gpu)) as model:
        optimizer = optimizer_of(model, gpu_margin_mem_ratio=0.0, overlap=False)
        train(model, optimizer, gpu.torch_device, range(3))
        save(tmp_path / "saved", model, optimizer)
        want = train(model, optimizer, gpu.torch_device, range(3, 6))
        prepare = chunk_update.prepare_on_host

        def fail(*_arguments: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(chunk_update, "prepare_on_host", fail)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, gpu.torch_device, range(6, 7))
        monkeypatch.setattr(chunk_update, "prepare_on_host", prepare)
        load(tmp_path / "saved", model, optimizer)
        assert train(model, optimizer, gpu.torch_device, range(3, 6)) == want


def test_an_operator_that_raises_loses_no_update(gpu: ComputeDevice) -> None:
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    with GpuModel(network(), **options(gpu)) as model:
        optimizer = optimizer_of(model, gpu_margin_mem_ratio=0.0)
        got = train(model, optimizer, gpu.torch_device, range(3))
        raise_in_an_operator(model, gpu.torch_device)
        model.zero_grad()
        got += train(model, optimizer, gpu.torch_device, range(3, 6))
        assert got == want


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "late operators"])
def test_a_checkpoint_goes_on_with_the_same_bits_whoever_updates(kind: str, tmp_path: Path) -> None:
    gpu = make_gpu(kind)
    with GpuModel(network(), **options(gpu)) as model:
        optimizer = optimizer_of(model, gpu_margin_mem_ratio=0.0)
        train(model, optimizer, gpu.torch_device, range(3))
        save(tmp_path / "saved", model, optimizer)
        want = train(model, optimizer, gpu.torch_device, range(3, 6))
    for ratio in (0.0, None):
        with GpuModel(network(), **options(gpu)) as model:
            optimizer = optimizer_of(model, gpu_margin_mem_ratio=ratio)
            load(tmp_path / "saved", model, optimizer)
            assert train(model, optimizer, gpu.torch_device, range(3, 6)) == want


def test_an_optimizer_may_be_followed_by_one_that_updates_elsewhere(
    gpu: ComputeDevice, on_host: list[int]
) -> None:
    outcomes = []
    for ratios in ((None, None), (None, 0.0), (0.0, None)):
        with GpuModel(network(), **options(gpu, "roomy")) as model:
            losses: list[float] = []
            for first, ratio in zip((0, 4), ratios, strict=True):
                optimizer = optimizer_of(model, gpu_margin_mem_ratio=ratio, overlap=False)
                on_host.clear()
                losses += train(model, optimizer, gpu.torch_device, range(first, first + 4))
                assert len(on_host) == (4 * NUM_PIECES if ratio == 0.0 else 0)
            outcomes.append((losses, state_of(model, gpu)))
    assert outcomes[0][0] == outcomes[1][0] == outcomes[2][0]
    assert_same_state(outcomes[0][1], outcomes[1][1])
    assert_same_state(outcomes[0][1], outcomes[2][1])


@pytest.mark.parametrize(("elements_per_second", "any_on_host"), [(1e12, True), (1e-3, False)])
def test_auto_has_the_cpu_update_where_that_is_faster(
    gpu: ComputeDevice,
    on_host: list[int],
    elements_per_second: float,
    any_on_host: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(managed_groups, "elements_per_second", lambda *_: elements_per_second)
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    with GpuModel(network(), **options(gpu)) as model:
        optimizer = optimizer_of(model, gpu_margin_mem_ratio="auto")
        assert train(model, optimizer, gpu.torch_device) == want
        assert_same_state(state_of(model, gpu), state_of(plain, gpu))
        assert_within_budgets(model.stats())
    assert bool(on_host) == any_on_host


def test_auto_is_the_default_and_leaves_alone_what_a_number_could_not_have(tmp_path: Path) -> None:
    gpu = simulated()
    for changed in ({"disk_dir": str(tmp_path), "host_bytes": 40 * gpu.block_bytes}, {"host_bytes": 0}):
        with GpuModel(network(), **options(gpu, "roomy", **changed)) as model:
            optimizer = GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), model)
            train(model, optimizer, gpu.torch_device)
            assert not model.manager.order.host_chunks
    assert elements_per_second(numel=1) > 1e5


def test_what_the_cpu_cannot_update_is_refused_with_the_way_out(tmp_path: Path) -> None:
    gpu = simulated()
    refused = [
        ({"disk_dir": str(tmp_path), "host_bytes": 40 * gpu.block_bytes}, "all model data, beside disk_dir"),
        ({"host_bytes": 0}, "raise host_bytes to"),
    ]
    for changed, way_out in refused:
        chosen = options(gpu, "roomy", **changed)
        with GpuModel(network(), **chosen) as model, pytest.raises(ConfigError, match=way_out):
            optimizer_of(model, gpu_margin_mem_ratio=0.5)
    with GpuModel(network(), **options(gpu)) as model:
        with pytest.raises(ConfigError, match="from 0 to 1"):
            optimizer_of(model, gpu_margin_mem_ratio=1.5)
        params = list(model.parameters())
        one = GeminiOptimizer(HybridAdam(params[:2]), model, gpu_margin_mem_ratio=0.0)
        with pytest.raises(ConfigError, match="give each the same"):
            GeminiOptimizer(HybridAdam(params[2:]), model)
        assert one.gpu_margin_mem_ratio == 0.0
    with GeminiDDP(nn.Linear(4, 4)) as model:
        assert optimizer_of(model, gpu_margin_mem_ratio=0.0).gpu_margin_mem_ratio == 0.0
        with pytest.raises(ConfigError, match="there is no GPU"):
            optimizer_of(model, gpu_margin_mem_ratio=0.5)
