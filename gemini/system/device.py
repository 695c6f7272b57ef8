"""The computing device and its memory. The only file of the library that uses torch.cuda."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from gemini.errors import ConfigError, DeviceFullError
from gemini.system import process

# The share of free memory left to the interpreter, the page cache and other processes by default budgets.
FREE_MARGIN = 0.10

# Out-of-memory errors without an exception type in torch: CPU memory; loading a kernel, by the runtime, the
# driver and Triton; libraries (CUBLAS_STATUS_ALLOC_FAILED, CUDNN_..., CUSOLVER_...).
_IS_FULL = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",
)
# What torch's messages and those of csrc/gpu say; the latter round up.
_ASKED = re.compile(r"(?:allocate|has no) ([0-9.]+) ?(bytes|B|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the computing device; by default the current GPU, or the CPU if there is none.

    Raises:
        ConfigError: it is neither the CPU nor a CUDA GPU that torch can use.
    """
    if device is None:
        return current_device()
    try:
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is none of torch's; pass 'cpu' or 'cuda'") from error
    if resolved.type == "cpu":
        return resolved
    if resolved.type != "cuda":
        raise ConfigError(f"device {str(resolved)!r} cannot compute here; pass 'cpu' or 'cuda'")
    if not cuda_available():
        raise ConfigError(
            f"device {str(resolved)!r} was asked for but torch sees no CUDA GPU; pass device='cpu', or see "
            "`gemini check` for what is missing"
        )
    index, count = device_index(resolved), torch.cuda.device_count()
    # torch keeps only eight bits of an index, so cuda:256 would become cuda:0.
    if index >= count or str(device) not in (str(index), str(resolved)):
        raise ConfigError(f"device {str(device)!r} was asked for but the last GPU here is 'cuda:{count - 1}'")
    return torch.device("cuda", index)


def first_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of the first of ``tensors``; the CPU if there are none."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device; without one, the current device's."""
    return device.index if device.index is not None else torch.cuda.current_device()


def free_memory_bytes() -> int:
    """Return the bytes that this process can still allocate: the machine's, or its control groups'
    if less.
    """
    free = int(psutil.virtual_memory().available)
    allowed = process.free_bytes()
    return free if allowed is None else min(free, allowed)


def default_budget_bytes(free_bytes: int | None = None) -> int:
    """Return the default budget: ``free_bytes`` (by default the free memory for this process) less
    a margin.
    """
    free = free_memory_bytes() if free_bytes is None else free_bytes
    return int(free * (1.0 - FREE_MARGIN))


def ran_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that the computing device has no memory left, for an operator or a chunk.
    Exceeding a budget does not count.
    """
    if isinstance(error, (torch.OutOfMemoryError, DeviceFullError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _IS_FULL)


def asked_bytes(error: BaseException) -> int:
    """Return the requested bytes in an out-of-memory message; 0 if it does not name them."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def cuda_available() -> bool:
    """Return whether torch can use a CUDA GPU in this process."""
    return torch.cuda.is_available()


def gpu_count() -> int:
    """Return the number of GPUs that torch can use in this process."""
    return torch.cuda.device_count() if cuda_available() else 0


@contextmanager
def repeatable_operators(device: torch.device) -> Iterator[None]:
    """Make torch's GPU operators deterministic within the block.

    Operators with an undefined order of additions are replaced by slower ones, or raise if torch has none.
    CPU operators are deterministic anyway. The environment variable for cuBLAS stays set.
    """
    if device.type == "cpu":
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # filling costs time, and nothing here reads such memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fills


def current_device() -> torch.device:
    """Return the current GPU, or the CPU if there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda_available() else torch.device("cpu")


def select_device(index: int) -> None:
    """Make GPU ``index`` (modulo their number) current, so that the processes of a machine use one each; does
    nothing without a GPU.
    """
    if cuda_available():
        torch.cuda.set_device(index % torch.cuda.device_count())


def cuda_name(device: torch.device) -> str:
    """Return the name of a CUDA device."""
    return torch.cuda.get_device_name(device)


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU as (major, minor)."""
    return torch.cuda.get_device_capability(device)


def cuda_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the (free, total) bytes of a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished all submitted work."""
    torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until a CUDA device has finished the work on its current stream."""
    torch.cuda.current_stream(device).synchronize()


def current_stream(device: torch.device) -> int:
    """Return the address of this thread's current stream on a CUDA device."""
    return int(torch._C._cuda_getCurrentRawStream(device_index(device)))


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes of a CUDA device that torch's allocator holds, including its cache."""
    return int(torch.cuda.memory_reserved(device))


def is_capturing() -> bool:
    """Return whether this thread's GPU operators are being captured into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def release_cache(device: torch.device) -> None:
    """Release the cached memory of torch's allocator."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def stream_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return how long a CUDA device takes for the work that ``run`` submits to this thread's stream or makes
    it wait for, starting from an idle device. Waits for the end of that work.
    """
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class SideStreams:
    """CUDA streams beside this thread's current stream."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def copy(self, jobs: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Start a copy for each (stream, destination, source) without waiting. The copies run after all work
        that this thread's stream has, and before all work that it gets later.
        """
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(current)
        for index, destination, source in jobs:
            with torch.cuda.stream(self._streams[index]):
                destination.copy_(source, non_blocking=True)
        for stream in self._streams:
            current.wait_stream(stream)


def gpu_generator_states() -> list[bytes]:
    """Return the random generator state of every CUDA device, or [] if torch has not used CUDA."""
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


def set_gpu_generator_states(states: list[bytes]) -> None:
    """Set the random generators of the CUDA devices here, as many as there are."""
    for index, state in enumerate(states[: gpu_count()]):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), index)


class AllocatorMonitor:
    """Measures the memory of a CUDA device that torch's allocator holds, including its cache, which no other
    process can use. Implements :class:`gemini.memstats.monitor.MemoryMonitor`; the peak is torch's own and
    exact.
    """

    method = "torch's CUDA allocator, reserved bytes"

    def __init__(self, device: torch.device, held_bytes: int) -> None:
        """``held_bytes``: the bytes held before the first step, which belong to no step."""
        self._device = device
        self._held_bytes = held_bytes

    def resident_bytes(self) -> int:
        """Return the bytes held before the first step. Memory cached in earlier steps counts for the current
        period.
        """
        return self._held_bytes

    def start_period(self) -> None:
        """Start a period."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def end_period(self) -> int:
        """Return the peak bytes since ``start_period``."""
        return int(torch.cuda.max_memory_reserved(self._device))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@contextmanager
def launching(device: torch.device) -> Iterator[int]:
    """Make a CUDA device current for the block; yields the address of its current stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream
