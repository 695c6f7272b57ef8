"""Chunks in GPU memory, with page-locked CPU memory as HOST.

The GPU's streams order the copies: the thread that trains waits for none of them (docs/notes/gpu.md).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement

import torch
from torch.utils.dlpack import from_dlpack

from gemini import _C
from gemini.chunk.layout import TENSOR_ALIGN_BYTES
from gemini.chunk.memory import AnyMemory, GrowingSpace, StoredChunk, TierBudgets
from gemini.errors import DeviceFullError, OutOfBudgetError, StateError
from gemini.memstats.monitor import FakeMonitor, MemoryMonitor
from gemini.offload.async_file import AsyncFile
from gemini.system.device import (
    AllocatorMonitor,
    current_stream,
    device_index,
    is_capturing,
    release_cache,
    reserved_bytes,
    synchronize_stream,
)

logger = logging.getLogger(__name__)

_LINKS = {
    "h2d": _C.Link.H2D,
    "d2h": _C.Link.D2H,
    "disk_read": _C.Link.DISK_READ,
    "disk_write": _C.Link.DISK_WRITE,
}

# DLPack's code (kind, bits) of each dtype that chunks have.
_DLPACK_TYPES = {
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float64: (2, 64),
    torch.uint8: (1, 8),
}


# Libraries choose kernels by operand alignment up to this many bytes; torch's allocator aligns to 512.
_ALIGN_BYTES = 256


class _Life:
    """Lives as long as a storage over a window."""

    __slots__ = ("__weakref__",)


def common_block(sizes: Sequence[int], granularity: int) -> int:
    """Return the block size with which the most bytes of chunks of ``sizes`` can be built, so that the memory
    of one such chunk fits any other; among equals the largest. Other chunks have blocks of their own sizes
    (see GpuArena)."""
    bytes_by_span: Counter[int] = Counter()
    for size in sizes:
        span = -(-size // granularity) * granularity
        bytes_by_span[span] += span
    units = {math.gcd(*pair) for pair in combinations_with_replacement(bytes_by_span, 2)}

    def served_bytes(unit: int) -> int:
        most = unit * _C.GpuArena.most_blocks
        return sum(nbytes for span, nbytes in bytes_by_span.items() if span % unit == 0 and span <= most)

    return max(units, key=lambda unit: (served_bytes(unit), unit), default=0)


class GpuMemory:
    """Windows over recycled blocks, and copies on streams. See :class:`gemini.chunk.memory.ChunkMemory`."""

    def __init__(
        self,
        gpu: _C.Gpu,
        follow: Callable[[], None],
        spare: Callable[[], None],
        sizes: Sequence[int],
        budgets: TierBudgets,
        file: AsyncFile | None,
        *,
        spare_bytes: int = 0,
        pin: bool = True,
    ) -> None:
        self._gpu = gpu
        self.follow = follow
        self._spare = spare
        self._space = _C.GpuSpace(gpu, max(sum(sizes) + spare_bytes, 1), max(len(sizes), 1))
        self._later = GrowingSpace(lambda nbytes: _C.GpuSpace(gpu, nbytes, 1))  # in whole blocks
        self._arena = _C.GpuArena(gpu, budgets.device_bytes, common_block(sizes, gpu.granularity))
        self._host_arena = _C.PinnedArena(gpu, budgets.host_bytes, pin=pin)
        self._has_host = budgets.host_bytes > 0
        self._engine = _C.GpuEngine(gpu, file.native if file is not None else None)
        self._warned = False

    def windows(
        self, nbytes: int, *, later: bool = False, floats: bool = False, follows: bool = False
    ) -> tuple[_C.GpuWindow, _C.HostPlace | None]:
        window = self._later.create(nbytes) if later else self._space.create(nbytes, floats=floats)
        return window, _C.HostPlace(nbytes) if self._has_host else None

    def tensor(self, window: _C.GpuWindow, dtype: torch.dtype, numel: int) -> torch.Tensor:
        kind, bits = _DLPACK_TYPES[dtype]
        return from_dlpack(self._gpu.dlpack(window, kind, bits, numel))

    def joined(self, first: _C.GpuWindow, dtype: torch.dtype, numel: int) -> torch.Tensor:
        raise StateError("a tensor of a GPU lies in one chunk")

    def lend(self, window: _C.GpuWindow, nbytes: int) -> tuple[torch.UntypedStorage, object]:
        life = _Life()
        kind, bits = _DLPACK_TYPES[torch.uint8]
        return from_dlpack(self._gpu.dlpack(window, kind, bits, window.nbytes, life)).untyped_storage(), life

    def map(self, window: _C.GpuWindow, *, zero: bool) -> None:
        self.follow()
        self._with_spare(lambda: self._arena.map(window, zero=zero))

    def unmap(self, window: _C.GpuWindow, *, park: bool) -> None:
        self.follow()
        self._arena.unmap(window, park=park)

    def settle(self) -> None:
        """Do nothing: unmapped windows have no memory."""

    def map_host(self, place: _C.HostPlace) -> None:
        self._host_arena.map(place, zero=True)
        self._warn_of_unpinned()

    def wait_host(self, place: _C.HostPlace) -> None:
        self._host_arena.wait(place)

    def unmap_host(self, place: _C.HostPlace) -> None:
        self._host_arena.unmap(place)

    def fetch(self, window: _C.GpuWindow, place: _C.HostPlace, nbytes: int) -> int:
        self.follow()
        self._with_spare(lambda: self._arena.map_incoming(window))
        return self._engine.copy(window, place, nbytes)

    def evict(self, place: _C.HostPlace, window: _C.GpuWindow, nbytes: int) -> int:
        self.follow()
        self._host_arena.map(place)
        self._warn_of_unpinned()
        return self._engine.copy(place, window, nbytes)

    def load(self, window: _C.GpuWindow, nbytes: int, offset: int) -> int:
        self.follow()
        self._with_spare(lambda: self._arena.map_incoming(window))
        return self._engine.read(window, nbytes, offset)

    def load_stored(self, window: _C.GpuWindow, stored: StoredChunk) -> int:
        raise StateError("a GPU reads chunks from the DISK tier's own file")

    def spill(self, source: _C.GpuWindow | _C.HostPlace, nbytes: int, offset: int) -> int:
        self.follow()
        return self._engine.write(source, nbytes, offset)

    def poll(self) -> list[_C.TransferResult]:
        return self._engine.poll()

    def wait_any(self, timeout_s: float) -> bool:
        self.follow()
        return self._engine.wait_any(timeout_s)

    @property
    def num_in_flight(self) -> int:
        return self._engine.num_in_flight

    def link_stats(self) -> dict[str, dict[str, float]]:
        return {name: self._engine.stats(link) for name, link in _LINKS.items()}

    def stall_seconds(self) -> float:
        return self._engine.stall_seconds()

    def trim(self, parked_limit_bytes: int) -> None:
        self._arena.trim(parked_limit_bytes)

    @property
    def mapped_bytes(self) -> int:
        return self._arena.mapped_bytes

    @property
    def parked_bytes(self) -> int:
        return self._arena.parked_bytes

    def address_range(self) -> tuple[int, int]:
        first = self._space.address
        return first, first + self._space.reserved_bytes

    def find(self, address: int) -> int:
        return self._space.find(address)

    def heal(self) -> int:
        """Return 0: a stray access on a GPU ends the process's use of the GPU and leaves no pages behind."""
        return 0

    def close(
        self,
        windows: Sequence[tuple[_C.GpuWindow, _C.HostPlace | None]],
        exposed: Sequence[_C.GpuWindow],
    ) -> None:
        self._engine.close()
        self.follow()
        for window, place in windows:
            if window.mapped:
                self._arena.unmap(window, park=False)
            if place is not None and place.mapped:
                self._host_arena.unmap(place, park=False)
        self._arena.trim(0)
        self._host_arena.trim(0)
        for window in exposed:
            self._space.poison(window)  # backward passes of graphs may outlive the model

    def _warn_of_unpinned(self) -> None:
        if self._host_arena.unpinned_bytes and not self._warned:
            self._warned = True
            logger.warning(
                "the system refuses to page-lock host memory: copies to and from it are slower and make the "
                "thread that trains wait; raise the limit on locked memory or lower host_bytes"
            )

    def _with_spare(self, take: Callable[[], None]) -> None:
        """Call ``take`` to get memory. If there is none, release torch's cached memory and parked blocks,
        which have another size, and try again.

        Raises:
            DeviceFullError: there is still none.
        """
        try:
            take()
        except OutOfBudgetError:
            self._spare()
            self._arena.trim(0)
            try:
                take()
            except OutOfBudgetError as error:
                raise DeviceFullError(str(error)) from error


