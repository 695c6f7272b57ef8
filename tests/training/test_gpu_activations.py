"""Activations in chunks where DEVICE is a GPU: a real one where there is one, else simulated ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from activation_harness import activation_bytes
from device_thread import backward_on_its_own_thread
from gpu_harness import KINDS, SMALL_CHUNKS, GpuModel, LateDevice, make_gpu, optimizer_of, simulated
from pairs import pairs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_harness import assert_same_state, assert_within_budgets, moved_bytes

from gemini import ConfigError, HybridAdam, OutOfBudgetError
from gemini.chunk.memory import ComputeDevice
from gemini.runtime.activation import activations

WIDTH = 128

# DEVICE and HOST in blocks, and whether there is a DISK. Model data takes 64 or more, a forward pass saves 24
# and more.
BUDGETS: dict[str, tuple[int, int, bool]] = {
    "host": (14, 128, False),
    "host and disk": (14, 12, True),
    "disk": (14, 0, True),
}


class Layer(nn.Module):
    """Saves whole blocks of a GPU, and two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run ``x`` through a gate."""
        value, gate = self.up(x).chunk(2, dim=-1)
        return x + self.down(value * torch.sigmoid(gate))


class Stack(nn.Module):
    """Layers; ``kind`` is "none", "reentrant" or "non-reentrant" checkpointing of every other one."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers."""
        for index, layer in enumerate(self.layers):
            if self.kind == "none" or index % 2:
                x = layer(x)
            else:
                # Nothing random is in it; the state of the generator would be that of operators to come.
                x = checkpoint(layer, x, use_reentrant=self.kind == "reentrant", preserve_rng_state=False)
        return x


EVERY = [*KINDS, "own thread"]


@pytest.fixture(params=EVERY)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ComputeDevice]:
    """Yield a GPU of each kind, with its operators running late, or backward on a thread of its own, where
    that is its kind."""
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    gpu = make_gpu(request.param)
    if isinstance(gpu, LateDevice):
        running: AbstractContextManager[None] = gpu.running(monkeypatch)
    elif request.param == "own thread":
        running = backward_on_its_own_thread(monkeypatch)
    else:
        running = nullcontext()
    with running:
        yield gpu


