"""``nvme_offload_fraction`` of a managed model's Adam: that share of its states is in a file between updates,
whatever the policy and the budgets, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from torch import Tensor, nn
from training_harness import KIB, random_batch, seeded, tight

from gemini import CPUAdam, GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer, HybridAdam, IoError, checkpoint
from gemini.chunk import Chunk, gpu_memory
from gemini.optim.managed_groups import choose_share

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, DEPTH = 64, 6
STEPS = 5
ROOMY: dict[str, Any] = {
    "device_bytes": "64MiB",
    "non_model_bytes": 0,
    "min_chunk_size_mb": 16 * KIB / 2**20,
    "search_range_mb": 16 * KIB / 2**20,
}


def build() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])


def step(model: nn.Module, optimizer: GeminiOptimizer, index: int) -> float:
    loss = model(random_batch(index, 4, WIDTH)).float().square().mean()
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def state_bytes(model: GeminiDDP) -> int:
    """All optimizer states, padding included."""
    groups = model.storage.trainable_groups()
    return sum(
        chunk.spec.nbytes for group in groups for piece in group.pieces for chunk in piece.chunks.values()
    )


def on_disk(model: GeminiDDP) -> int:
    return int(model.stats()["disk"]["bytes"])


def test_timeline_and_plan_count_what_is_stowed(tmp_path: Path) -> None:
    options = {**ROOMY, "device_bytes": 200 * KIB, "host_bytes": "1MiB"}
    with GeminiDDP(seeded(build), **options) as model:
        assert "Stowed" not in str(model.plan())
        optimizer = GeminiAdamOptimizer(model, nvme_offload_fraction=0.5, nvme_offload_dir=str(tmp_path))
        for index in range(3):
            step(model, optimizer, index)
        assert max(moment["disk_bytes"] for moment in model.timeline()) == on_disk(model) > 0
        assert model.plan().stowed_bytes == on_disk(model)
        assert "Stowed: " in str(model.plan())
        with model.record_timeline() as recorder:
            step(model, optimizer, 3)
        assert recorder.timeline().budget("disk") >= on_disk(model)
        assert max(fill.disk_bytes for fill in recorder.timeline().fills) == on_disk(model)


def trained(fraction: float, *, overlap: Any = True, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train, look in between at all that can be looked at, and return losses, weights and moments."""
    with GeminiDDP(seeded(build), **options) as model:
        adam = HybridAdam(model.parameters(), lr=1e-2, nvme_offload_fraction=fraction)
        optimizer = GeminiOptimizer(adam, model, overlap=overlap)
        losses = []
        for index in range(STEPS):
            losses.append(step(model, optimizer, index))
            with torch.no_grad():
                losses.append(model(random_batch(99, 4, WIDTH)).float().sum().item())
            stats = model.stats()
            for tier in ("device", "host", "disk"):
                assert stats[tier]["peak_bytes"] <= stats[tier]["budget_bytes"]
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for index, moments in optimizer.state_dict()["state"].items():
            state |= {f"{index}.{name}": torch.as_tensor(value).clone() for name, value in moments.items()}
        return losses, state


@pairs(
    fraction=[0.0, 0.25, 0.5, 1.0], policy=["auto", "cpu", "cuda", "const"], precision=[None, "bf16", "fp16"]
)
def test_the_share_is_on_disk_between_steps(
    fraction: float, policy: str, precision: str | None, tmp_path: Path
) -> None:
    with GeminiDDP(seeded(build), placement_policy=policy, mixed_precision=precision, **ROOMY) as model:
        optimizer = GeminiAdamOptimizer(
            model, nvme_offload_fraction=fraction, nvme_offload_dir=str(tmp_path), initial_scale=8.0
        )
        for index in range(4):
            step(model, optimizer, index)
            wanted = fraction * state_bytes(model)
            assert wanted <= on_disk(model) <= wanted + bool(fraction) * 32 * KIB
            stats = model.stats()
            for tier in ("device", "host"):
                assert stats[tier]["bytes"] <= stats["model_data_bytes"] - on_disk(model)
        assert list(tmp_path.iterdir()) == []
    assert on_disk(model) == 0


@pairs(fraction=[0.3, 1.0], overlap=[True, False, "backward"], precision=[None, "bf16"])
def test_no_share_and_no_budget_changes_a_bit(
    fraction: float, overlap: Any, precision: str | None, tmp_path: Path
) -> None:
    small = tight(tmp_path, 160 * KIB, mixed_precision=precision)
    hosted = {**small, "disk_dir": None, "host_bytes": "1MiB"}
    want = trained(0.0, **{**ROOMY, "mixed_precision": precision})
    for options in ({**ROOMY, "mixed_precision": precision}, small, hosted):
        losses, state = trained(fraction, overlap=overlap, **options)
        assert losses == want[0]
        assert state.keys() == want[1].keys()
        assert all(torch.equal(state[name], want[1][name]) for name in state)


