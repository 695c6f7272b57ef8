"""What torch makes where nothing else is said (``set_default_device``, ``set_default_dtype``) is the user's
affair: it changes nothing within. On ``meta`` whatever was made without saying where would fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini import (
    CPUAdam,
    GeminiAdamOptimizer,
    GeminiDDP,
    GeminiOptimizer,
    HybridAdam,
    checkpoint,
)
from gemini.offload import DiskOffloader

STEPS = 6
CHUNKS = {"min_chunk_size_mb": 1 / 256, "search_range_mb": 0}


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


DEFAULTS = [("meta", torch.float32), ("cpu", torch.float64), ("cpu", torch.bfloat16)]
each_default = pytest.mark.parametrize("chosen", DEFAULTS, ids=["meta", "float64", "bfloat16"])


def build() -> nn.Sequential:
    """Return a model in fp32 on the CPU, one weight of it not contiguous."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(32, 32, device="cpu", dtype=torch.float32) for _ in range(4)),
    )
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, device="cpu", dtype=torch.float32) / 6)
        model[1].weight = nn.Parameter(model[1].weight.t().contiguous().t())
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 32, generator=generator, device="cpu", dtype=torch.float32)
    return model(x).float().square().mean()


def train(model: nn.Module, optimizer: GeminiOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(directory: Path, precision: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, save and go on from there under another budget."""
    directory.mkdir()
    options = {"disk_dir": str(directory), "mixed_precision": precision, "non_model_bytes": 0, **CHUNKS}
    with GeminiDDP(build(), device_bytes=2**16, **options) as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-2, max_norm=0.1)
        losses = train(model, optimizer, range(STEPS // 2))
        checkpoint.save(directory / "saved", model, optimizer)
        state = optimizer.state_dict()
    with GeminiDDP(build(), device_bytes=2**17, **options) as model:
        optimizer = GeminiAdamOptimizer(model, lr=1e-2, max_norm=0.1)
        optimizer.load_state_dict(state)
        checkpoint.load(directory / "saved", model, optimizer)
        losses += train(model, optimizer, range(STEPS // 2, STEPS))
        optimizer.clip_grad_by_norm(1.0)  # there is none
        return losses, {name: value.clone() for name, value in model.state_dict().items()}


@each_default
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_managed_model_trains_to_the_same_bits(
    precision: str | None, chosen: tuple[str, torch.dtype], tmp_path: Path
) -> None:
    want_losses, want = run(tmp_path / "plain", precision)
    with defaults(*chosen):
        losses, weights = run(tmp_path / "chosen", precision)
    assert losses == want_losses
    assert all(torch.equal(weights[name], want[name]) and want[name].dtype == torch.float32 for name in want)


@each_default
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_adam_alone_trains_to_the_same_bits(
    fraction: float, chosen: tuple[str, torch.dtype], tmp_path: Path
) -> None:
    def trained() -> tuple[nn.Module, dict[str, object]]:
        model = build()
        options = {"lr": 1e-2, "nvme_offload_fraction": fraction, "nvme_offload_dir": str(tmp_path)}
        optimizer = CPUAdam(model.parameters(), **options)
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step(grad_scale=2.0)
            optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.close()
        going_on = HybridAdam(model.parameters(), **options)
        going_on.load_state_dict(state)
        loss_of(model, 3).backward()
        going_on.step()
        return model, going_on.state_dict()["state"]

    want, want_state = trained()
    with defaults(*chosen):
        model, state = trained()
    for ours, theirs in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(state, want_state, rtol=0, atol=0)


@each_default
def test_a_disk_offloader_brings_back_what_it_was_given(
    chosen: tuple[str, torch.dtype], tmp_path: Path
) -> None:
    want = torch.arange(5000, dtype=torch.float32, device="cpu")
    tensor = want.clone()
    with defaults(*chosen), DiskOffloader(tmp_path, checksums=True) as offloader:
        offloader.sync_write(tensor)
        offloader.sync_read(tensor)
    assert torch.equal(tensor, want)
