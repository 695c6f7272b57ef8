"""Operators that find no memory, at calls that a test chooses, and a step that notices everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_harness import SMALL_CHUNKS, GpuModel, network_loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemini import GeminiDDP, GeminiOptimizer
from gemini.chunk.memory import ComputeDevice


class RunsOut(TorchDispatchMode):
    """While entered, the calls of operators that ``fails_at`` names, from 1, find no memory, or only those
    of them that are calls of ``operator``.

    ``written``: only after they have run, as one that has written to its operands before.
    """

    def __init__(self, fails_at: Sequence[int] = (), *, operator: str = "", written: bool = False) -> None:
        super().__init__()
        self.num_calls = 0
        self.num_failed = 0
        self._fails_at = fails_at
        self._operator = f"aten::{operator}"
        self._written = written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "profiler":  # marks in a profile
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        fails = self.num_calls in self._fails_at and func._schema.name.startswith(self._operator)
        out = func(*args, **(kwargs or {})) if self._written or not fails else None
        if fails:
            self.num_failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.")
        return out


class Noisy(nn.Module):
    """Layers with buffers that forward writes to, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(128) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for ``tokens``."""
        x = self.tokens(tokens)
        self.seen = x.detach().mean() if self.seen is None else self.seen + x.detach().mean()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.drop(torch.tanh(norm(layer(x).transpose(1, 2)).transpose(1, 2)))
        return (x + self.seen) @ self.tokens.weight.t()


def noisy() -> Noisy:
    """Return the noisy network, always with the same weights."""
    torch.manual_seed(0)
    return Noisy()


def managed(
    build: Callable[[], nn.Module], gpu: ComputeDevice, blocks: tuple[int | None, int], **options: Any
) -> GeminiDDP:
    """Return a model with so many blocks of DEVICE (None: all) and of HOST."""
    device, host = blocks
    device_bytes = device * gpu.block_bytes if device is not None else None
    chosen = {"non_model_bytes": 0, **SMALL_CHUNKS, **options}
    return GpuModel(build(), gpu, device_bytes=device_bytes, host_bytes=host * gpu.block_bytes, **chosen)


def step_of(model: GeminiDDP, optimizer: GeminiOptimizer, index: int) -> Callable[[], float]:
    """Return a whole training step on batch ``index``, which returns its loss."""

    def step() -> float:
        loss = network_loss(model, index, model.device)
        optimizer.backward(loss)
        value = loss.item()
        optimizer.step()
        return value

    return step


def state_of(model: GeminiDDP) -> dict[str, Tensor]:
    """Return weights and buffers, in host memory."""
    state = {key: value.cpu().clone() for key, value in model.state_dict().items()}
    model._gemini.device.synchronize()
    return state


def assert_settled(model: GeminiDDP) -> None:
    """Nothing is pinned, there are no gradients, and the table is in order."""
    table = model.manager.chunks.table
    table.check_invariants()
    assert [chunk.id for chunk in model.manager.chunks.chunks if table.pins(chunk.id)] == []
    assert not any(slot.has_grad for slot in model.storage.slots.values())
