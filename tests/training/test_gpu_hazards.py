"""What only a GPU does: several streams, an allocator that keeps what was freed, weights that cuDNN moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from gpu_harness import SMALL_CHUNKS, GpuModel, optimizer_of
from torch import nn
from training_harness import tight

from gemini import _C, GeminiDDP
from gemini.chunk import ChunkManager, TierBudgets
from gemini.chunk.chunk import ChunkKind, ChunkSpec
from gemini.chunk.gpu_memory import GpuMemory, SimulatedDevice
from gemini.memstats.monitor import MemoryMonitor
from gemini.offload.async_file import AsyncFile

BLOCK = 2**16
MIB = 2**20


class TwoStreams(SimulatedDevice):
    """A simulated GPU with two streams for operators, of which ``current`` is torch's current one."""

    def __init__(self) -> None:
        super().__init__(2**24, block_bytes=BLOCK, max_delay_us=20_000, seed=3)
        self.streams = [_C.SimulatedStream(self._gpu) for _ in range(2)]
        self.current = 0

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> GpuMemory:
        """Reserve addresses, for operators of the current stream."""
        follow = self._follow_current
        return GpuMemory(self._gpu, follow, lambda: None, sizes, budgets, file, spare_bytes=spare_bytes)

    def _follow_current(self) -> None:
        self._gpu.follow(self.streams[self.current].handle)