class CudaDevice:
    """An NVIDIA GPU. See :class:`gemini.chunk.memory.ComputeDevice`."""

    has_own_memory = True
    cuts_chunks = False
    align_bytes = _ALIGN_BYTES

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        """Open the GPU; ``pin``: whether HOST memory is page-locked. Raises GeminiError if there is no driver
        or no such GPU."""
        index = device_index(device)
        self.torch_device = torch.device("cuda", index)
        self.name = str(self.torch_device)
        self._gpu = _C.Gpu.cuda(index)
        self.block_bytes = self._gpu.granularity
        self.processors = tuple(self._gpu.processors)
        self._stream = 0
        self._pin = pin
        self._held_bytes = 0  # torch's reserved bytes after the model was moved into chunks

    def _follow(self) -> None:
        stream = current_stream(self.torch_device)
        if stream != self._stream:
            self._gpu.follow(stream)
            self._stream = stream

    def free_bytes(self) -> int:
        return self._gpu.memory()[0]

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> AnyMemory:
        follow, spare = self._follow, self.release_cache
        return GpuMemory(
            self._gpu, follow, spare, sizes, budgets, file, spare_bytes=spare_bytes, pin=self._pin
        )

    def monitor(self) -> MemoryMonitor:
        return AllocatorMonitor(self.torch_device, self._held_bytes)

    def model_data_bytes(self) -> int:
        return 0  # windows are outside torch's allocator

    def settle(self) -> None:
        self.release_cache()
        self._held_bytes = reserved_bytes(self.torch_device)

    def is_capturing(self) -> bool:
        return is_capturing()

    def synchronize(self) -> None:
        synchronize_stream(self.torch_device)

    def release_cache(self) -> None:
        release_cache(self.torch_device)


class SimulatedDevice:
    """A GPU simulated in CPU memory, for tests of everything that a GPU's streams change: its tensors are CPU
    tensors, its copies are ordered like those of a GPU. See :class:`gemini.chunk.memory.ComputeDevice`."""

    name = "simulated GPU"
    torch_device = torch.device("cpu")
    has_own_memory = True
    cuts_chunks = False
    align_bytes = TENSOR_ALIGN_BYTES  # its tensors are CPU tensors

    def __init__(
        self,
        total_bytes: int = 2**30,
        *,
        block_bytes: int = 2**16,
        max_delay_us: int = 0,
        seed: int = 0,
        processors: tuple[int, ...] = (),
    ) -> None:
        """Create one with ``total_bytes`` in blocks; its copies begin up to ``max_delay_us`` late."""
        self._gpu = _C.Gpu.simulated(total_bytes, block_bytes, max_delay_us, seed, list(processors))
        self.block_bytes = self._gpu.granularity
        self.processors = processors

    def free_bytes(self) -> int:
        return self._gpu.memory()[0]

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> AnyMemory:
        return GpuMemory(self._gpu, _nothing, _nothing, sizes, budgets, file, spare_bytes=spare_bytes)

    def monitor(self) -> MemoryMonitor:
        return FakeMonitor()  # operators use CPU memory

    def model_data_bytes(self) -> int:
        return 0

    def settle(self) -> None:
        """Do nothing: operators use CPU memory."""

    def is_capturing(self) -> bool:
        """Return False: operators run on the CPU."""
        return False

    def synchronize(self) -> None:
        """Do nothing: operators are finished when they return."""

    def release_cache(self) -> None:
        """Do nothing: operators use CPU memory."""


def _nothing() -> None:
    """Do nothing: operators run on the calling thread, in CPU memory, so there is no stream to follow and no
    cache to release."""
