"""GPUs for the tests: a real one where there is one, and simulated ones that are as late as a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from late_operators import LateOperators
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from gemini import _C, GeminiDDP, GeminiOptimizer, HybridAdam
from gemini.chunk.gpu_memory import CudaDevice, GpuMemory, SimulatedDevice
from gemini.chunk.memory import ComputeDevice
from gemini.optim import chunk_update, gradients, rule, step_rows
from gemini.optim.kernels import AdamRow

VOCAB, WIDTH = 64, 128

# Chunks of 64 KiB: one block of a simulated GPU each, and one of a real GPU's, so that budgets in blocks mean
# the same on both.
SMALL_CHUNKS = {"min_chunk_size_mb": 1 / 16, "search_range_mb": 1 / 16, "hidden_dim": WIDTH}


class GpuModel(GeminiDDP):
    """A managed model on a :class:`ComputeDevice` that the test has made."""

    def _open_device(self, device: Any, pin_memory: bool | None) -> ComputeDevice:
        return device  # type: ignore[no-any-return]


class LateDevice(SimulatedDevice):
    """A simulated GPU whose operators are late as well: nothing has been computed when a call returns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stream = _C.SimulatedStream(self._gpu)
        self._gpu.follow(self.stream.handle)
        self.operators = LateOperators(self.stream)

    def synchronize(self) -> None:
        """Wait until the operators so far are done."""
        self.operators.synchronize()

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Run torch's operators and the kernels late for the block."""
        run_rows = rule.run_rows
        run_table, sum_of_squares = step_rows.run_table, gradients.sum_of_squares
        prepare_on_host = chunk_update.prepare_on_host
        lend = GpuMemory.lend

        def noted_loan(memory: GpuMemory, window: Any, nbytes: int) -> Any:
            self.operators.kept_by_nobody.add(window.address)
            return lend(memory, window, nbytes)

        def late_rows(rows: Sequence[AdamRow], steps: Sequence[Any], device: object, *more: Any) -> bool:
            if device == "cpu" and isinstance(device, str):  # on HOST, by the CPU
                return run_rows(rows, steps, device, *more)
            used = [tensor for row in rows for tensor in (row.tensors[0], row.grad) if tensor is not None]
            self.operators.launch(used, lambda: run_rows(rows, steps))
            return True

        def awaited_sum(tensor: Tensor) -> float:
            self.operators.synchronize()
            return sum_of_squares(tensor)

        def awaited_table(*arguments: Any) -> bool:
            self.operators.synchronize()  # an unmanaged Adam's kernel, which is not late
            return run_table(*arguments)

        def prepare_at_once(*arguments: Any) -> Callable[[], None]:
            with _disable_current_modes():  # what the CPU does is done when the call returns
                update = prepare_on_host(*arguments)

            def update_at_once() -> None:
                with _disable_current_modes():
                    update()

            return update_at_once

        monkeypatch.setattr(GpuMemory, "lend", noted_loan)
        monkeypatch.setattr(chunk_update, "prepare_on_host", prepare_at_once)
        monkeypatch.setattr(rule, "run_rows", late_rows)
        monkeypatch.setattr(step_rows, "run_table", awaited_table)
        monkeypatch.setattr(gradients, "sum_of_squares", awaited_sum)
        try:
            with self.operators:
                yield
        finally:
            self.operators.close()


class Network(nn.Module):
    """Tied embeddings around linear layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("gain", torch.full((WIDTH,), 0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for ``tokens``."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        # Cast here: a product of two types is refused when it is called by CUDA, but late by its stand-in.
        return F.linear(self.norm(x) * self.gain.to(x.dtype), self.tokens.weight)


def network() -> Network:
    """Return the network, always with the same weights."""
    torch.manual_seed(0)
    return Network()


def network_loss(model: nn.Module, step: int, device: torch.device) -> Tensor:
    """Return the loss of batch ``step``."""
    tokens = torch.randint(0, VOCAB, (4, 17), generator=torch.Generator().manual_seed(step)).to(device)
    logits = model(tokens[:, :-1]).float()
    return F.cross_entropy(logits.view(-1, VOCAB), tokens[:, 1:].reshape(-1))


def train(model: nn.Module, optimizer: Any, device: torch.device, steps: range = range(6)) -> list[float]:
    """Train; return the losses."""
    losses = []
    backward: Callable[[Tensor], None] = getattr(optimizer, "backward", Tensor.backward)
    for step in steps:
        loss = network_loss(model, step, device)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def raise_in_an_operator(model: GeminiDDP, device: torch.device) -> None:
    """Run a forward pass whose third layer is given too few columns: a shape is refused when the operator is
    called, by every device and torch, while a type may be found wrong only where values are computed."""
    layer: nn.Module = model.module.layers[2]
    narrowed = layer.register_forward_pre_hook(lambda _, given: given[0][..., 1:])
    with pytest.raises(RuntimeError, match=str(WIDTH - 1)):
        network_loss(model, 0, device)
    narrowed.remove()


def optimizer_of(model: GeminiDDP, **options: Any) -> GeminiOptimizer:
    """Return the optimizer of a managed network; all updates are the GPU's where nothing else is said."""
    options = {"gpu_margin_mem_ratio": None, **options}
    return GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), model, **options)


def simulated(**options: Any) -> SimulatedDevice:
    """Return a simulated GPU of 64 MiB whose blocks are the chunks of :data:`SMALL_CHUNKS`."""
    return SimulatedDevice(2**26, block_bytes=2**16, **options)


class Taken:
    """Memory of a simulated GPU that somebody else has."""

    def __init__(self, gpu: SimulatedDevice) -> None:
        self._gpu = gpu
        self._space = _C.GpuSpace(gpu._gpu, 2**26, 2**10)
        self._arena = _C.GpuArena(gpu._gpu, 2**26)
        self._windows: list[_C.GpuWindow] = []

    def all_but(self, blocks: int) -> None:
        """Take what is free but for so many blocks."""
        for _ in range(self._gpu.free_bytes() // self._gpu.block_bytes - blocks):
            self._windows.append(self._space.create(self._gpu.block_bytes))
            self._arena.map(self._windows[-1])

    def give_back(self) -> None:
        """Give all of it back."""
        while self._windows:
            self._arena.unmap(self._windows.pop(), park=False)


def make_gpu(kind: str) -> ComputeDevice:
    """Return the GPU of that kind."""
    if kind == "cuda":
        return CudaDevice(torch.device("cuda"))
    if kind == "late operators":
        return LateDevice(total_bytes=2**26, block_bytes=2**16, max_delay_us=200, seed=1)
    return simulated(max_delay_us=300 if kind == "late copies" else 0)


KINDS = ["simulated", "late copies", "late operators", pytest.param("cuda", marks=pytest.mark.cuda)]