def test_operators_of_another_stream_come_after_the_copies_they_need() -> None:
    gpu = TwoStreams()
    specs = [ChunkSpec(ChunkKind.PARAM, BLOCK // 4, torch.float32, BLOCK)] * 2
    chunks = ChunkManager(specs, TierBudgets(BLOCK, 4 * BLOCK), gpu)
    tensors = [chunks.add_tensor(chunk) for chunk in chunks.chunks]

    def operate(index: int, value: float | None) -> set[float]:
        chunk = chunks.chunks[index]
        chunks.acquire((tensors[index],), traced=False)
        turn = gpu.streams[gpu.current].turn([(chunk.window.address, BLOCK)])
        turn.wait()
        if value is not None:
            chunk.tensor.fill_(value)
        seen = set(chunk.tensor.tolist())
        turn.finish()
        chunks.release((tensors[index],), dirty=value is not None)
        return seen

    operate(0, 1.0)
    operate(1, 2.0)
    # The first stream is made to wait for the chunk, the second one uses it.
    chunks.acquire((tensors[0],), traced=False)
    chunks.release((tensors[0],), dirty=False)
    gpu.current = 1
    assert operate(0, None) == {1.0}
    gpu.current = 0
    assert operate(1, None) == {2.0}
    chunks.close()


def test_chunks_of_two_sizes_share_memory_without_the_host_waiting_for_operators() -> None:
    gpu = TwoStreams()
    large = ChunkSpec(ChunkKind.PARAM, BLOCK // 2, torch.float32, 2 * BLOCK)
    small = ChunkSpec(ChunkKind.PARAM, BLOCK // 4, torch.float32, BLOCK)
    chunks = ChunkManager([large, small, small], TierBudgets(2 * BLOCK, 8 * BLOCK), gpu)
    tensors = [chunks.add_tensor(chunk) for chunk in chunks.chunks]
    seen: list[set[float]] = []

    def hold(index: int) -> Callable[[float], None]:
        """Give an operator that will find what the one before left, and write to the chunk."""
        chunk = chunks.chunks[index]
        chunks.acquire((tensors[index],), traced=False)
        turn = gpu.streams[0].turn([(chunk.window.address, chunk.spec.nbytes)])
        chunks.release((tensors[index],), dirty=True)

        def run(value: float) -> None:
            turn.wait()
            seen.append(set(chunk.tensor.tolist()))
            chunk.tensor.fill_(value)
            turn.finish()

        return run

    for index in range(3):
        hold(index)(float(index))
    seen.clear()
    given: SimpleQueue[Callable[[float], None]] = SimpleQueue()
    giver = threading.Thread(target=lambda: [given.put(hold(index)) for index in (0, 1, 2, 0)])
    giver.start()
    giver.join(10)
    waited = giver.is_alive()
    for value in range(4):
        given.get(timeout=10)(10.0 + value)
    giver.join()
    assert not waited
    assert seen == [{0.0}, {1.0}, {2.0}, {10.0}]
    chunks.close()


class CachingMonitor:
    """The memory of an allocator that gives nothing back."""

    method = "fake"
    reserved_bytes = 0

    def resident_bytes(self) -> int:
        """Return what it had before the first step: nothing."""
        return 0

    def start_period(self) -> None:
        """What is kept stays."""

    def end_period(self) -> int:
        """Return what is kept."""
        return self.reserved_bytes

    def close(self) -> None:
        """Do nothing."""


class CachingDevice(SimulatedDevice):
    """A simulated GPU whose operators take memory from an allocator that gives nothing back."""

    def __init__(self) -> None:
        super().__init__(2**26, block_bytes=BLOCK)
        self.allocator = CachingMonitor()

    def monitor(self) -> MemoryMonitor:
        """Return the allocator's."""
        return self.allocator


class Activation(nn.Module):
    """Takes 100 KiB more of the allocator in every layer of a forward pass."""

    def __init__(self, gpu: CachingDevice, layer: int) -> None:
        super().__init__()
        self._gpu = gpu
        self._live_bytes = (layer + 1) * MIB // 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``."""
        self._gpu.allocator.reserved_bytes = max(self._gpu.allocator.reserved_bytes, self._live_bytes)
        return x


class Branches(nn.Module):
    """Two branches; ``own`` is the stream of the second, None: the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(2)
        )
        self.own: torch.cuda.Stream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both."""
        before = torch.cuda.current_stream()
        own = self.own or before
        own.wait_stream(before)
        x.record_stream(own)
        with torch.cuda.stream(own):
            second = self.second(x)
        first = self.first(x)
        before.wait_stream(own)
        second.record_stream(before)
        return torch.tanh(first + second)


@pytest.mark.cuda
@pytest.mark.parametrize("blocks", [None, 8])
def test_a_branch_in_a_stream_of_its_own_has_the_gradients_of_one_stream(blocks: int | None) -> None:
    outcomes = []
    for managed, two_streams in ((False, False), (False, True), (True, True)):
        torch.manual_seed(0)
        module = Branches()
        module.own = torch.cuda.Stream() if two_streams else None
        device_bytes = blocks and blocks * 2 * MIB
        budgets = {"device_bytes": device_bytes, "host_bytes": "64MiB", "non_model_bytes": 0, **SMALL_CHUNKS}
        model = GeminiDDP(module, device="cuda", **budgets) if managed else module.cuda()
        for index in range(3):
            x = torch.ones(4, 128, device="cuda").mul_(index).requires_grad_()
            model(x).square().sum().backward()
            torch.cuda.synchronize()
        outcomes.append([param.grad.cpu() for param in model.parameters()])
        if managed:
            model.close()
    assert all(grad.isfinite().all() for grad in outcomes[0])
    for outcome in outcomes[1:]:
        assert all(torch.equal(*pair) for pair in zip(outcome, outcomes[0], strict=True))


@pytest.mark.parametrize("evaluated_mib", [0, 3])
def test_what_the_allocator_keeps_is_left_free_in_every_period(evaluated_mib: int) -> None:
    gpu = CachingDevice()
    layers = [each for i in range(60) for each in (nn.Linear(128, 128), Activation(gpu, i))]
    budget = 12 * MIB  # 6 MiB are kept by the allocator, model data is twice as much and more
    options = {"device_bytes": budget, "host_bytes": 32 * MIB, **SMALL_CHUNKS}
    with GpuModel(nn.Sequential(*layers), device=gpu, **options) as model:
        gpu.allocator.reserved_bytes = evaluated_mib * MIB
        optimizer = optimizer_of(model)
        for _ in range(6):
            optimizer.backward(model(torch.ones(2, 128)).sum())
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(2, 128))
        reserved = gpu.allocator.reserved_bytes
        used = max(moment["device_bytes"] for moment in model.timeline())
        assert used + reserved <= budget
        assert model.stats()["h2d"]["bytes"] > 0


def test_recurrent_weights_stay_in_their_chunks(tmp_path: Path) -> None:
    with GeminiDDP(nn.LSTM(8, 8), **tight(tmp_path)) as model:
        weights = list(model.parameters())
        before = [weight.clone() for weight in weights]
        # What nn.LSTM.flatten_parameters() calls on a GPU.
        assert torch._cudnn_rnn_flatten_weight(weights, 4, 8, 2, 8, 0, 1, False, False) is None
        assert all(weight.data_ptr() in model.manager.windows for weight in weights)
        assert all(map(torch.equal, weights, before))
