"""The device that the cases of ``gemini bench gpu`` use, so that the same code runs with and without a GPU.

Without one the device is the runtime's simulated GPU, in host memory, and torch's part runs on the CPU: then
every case runs and no figure means anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gemini.chunk.gpu_memory import CudaDevice, SimulatedDevice
from gemini.chunk.memory import ComputeDevice
from gemini.errors import ConfigError
from gemini.memstats.monitor import MemoryMonitor, ProcessMonitor
from gemini.model.ddp import GeminiDDP
from gemini.optim.kernels import has_cuda_kernel
from gemini.system import device
from gemini_bench.paired import wall_seconds

CUDA = "cuda"
SIMULATED = "simulated"

# Which stream, destination, source.
CopyJob = tuple[int, Tensor, Tensor]


class BenchDevice(Protocol):
    """The device of a case. Not thread-safe."""

    @property
    def name(self) -> str:
        """The device's own name."""

    @property
    def compute(self) -> ComputeDevice:
        """The device as the runtime sees it."""

    def wrap(self, module: nn.Module, **options: Any) -> GeminiDDP:
        """Return ``module`` managed on this device."""

    def monitor(self) -> MemoryMonitor:
        """Return a monitor of the memory that torch uses; the caller closes it."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Return what the device took, by its own clock, for what ``run`` gives to this thread's stream or
        has it wait for."""

    def host_bytes(self, nbytes: int) -> Tensor:
        """Return host memory that torch copies from and to as fast as it can."""

    def copy(self, jobs: Sequence[CopyJob]) -> None:
        """Have torch do ``jobs`` on two streams, 0 and 1; this thread's stream goes on after them."""


class CudaBench:
    """The current GPU."""

    def __init__(self) -> None:
        self.compute = CudaDevice(torch.device("cuda"))
        self.name = device.cuda_name(self.compute.torch_device)
        self._streams = device.SideStreams(self.compute.torch_device, 2)

    def wrap(self, module: nn.Module, **options: Any) -> GeminiDDP:
        return GeminiDDP(module, self.compute.torch_device, **options)

    def monitor(self) -> MemoryMonitor:
        return self.compute.monitor()

    def seconds(self, run: Callable[[], object]) -> float:
        return device.stream_seconds(self.compute.torch_device, run)

    def host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, jobs: Sequence[CopyJob]) -> None:
        self._streams.copy(jobs)


class SimulatedBench:
    """A GPU in host memory; the CPU runs its operators."""

    def __init__(self) -> None:
        self.compute = SimulatedDevice()
        self.name = self.compute.name

    def wrap(self, module: nn.Module, **options: Any) -> GeminiDDP:
        compute = self.compute

        class OnSimulated(GeminiDDP):
            def _open_device(self, *_asked: object) -> ComputeDevice:
                return compute

        return OnSimulated(module, **options)

    def monitor(self) -> MemoryMonitor:
        return ProcessMonitor()

    def seconds(self, run: Callable[[], object]) -> float:
        return wall_seconds(run)

    def host_bytes(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, jobs: Sequence[CopyJob]) -> None:
        for _stream, destination, source in jobs:
            destination.copy_(source)


def open_bench_device(kind: str) -> BenchDevice:
    """Open the current GPU (:data:`CUDA`), or a simulated one (:data:`SIMULATED`)."""
    return SimulatedBench() if kind == SIMULATED else CudaBench()


def require_gpu() -> None:
    """Raise ConfigError if the cases cannot run on a GPU here."""
    if not device.cuda_available():
        raise ConfigError(
            f"torch {torch.__version__} sees no CUDA GPU (its CUDA: {torch.version.cuda}); run this where it "
            "does, or pass --simulated to see that the cases run"
        )
    if not has_cuda_kernel():
        raise ConfigError(
            "this build has no Adam kernel for GPUs; build it with nvcc and GEMINI_CUDA=ON, as "
            "scripts/gpu_check.sh does"
        )


def about_device(kind: str) -> dict[str, Any]:
    """Return the description of the device for a record."""
    if kind == SIMULATED:
        return {"name": "simulated, in host memory", "cuda": None, "memory_bytes": None}
    gpu = device.resolve_device(CUDA)
    _free, total = device.cuda_memory_bytes(gpu)
    return {"name": device.cuda_name(gpu), "cuda": torch.version.cuda, "memory_bytes": total}