def options(gpu: ComputeDevice, budget: str, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Return keywords of GpuModel for one of :data:`BUDGETS`."""
    device, host, disk = BUDGETS[budget]
    return {
        "device": gpu,
        "device_bytes": device * gpu.block_bytes,
        "host_bytes": host * gpu.block_bytes,
        "disk_dir": str(tmp_path) if disk else None,
        "non_model_bytes": 0,
        "activation_offload": True,
        **SMALL_CHUNKS,
        **more,
    }


def stack_loss(model: nn.Module, step: int, gpu: ComputeDevice, blocks: int = 1) -> Tensor:
    """Return the loss of batch ``step``, of which a tensor as wide as the model takes so many blocks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(blocks * gpu.block_bytes // (4 * WIDTH), WIDTH, generator=generator)
    x = x.to(gpu.torch_device).requires_grad_()
    return model(x).square().mean()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, gpu: ComputeDevice, steps: range = range(6)) -> list[float]:
    """Train; return the losses."""
    losses = []
    for step in steps:
        loss = stack_loss(model, step, gpu)
        getattr(optimizer, "backward", Tensor.backward)(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_outcome(kind: str, gpu: ComputeDevice) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and the weights of training that nobody manages."""
    plain = Stack(kind).to(gpu.torch_device)
    losses = train(plain, HybridAdam(plain.parameters(), lr=1e-2), gpu)
    return losses, {key: value.cpu() for key, value in plain.state_dict().items()}


@pairs("gpu", gpu=EVERY, kind=["none", "non-reentrant", "reentrant"], budget=BUDGETS)
def test_offloaded_activations_never_change_the_numbers(
    gpu: ComputeDevice, budget: str, kind: str, tmp_path: Path
) -> None:
    want, weights = plain_outcome(kind, gpu)
    with GpuModel(Stack(kind), **options(gpu, budget, tmp_path)) as model:
        assert train(model, optimizer_of(model, overlap="backward"), gpu) == want
        assert_within_budgets(model.stats())
        assert activation_bytes(model) == 0
        gpu.synchronize()
        assert_same_state({key: value.cpu() for key, value in model.state_dict().items()}, weights)


def test_what_a_forward_pass_saves_leaves_the_gpu(gpu: ComputeDevice, tmp_path: Path) -> None:
    with GpuModel(Stack(), **options(gpu, "host", tmp_path)) as model:
        loss = stack_loss(model, 0, gpu)
        assert activation_bytes(model) > 14 * gpu.block_bytes  # more than there is
        assert model.manager.chunks.arena_bytes() <= 14 * gpu.block_bytes
        before = moved_bytes(model.stats())
        loss.backward()
        assert moved_bytes(model.stats()) > before
        assert activation_bytes(model) == 0


def test_auto_keeps_what_would_not_leave(gpu: ComputeDevice, tmp_path: Path) -> None:
    want, _ = plain_outcome("none", gpu)
    chosen = options(gpu, "host", tmp_path, activation_offload="auto", non_model_bytes=None)
    chosen["device_bytes"] = 80 * gpu.block_bytes
    with GpuModel(Stack(), **chosen) as model:
        assert train(model, optimizer_of(model), gpu) == want
        stack_loss(model, 0, gpu)
        assert activation_bytes(model) < 14 * gpu.block_bytes


def test_a_graph_that_is_dropped_gives_everything_back(gpu: ComputeDevice, tmp_path: Path) -> None:
    with GpuModel(Stack(), **options(gpu, "host and disk", tmp_path)) as model:
        loss = stack_loss(model, 0, gpu)
        assert activation_bytes(model) > 0
        del loss
        gpu.synchronize()
        gc.collect()
        assert activation_bytes(model) == 0


class Kept(torch.autograd.Function):
    """Leaves the tensor it saved, as it gets it in backward, in ``seen``."""

    seen: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Save what comes in."""
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Keep what was saved."""
        (Kept.seen,) = ctx.saved_tensors
        return grad


class KeepsOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers on what a function saves."""
        return self.stack(Kept.apply(x))  # type: ignore[no-any-return]


def test_a_tensor_kept_beyond_backward_stays_readable(gpu: ComputeDevice, tmp_path: Path) -> None:
    with GpuModel(KeepsOne(), **options(gpu, "host", tmp_path)) as model:
        optimizer = optimizer_of(model)
        optimizer.backward(stack_loss(model, 0, gpu))
        kept, Kept.seen = Kept.seen, None
        assert kept is not None
        want = kept.clone()
        optimizer.step()
        for step in range(1, 3):
            stack_loss(model, step, gpu).backward()
            Kept.seen = None
            optimizer.step()
        assert torch.equal(kept, want)
        del kept


def test_activations_that_fit_no_tier_are_refused(gpu: ComputeDevice, tmp_path: Path) -> None:
    chosen = options(gpu, "host", tmp_path, host_bytes=64 * gpu.block_bytes)
    with GpuModel(Stack(), **chosen) as model:
        with pytest.raises(OutOfBudgetError, match="host_bytes"):
            stack_loss(model, 0, gpu, blocks=4)
        gpu.synchronize()
        gc.collect()
        assert activation_bytes(model) == 0


def test_blocks_are_not_recomputed_on_a_gpu_yet(tmp_path: Path) -> None:
    chosen = options(simulated(), "host", tmp_path, activation_offload="auto", activation_recompute=True)
    with pytest.raises(ConfigError, match=r"torch\.utils\.checkpoint"):
        GpuModel(Stack(), **{**chosen, "non_model_bytes": None})
