"""The laws where DEVICE is a GPU: a real one where there is one, else simulated ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import (
    KINDS,
    SMALL_CHUNKS,
    GpuModel,
    LateDevice,
    Taken,
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
from training_harness import assert_same_state, assert_within_budgets, moved_bytes

from gemini import ConfigError, GeminiDDP, HybridAdam, OutOfBudgetError
from gemini.checkpoint import load, save, save_async
from gemini.chunk.memory import ComputeDevice
from gemini.system.device import asked_bytes

# DEVICE and HOST in blocks, of the 43 or more that the network's model data takes; None: all there is.
BUDGETS: dict[str, tuple[int | None, int, bool]] = {
    "everything": (None, 0, False),
    "host": (14, 64, False),
    "host and disk": (14, 12, True),
    "disk": (14, 0, True),
}


@pytest.fixture(params=KINDS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComputeDevice]:
    """Yield a GPU of each kind, with its operators running late where that is its kind."""
    gpu = make_gpu(request.param)
    with gpu.running(monkeypatch) if isinstance(gpu, LateDevice) else nullcontext():
        yield gpu


def options(gpu: ComputeDevice, budget: str, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Return keywords of GpuModel for one of :data:`BUDGETS`."""
    device, host, disk = BUDGETS[budget]
    return {
        "device": gpu,
        "device_bytes": device * gpu.block_bytes if device is not None else None,
        "host_bytes": host * gpu.block_bytes,
        "disk_dir": str(tmp_path) if disk else None,
        "non_model_bytes": 0,
        **SMALL_CHUNKS,
        **more,
    }


def state_of(model: nn.Module, gpu: ComputeDevice) -> dict[str, Tensor]:
    """Return the weights with their values there, in host memory."""
    state = {key: value.cpu().clone() for key, value in model.state_dict().items()}
    gpu.synchronize()
    return state


@pairs("gpu", gpu=KINDS, overlap=[True, "backward"], budget=BUDGETS)
def test_placement_never_changes_the_numbers(
    gpu: ComputeDevice, budget: str, overlap: Any, tmp_path: Path
) -> None:
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    with GpuModel(network(), **options(gpu, budget, tmp_path)) as model:
        assert train(model, optimizer_of(model, overlap=overlap), gpu.torch_device) == want
        assert_same_state(state_of(model, gpu), state_of(plain, gpu))
        assert_within_budgets(model.stats())
        assert (moved_bytes(model.stats()) > 0) == (budget != "everything")


@pairs("gpu", gpu=KINDS, precision=["bf16", "fp16"], budget=["host", "disk"])
def test_placement_never_changes_the_numbers_of_16_bits(
    gpu: ComputeDevice, budget: str, precision: str, tmp_path: Path
) -> None:
    outcomes = []
    for each in ("everything", budget):
        chosen = options(gpu, each, tmp_path, mixed_precision=precision, force_outputs_fp32=True)
        with GpuModel(network(), **chosen) as model:
            losses = train(model, optimizer_of(model, max_norm=0.1, initial_scale=2**10), gpu.torch_device)
            outcomes.append((losses, state_of(model, gpu)))
    assert outcomes[0][0] == outcomes[1][0]
    assert_same_state(outcomes[0][1], outcomes[1][1])


def test_accumulation_and_evaluation_see_every_update(gpu: ComputeDevice, tmp_path: Path) -> None:
    outcomes = []
    for budget in ("everything", "host and disk"):
        with GpuModel(network(), **options(gpu, budget, tmp_path)) as model:
            optimizer, seen = optimizer_of(model), []
            for step in range(4):
                for micro in range(2):
                    optimizer.backward(network_loss(model, 2 * step + micro, gpu.torch_device))
                optimizer.step()
                with torch.no_grad():
                    seen.append(network_loss(model, 99, gpu.torch_device).item())
            outcomes.append(seen)
    assert outcomes[0] == outcomes[1]


def test_an_operator_that_raises_leaves_nothing_behind(gpu: ComputeDevice, tmp_path: Path) -> None:
    plain = network().to(gpu.torch_device)
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    with GpuModel(network(), **options(gpu, "host and disk", tmp_path)) as model:
        optimizer = optimizer_of(model)
        got = train(model, optimizer, gpu.torch_device, range(3))
        raise_in_an_operator(model, gpu.torch_device)
        model.zero_grad()
        got += train(model, optimizer, gpu.torch_device, range(3, 6))
        assert got == want


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "late operators"])
def test_a_checkpoint_of_a_gpu_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    gpu = make_gpu(kind)
    chosen = options(gpu, "host and disk", tmp_path)
    with GpuModel(network(), **chosen) as model:
        optimizer = optimizer_of(model)
        train(model, optimizer, gpu.torch_device, range(3))
        save(tmp_path / "saved", model, optimizer)
        want = train(model, optimizer, gpu.torch_device, range(3, 6))
    with GpuModel(network(), **chosen) as model:
        optimizer = optimizer_of(model)
        load(tmp_path / "saved", model, optimizer)
        assert train(model, optimizer, gpu.torch_device, range(3, 6)) == want