@pytest.mark.parametrize("host_bytes", [0, "4MiB"])
@pytest.mark.parametrize("ratio", [None, 0.0])
def test_beside_a_gpu(
    host_bytes: Any, ratio: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not host_bytes and ratio is not None:
        pytest.skip("the CPU updates on HOST, which is not there")
    want = trained(0.0, **ROOMY)
    device = gpu_memory.SimulatedDevice(64 * 2**20, max_delay_us=200)
    monkeypatch.setattr(GeminiDDP, "_open_device", lambda *_args: device)
    options = {**ROOMY, "host_bytes": host_bytes, "disk_dir": str(tmp_path)}
    with GeminiDDP(seeded(build), **options) as model:
        adam = HybridAdam(model.parameters(), lr=1e-2, nvme_offload_fraction=0.6)
        optimizer = GeminiOptimizer(adam, model, gpu_margin_mem_ratio=ratio)
        losses = []
        for index in range(STEPS):
            losses.append(step(model, optimizer, index))
        assert losses == want[0][::2]
        state = model.state_dict()
        assert all(torch.equal(value, want[1][name]) for name, value in state.items())


@pytest.mark.parametrize(("first", "then"), [(0.0, 1.0), (1.0, 0.0), (0.5, 0.25)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_goes_on_with_another_share(
    first: float, then: float, *, asynchronous: bool, tmp_path: Path
) -> None:
    def made(fraction: float) -> tuple[GeminiDDP, GeminiOptimizer]:
        model = GeminiDDP(seeded(build), **ROOMY)
        return model, GeminiAdamOptimizer(model, lr=1e-2, nvme_offload_fraction=fraction)

    model, optimizer = made(first)
    with model:
        for index in range(3):
            step(model, optimizer, index)
        if asynchronous:
            handle = checkpoint.save_async(tmp_path, model, optimizer)
            want = [step(model, optimizer, index) for index in range(3, 6)]
            handle.wait()
        else:
            checkpoint.save(tmp_path, model, optimizer)
            want = [step(model, optimizer, index) for index in range(3, 6)]
    model, optimizer = made(then)
    with model:
        checkpoint.load(tmp_path, model, optimizer)
        assert on_disk(model) >= then * state_bytes(model)
        assert [step(model, optimizer, index) for index in range(3, 6)] == want


def test_each_optimizer_has_its_own_share() -> None:
    with GeminiDDP(seeded(build), **ROOMY) as model:
        half = 2 * (DEPTH // 2)
        params = list(model.parameters())
        kept = GeminiOptimizer(CPUAdam(params[:half], lr=1e-2), model)
        stowed = GeminiOptimizer(HybridAdam(params[half:], lr=1e-2, nvme_offload_fraction=1.0), model)
        for index in range(3):
            model(random_batch(index, 4, WIDTH)).square().mean().backward()
            kept.step()
            stowed.step()
        own = 2 * 4 * sum(param.numel() for param in params[half:])
        assert own <= on_disk(model) < own + 8 * 16 * KIB


def test_groups_that_come_later_are_part_of_it() -> None:
    with GeminiDDP(seeded(build), **ROOMY) as model:
        params = list(model.parameters())
        optimizer = GeminiOptimizer(HybridAdam(params[:2], nvme_offload_fraction=1.0), model)
        step(model, optimizer, 0)
        before = on_disk(model)
        optimizer.add_param_group({"params": params[2:], "lr": 1e-4})
        step(model, optimizer, 1)
        assert before < on_disk(model) == state_bytes(model)


@pytest.mark.parametrize("room", [ROOMY, {**ROOMY, "device_bytes": "400KiB", "host_bytes": "1MiB"}])
def test_another_optimizer_brings_the_states_back(room: dict[str, Any]) -> None:
    with GeminiDDP(seeded(build), **room) as model:
        first = GeminiAdamOptimizer(model, lr=1e-2, nvme_offload_fraction=1.0)
        for index in range(3):
            step(model, first, index)
        saved = first.state_dict()
        second = GeminiAdamOptimizer(model, lr=1e-2)
        del first
        second = GeminiAdamOptimizer(model, lr=1e-2)
        assert on_disk(model) == 0
        second.load_state_dict(saved)
        losses = [step(model, second, index) for index in range(3, STEPS)]
    assert losses == trained(0.0, **ROOMY)[0][6::2]


def test_what_the_disk_refuses_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemini.offload import buffered_file

    want = trained(0.0, **ROOMY)
    with GeminiDDP(seeded(build), **ROOMY) as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-2, nvme_offload_fraction=1.0)
        losses = [step(model, optimizer, index) for index in range(2)]
        before = {k: v["exp_avg"].clone() for k, v in optimizer.state_dict()["state"].items()}

        def refuse(*_args: object) -> None:
            raise IoError(5, "injected", "disk", 0)

        with monkeypatch.context() as patched:
            patched.setattr(buffered_file.BufferedFile, "_await", refuse)
            with pytest.raises(IoError, match="injected"):
                optimizer.state_dict()
        after = {k: v["exp_avg"].clone() for k, v in optimizer.state_dict()["state"].items()}
        assert all(torch.equal(before[k], after[k]) for k in before)
        losses += [step(model, optimizer, index) for index in range(2, STEPS)]
    assert losses == want[0][::2]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_is_reached_and_spread(fraction: float) -> None:
    class Sized:
        def __init__(self, nbytes: int) -> None:
            self.spec = type("Spec", (), {"nbytes": nbytes})

    states: list[tuple[Any, int]] = [(Sized(100 + 7 * (index % 3)), index) for index in range(40)]
    chosen: list[tuple[Chunk, int]] = choose_share(states, fraction)
    size: Callable[[list[tuple[Any, int]]], int] = lambda some: sum(each.spec.nbytes for each, _ in some)  # noqa: E731
    assert fraction * size(states) <= size(chosen) < fraction * size(states) + 115
    half = [each for each in chosen if each[1] < 20]
    assert abs(size(half) - fraction * size(states[:20])) <= 115
