"""Chunks in CPU memory: DEVICE is CPU memory under a budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini import _C
from gemini.chunk.layout import TENSOR_ALIGN_BYTES
from gemini.chunk.memory import AnyMemory, GrowingSpace, StoredChunk, TierBudgets
from gemini.memstats.monitor import MemoryMonitor, ProcessMonitor
from gemini.offload.async_file import AsyncFile
from gemini.system.device import free_memory_bytes


class CpuMemory:
    """Windows with movable pages, and copies by threads. See :class:`gemini.chunk.memory.ChunkMemory`."""

    def __init__(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, spare_bytes: int = 0
    ) -> None:
        total = max(sum(sizes) + spare_bytes, 1)  # a model may have no parameters
        self._space = _C.WindowSpace(total)
        self._host_space = _C.WindowSpace(total) if budgets.host_bytes else None
        self._later = GrowingSpace(_C.WindowSpace)
        self._host_later = GrowingSpace(_C.WindowSpace)
        self._arena = _C.Arena(budgets.device_bytes)
        self._host_arena = _C.Arena(max(budgets.host_bytes, 1))
        self.engine = _C.TransferEngine(file.native if file is not None else None)

    def windows(
        self, nbytes: int, *, later: bool = False, floats: bool = False, follows: bool = False
    ) -> tuple[_C.Window, _C.Window | None]:
        host_window = None
        if self._host_space is not None:
            host_window = (self._host_later if later else self._host_space).create(nbytes)
        if later:
            return self._later.create(nbytes), host_window
        return self._space.create(nbytes, behind_last=follows), host_window

    def tensor(self, window: _C.Window, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return torch.frombuffer(window, dtype=dtype, count=numel)

    def joined(self, first: _C.Window, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return torch.frombuffer(self._space.span(first, numel * dtype.itemsize), dtype=dtype, count=numel)

    def lend(self, window: _C.Window, nbytes: int) -> tuple[torch.UntypedStorage, object]:
        view = memoryview(window if nbytes <= window.nbytes else self._space.span(window, nbytes))
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage(), view

    def follow(self) -> None:
        """Do nothing: operators run on the calling thread."""

    def map(self, window: _C.Window, *, zero: bool) -> None:
        self._arena.map(window, zero=zero)

    def unmap(self, window: _C.Window, *, park: bool) -> None:
        if park:
            self._arena.leave(window)
        else:
            self._arena.unmap(window, park=False)

    def settle(self) -> None:
        self._arena.settle()

    def map_host(self, place: _C.Window) -> None:
        self._host_arena.map(place, zero=True)

    def wait_host(self, place: _C.Window) -> None:
        """Do nothing: a reported transfer has ended."""

    def unmap_host(self, place: _C.Window) -> None:
        self._host_arena.unmap(place)

    def fetch(self, window: _C.Window, place: _C.Window, nbytes: int) -> int:
        self._arena.map(window)
        return int(self.engine.copy(window.address, place.address, nbytes, _C.Link.H2D))

    def evict(self, place: _C.Window, window: _C.Window, nbytes: int) -> int:
        self._host_arena.map(place)
        return int(self.engine.copy(place.address, window.address, nbytes, _C.Link.D2H))

    def load(self, window: _C.Window, nbytes: int, offset: int) -> int:
        self._arena.map(window)
        return int(self.engine.read(window.address, nbytes, offset, _C.Link.DISK_READ))

    def load_stored(self, window: _C.Window, stored: StoredChunk) -> int:
        self._arena.map(window)
        return int(self.engine.read_source(stored.files, stored.at(window.address)))

    def spill(self, source: _C.Window, nbytes: int, offset: int) -> int:
        return int(self.engine.write(source.address, nbytes, offset, _C.Link.DISK_WRITE))

    def poll(self) -> list[_C.TransferResult]:
        return self.engine.poll()

    def wait_any(self, timeout_s: float) -> bool:
        return self.engine.wait_any(timeout_s)

    @property
    def num_in_flight(self) -> int:
        return self.engine.num_in_flight

    def link_stats(self) -> dict[str, dict[str, float]]:
        return self.engine.stats()

    def stall_seconds(self) -> float:
        return 0.0  # operators begin after their chunks are there

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
        return self._space.heal()

    def close(
        self, windows: Sequence[tuple[_C.Window, _C.Window | None]], exposed: Sequence[_C.Window]
    ) -> None:
        self.engine.close()  # afterwards the fault guard handles accesses to exposed windows
        for window, place in windows:
            if window.mapped:
                self._arena.unmap(window, park=False)
            if place is not None and place.mapped:
                self._host_arena.unmap(place, park=False)
        self._arena.trim(0)
        self._host_arena.trim(0)


class CpuDevice:
    """The CPU. See :class:`gemini.chunk.memory.ComputeDevice`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    block_bytes = 4096
    align_bytes = TENSOR_ALIGN_BYTES
    has_own_memory = False
    cuts_chunks = True
    processors = ()

    def free_bytes(self) -> int:
        return free_memory_bytes()

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> AnyMemory:
        return CpuMemory(sizes, budgets, file, spare_bytes)

    def monitor(self) -> MemoryMonitor:
        return ProcessMonitor()

    def model_data_bytes(self) -> int:
        return _C.arena_process_bytes()

    def settle(self) -> None:
        """Do nothing: the memory of a step is measured from its own beginning."""

    def is_capturing(self) -> bool:
        """Return False: the CPU has no graph capture."""
        return False

    def synchronize(self) -> None:
        """Do nothing: operators are finished when they return."""

    def release_cache(self) -> None:
        """Do nothing: torch caches no CPU memory."""


CPU = CpuDevice()
