"""A small model under a tight budget for the fault tests, and what must hold after every fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import gemini

KIB = 1024
DEVICE_BYTES = 64 * KIB


def build(seed: int = 0) -> nn.Module:
    """Return a model whose data is several times what :func:`managed` lets it have on DEVICE."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(48, 48), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(48, 9))


def managed(directory: Path | str, **options: Any) -> gemini.GeminiDDP:
    """Return the model, seed 0, on a small DEVICE above a DISK in ``directory``."""
    chosen = {
        "device_bytes": DEVICE_BYTES,
        "non_model_bytes": 0,
        "min_chunk_size_mb": 0.01,
        "search_range_mb": 0,
    }
    return gemini.GeminiDDP(build(), **{**chosen, "disk_dir": str(directory), **options})


def adam(model: gemini.GeminiDDP, **options: Any) -> gemini.GeminiOptimizer:
    return gemini.GeminiOptimizer(gemini.CPUAdam(model.parameters(), lr=1e-2), model, **options)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """Return the loss of one batch that depends on the step only."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 48, generator=generator)
    loss: torch.Tensor = F.cross_entropy(model(x).float(), torch.randint(0, 9, (4,), generator=generator))
    return loss


def train_step(model: gemini.GeminiDDP, optimizer: gemini.GeminiOptimizer, step: int) -> float:
    """Run one whole step; return its loss."""
    loss = loss_of(model, step)
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def undisturbed(steps: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of a run that nothing happens to."""
    model = gemini.GeminiDDP(build(), **options)
    optimizer = adam(model)
    losses = [train_step(model, optimizer, step) for step in range(steps)]
    return losses, weights(model)


def weights(model: gemini.GeminiDDP) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def assert_sound(model: gemini.GeminiDDP) -> None:
    """State what holds after any fault: the books are right, nothing is pinned, no budget is exceeded."""
    chunks = model.manager.chunks
    chunks.drain()
    chunks.table.check_invariants()
    assert chunks.table.num_in_flight() == 0
    assert [chunk.id for chunk in chunks.chunks if chunks.table.pins(chunk.id)] == []
    for tier in model.stats().values():
        if isinstance(tier, dict) and "budget_bytes" in tier:
            assert tier["bytes"] <= tier["peak_bytes"] <= tier["budget_bytes"]
    assert chunks.arena_bytes() <= chunks.budgets.device_bytes
    with torch._C.DisableTorchFunctionSubclass():  # autograd would add the next gradient to it
        assert all(param.grad is None for param in model.module.parameters())


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``num_bytes``: like a full disk, but EFBIG and for any user."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