@pytest.mark.parametrize(
    ("budget", "ratio"), [("everything", None), ("host", None), ("host and disk", None), ("host", 0.0)]
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "late operators"])
def test_an_asynchronous_save_of_a_gpu_is_the_moment_of_the_call(
    kind: str, budget: str, ratio: float | None, tmp_path: Path
) -> None:
    gpu = make_gpu(kind)
    chosen = options(gpu, budget, tmp_path)
    with GpuModel(network(), **chosen) as model:
        optimizer = optimizer_of(model, gpu_margin_mem_ratio=ratio)
        train(model, optimizer, gpu.torch_device, range(3))
        handle = save_async(tmp_path / "saved", model, optimizer, staging_bytes="4MiB")
        want = train(model, optimizer, gpu.torch_device, range(3, 6))
        handle.wait()
    with GpuModel(network(), **chosen) as model:
        optimizer = optimizer_of(model)
        load(tmp_path / "saved", model, optimizer)
        assert train(model, optimizer, gpu.torch_device, range(3, 6)) == want


def test_a_state_dict_is_in_host_memory_and_loads_into_a_plain_model(
    gpu: ComputeDevice, tmp_path: Path
) -> None:
    with GpuModel(network(), **options(gpu, "host", tmp_path)) as model:
        train(model, optimizer_of(model), gpu.torch_device)
        state = model.state_dict()
        gpu.synchronize()
        assert {value.device.type for value in state.values()} == {"cpu"}
        plain = network()
        plain.load_state_dict(state)
        gpu.synchronize()
        assert network_loss(plain, 7, torch.device("cpu")).item() == pytest.approx(
            network_loss(model, 7, gpu.torch_device).item(), rel=1e-4
        )


def test_a_model_on_meta_is_built_in_the_gpus_chunks(tmp_path: Path) -> None:
    gpu = simulated()
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 8))
    with GpuModel(module, **options(gpu, "host", tmp_path)) as model:
        assert model(torch.ones(2, 128)).isfinite().all()


def test_memory_of_the_gpu_is_within_the_budget_and_given_back(tmp_path: Path) -> None:
    gpu = simulated(max_delay_us=100)
    free_bytes = gpu.free_bytes()
    chosen = options(gpu, "host", tmp_path)
    with GpuModel(network(), **chosen) as model:
        optimizer = optimizer_of(model)
        for step in range(5):
            train(model, optimizer, gpu.torch_device, range(step, step + 1))
            assert free_bytes - gpu.free_bytes() <= chosen["device_bytes"]
    # One block answers all uses of the closed model's tensors.
    assert free_bytes - gpu.free_bytes() <= gpu.block_bytes
    del model, optimizer
    gc.collect()
    assert gpu.free_bytes() == free_bytes


def test_two_models_share_a_gpu(tmp_path: Path) -> None:
    gpu = simulated(max_delay_us=200)
    plain = network()
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu.torch_device)
    chosen = options(gpu, "host", tmp_path)
    with GpuModel(network(), **chosen) as one, GpuModel(network(), **chosen) as other:
        optimizers = [optimizer_of(one), optimizer_of(other)]
        losses: list[list[float]] = [[], []]
        for step in range(6):
            for index, model in enumerate((one, other)):
                once = range(step, step + 1)
                losses[index] += train(model, optimizers[index], gpu.torch_device, once)
    assert losses == [want, want]


def test_a_full_gpu_is_refused_with_the_way_out(tmp_path: Path) -> None:
    gpu = simulated()
    with pytest.raises(OutOfBudgetError, match=r"lower device_bytes|no .* left"):
        GpuModel(nn.Linear(4096, 4096), device=gpu, device_bytes="4GiB", host_bytes=0, non_model_bytes=0)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("left", range(0, 40, 3))
def test_a_gpu_that_others_fill_can_be_trained_on_once_they_have_gone(step: int, left: int) -> None:
    plain = network()
    want = train(plain, HybridAdam(plain.parameters(), lr=1e-2), torch.device("cpu"))
    gpu = simulated()
    with GpuModel(network(), gpu, device_bytes="3MiB", non_model_bytes=0, **SMALL_CHUNKS) as model:
        optimizer, others = optimizer_of(model), Taken(gpu)
        got = train(model, optimizer, gpu.torch_device, range(step))
        others.all_but(left)
        for _ in range(2):
            with suppress(OutOfBudgetError):
                network_loss(model, 9, gpu.torch_device).backward()
            model.zero_grad()
            model.manager.chunks.table.check_invariants()
        others.give_back()
        assert got + train(model, optimizer, gpu.torch_device, range(step, 6)) == want


def test_closing_a_model_on_a_gpu_that_others_fill_gives_its_memory_back() -> None:
    gpu = simulated()
    with GpuModel(network(), gpu, device_bytes="3MiB", non_model_bytes=0, **SMALL_CHUNKS) as model:
        others = Taken(gpu)
        others.all_but(2)
        with pytest.raises(OutOfBudgetError, match=r"the simulated GPU has no [0-9.]+[KM]iB left") as full:
            network_loss(model, 0, gpu.torch_device).backward()
        assert asked_bytes(full.value) >= gpu.block_bytes
    assert model.manager.chunks.arena_bytes() == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot compute here"):
        GeminiDDP(network(), device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"no CUDA GPU.*device='cpu'"):
            GeminiDDP(network(), device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda:99", "cuda:256", 99])
def test_a_gpu_beyond_the_last_is_refused(device: str | int) -> None:
    with pytest.raises(
        ConfigError, match=rf"'{device}' was asked for but the last GPU here is 'cuda:[0-9]+'"
    ):
        GeminiDDP(network(), device=device)
