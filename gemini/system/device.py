"""What the computing device is and how much memory the process may use. Leaf: the only runtime file that
knows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from gemini.errors import ConfigError, DeviceFullError
from gemini.system import process

# Left to the interpreter, the page cache and other processes when no budget is given.
FREE_MARGIN = 0.10

# For these torch has no type of its own: the CPU's memory; what a kernel needs to be loaded, by the runtime,
# the driver and Triton; libraries (CUBLAS_STATUS_ALLOC_FAILED, CUDNN_..., CUSOLVER_...).
_IS_FULL = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "_STATUS_ALLOC_FAILED",
)
_ASKED = re.compile(r"(?:allocate|has no) ([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the computing device: if not said the current GPU, or the CPU where there is none.

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
    # Torch keeps eight bits of an index.
    if index >= count or str(device) not in (str(index), str(resolved)):
        raise ConfigError(f"device {str(device)!r} was asked for but the last GPU here is 'cuda:{count - 1}'")
    return torch.device("cuda", index)


def device_index(device: torch.device) -> int:
    """Return the index of a CUDA device, the current one's where it has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


def free_memory_bytes() -> int:
    """Return the bytes this process could still take: the machine's, or its control groups' if less."""
    free = int(psutil.virtual_memory().available)
    allowed = process.free_bytes()
    return free if allowed is None else min(free, allowed)


def default_budget_bytes(free_bytes: int | None = None) -> int:
    """Return the budget used when none is given: free memory, of this process's machine if not said, less a
    margin."""
    free = free_memory_bytes() if free_bytes is None else free_bytes
    return int(free * (1.0 - FREE_MARGIN))


def ran_out_of_memory(error: BaseException) -> bool:
    """Say whether ``error`` is that the computing device had no memory left, for an operator or for a chunk.
    That something does not fit a budget is another thing."""
    if isinstance(error, (torch.OutOfMemoryError, DeviceFullError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _IS_FULL)


def asked_bytes(error: BaseException) -> int:
    """Return how much was asked for when memory ran out, as the message says; 0 where it does not."""
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def cuda_available() -> bool:
    """Say whether torch can use a CUDA GPU in this process."""
    return torch.cuda.is_available()


def gpu_count() -> int:
    """Return how many GPUs torch can use in this process."""
    return torch.cuda.device_count() if cuda_available() else 0


@contextmanager
def repeatable_operators(device: torch.device) -> Iterator[None]:
    """Have torch's operators on a GPU give the same bits whenever they are given the same values, inside.
    Those that add in any order are replaced by slower ones, or raise where torch has none. The CPU's need
    nothing. What cuBLAS needs for it stays in the process's environment."""
    if device.type == "cpu":
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # that costs time, and nothing here reads it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fills


def current_device() -> torch.device:
    """Return the current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda_available() else torch.device("cpu")


def select_device(index: int) -> None:
    """Make GPU ``index`` the current one, so that processes of one machine take one each; does nothing
    without a GPU."""
    if cuda_available():
        torch.cuda.set_device(index % torch.cuda.device_count())


def cuda_name(device: torch.device) -> str:
    """Return what a CUDA device calls itself."""
    return torch.cuda.get_device_name(device)


def cuda_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, major and minor."""
    return torch.cuda.get_device_capability(device)


def cuda_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has done everything it was given."""
    torch.cuda.synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Wait until a CUDA device has done the operators it was given on the current stream."""
    torch.cuda.current_stream(device).synchronize()


def current_stream(device: torch.device) -> int:
    """Return the address of the stream that this thread's operators on a CUDA device go to."""
    return int(torch._C._cuda_getCurrentRawStream(device_index(device)))


def reserved_bytes(device: torch.device) -> int:
    """Return what torch's allocator has of a CUDA device, what it keeps for later included."""
    return int(torch.cuda.memory_reserved(device))


def is_capturing() -> bool:
    """Say whether this thread's operators on a GPU are recorded into a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def release_cache(device: torch.device) -> None:
    """Have torch's allocator give back what it keeps for later."""
    with torch.cuda.device(device):
        torch.cuda.empty_cache()


def stream_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Return how long a CUDA device took for what ``run`` gives to this thread's stream or has it wait for,
    from an idle device on. Waits for its end."""
    stream = torch.cuda.current_stream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize(device)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class SideStreams:
    """Streams of a CUDA device beside that of this thread's operators."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def copy(self, jobs: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Copy, for each (stream, destination, source), without waiting: after what this thread's stream was
        given so far and before what it is given from now on."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(current)
        for index, destination, source in jobs:
            with torch.cuda.stream(self._streams[index]):
                destination.copy_(source, non_blocking=True)
        for stream in self._streams:
            current.wait_stream(stream)


def gpu_generator_states() -> list[bytes]:
    """Return the state of the random number generator of every CUDA device that torch has used."""
    if not torch.cuda.is_initialized():
        return []
    return [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]


def set_gpu_generator_states(states: list[bytes]) -> None:
    """Set the generators of the CUDA devices here, as many as there are."""
    for index, state in enumerate(states[: gpu_count()]):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), index)


class AllocatorMonitor:
    """Memory that torch's allocator has taken from a CUDA device, what it keeps for later included: nobody
    else can have that. A :class:`gemini.memstats.MemoryMonitor`; the peak is torch's own and exact."""

    method = "torch's CUDA allocator, reserved bytes"

    def __init__(self, device: torch.device, held_bytes: int) -> None:
        """``held_bytes``: what it had before the first step, of which none is any step's."""
        self._device = device
        self._held_bytes = held_bytes

    def resident_bytes(self) -> int:
        """Return what is not counted: what is kept from earlier steps is this one's as well."""
        return self._held_bytes

    def start_period(self) -> None:
        """Begin a period."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def end_period(self) -> int:
        """Return the most it had since ``start_period``."""
        return int(torch.cuda.max_memory_reserved(self._device))

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


@contextmanager
def launching(device: torch.device) -> Iterator[int]:
    """Make a CUDA device the current one inside; yields the address of its current stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream
