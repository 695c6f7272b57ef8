"""Interfaces of the computing device: memory on DEVICE and HOST within budgets, its addresses, and transfers
between tiers.

Two implementations: :mod:`gemini.chunk.cpu_memory` and :mod:`gemini.chunk.gpu_memory`. Code above does not
know which one it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from gemini import _C
from gemini.errors import GeminiError
from gemini.memstats.monitor import MemoryMonitor
from gemini.offload.async_file import AsyncFile

_FIRST_BYTES = 256 * 2**20
# The least addresses to reserve for parameters that are added later. CPU addresses cost nothing, so there are
# more of them: a model may be built layer by layer.
_LEAST_SPARE_BYTES = 2**24
_HOST_SPARE_BYTES = 2**36
_CHUNKS_AHEAD = 16


class Window(Protocol):
    """A chunk's addresses on DEVICE, with or without memory behind them. Only windows that float change
    them."""

    @property
    def address(self) -> int: ...

    @property
    def mapped(self) -> bool: ...


class HostPlace(Protocol):
    """A chunk's place on HOST, with or without memory."""

    @property
    def address(self) -> int: ...

    @property
    def mapped(self) -> bool: ...


W = TypeVar("W", bound=Window)
H = TypeVar("H", bound=HostPlace)
Cut = TypeVar("Cut", covariant=True)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk in files of the user. ``parts``: for each part the index of the file, the offset in the file,
    the offset in the chunk, and the bytes."""

    files: _C.SourceFiles
    parts: tuple[tuple[int, int, int, int], ...]

    def at(self, address: int) -> list[tuple[int, int, int, int]]:
        """Return the reads for a chunk at ``address``."""
        return [(file, offset, address + begin, nbytes) for file, offset, begin, nbytes in self.parts]


class ChunkMemory(Protocol[W, H]):
    """The memory of one model's chunks, and the transfers between tiers, over windows ``W`` and HOST places
    ``H``. For the thread that trains."""

    def windows(
        self, nbytes: int, *, later: bool = False, floats: bool = False, follows: bool = False
    ) -> tuple[W, H | None]:
        """Return the window of a chunk and, if there is a HOST tier, its place there.

        Args:
            later: the sizes with which the memory was opened do not include this chunk.
            floats: its addresses may change each time it gets memory, if that is faster.
            follows: its addresses begin where those of the previous chunk end, on devices that cut chunks.
        """

    def tensor(self, window: W, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the flat tensor over a window, on the computing device. It keeps the addresses reserved."""

    def joined(self, first: W, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the flat tensor over a window and those that follow it, on devices that cut chunks."""

    def lend(self, window: W, nbytes: int) -> tuple[torch.UntypedStorage, object]:
        """Return a storage over ``nbytes`` that begin with a window, and an object for weak references that
        lives as long as the storage. For a chunk that is not cut, ``nbytes`` is the size of its window."""

    def follow(self) -> None:
        """Order transfers after the caller's operators: note the stream on which they run from now on."""

    def map(self, window: W, *, zero: bool) -> None:
        """Give a window memory for operators, filled with zeros if ``zero``, else with any content. Raises
        OutOfBudgetError."""

    def unmap(self, window: W, *, park: bool) -> None:
        """Take a window's memory; ``park``: keep it for the next window. Until :meth:`settle` it may stay in
        place, so that it moves only once if the next window needs it at once."""

    def settle(self) -> None:
        """Take the parked memory that stayed in place: from now on, accesses to its windows are noticed."""

    def map_host(self, place: H) -> None:
        """Give a HOST place zeroed memory, for the CPU. Raises OutOfBudgetError."""

    def wait_host(self, place: H) -> None:
        """Wait until the CPU may read and write a HOST place: until none of its reported transfers uses it
        any longer."""

    def unmap_host(self, place: H) -> None:
        """Take the memory of a HOST place."""

    def fetch(self, window: W, place: H, nbytes: int) -> int:
        """Give the window memory and start to copy from HOST; return the ticket."""

    def evict(self, place: H, window: W, nbytes: int) -> int:
        """Give the HOST place memory and start to copy to it; return the ticket."""

    def load(self, window: W, nbytes: int, offset: int) -> int:
        """Give the window memory and start to read the file into it; return the ticket."""

    def load_stored(self, window: W, stored: StoredChunk) -> int:
        """Give the window memory and start to read files of the user into it; return the ticket."""

    def spill(self, source: W | H, nbytes: int, offset: int) -> int:
        """Start to write to the file; return the ticket."""

    def poll(self) -> list[_C.TransferResult]:
        """Return the transfers since the last call that failed, or are complete for operators."""

    def wait_any(self, timeout_s: float) -> bool:
        """Wait until :meth:`poll` would return a transfer (True) or nothing is in flight (False), at most
        ``timeout_s``."""

    @property
    def num_in_flight(self) -> int:
        """Number of transfers that are not reported yet."""

    def link_stats(self) -> dict[str, dict[str, float]]:
        """Return bytes, busy seconds, shared seconds and number of transfers per link."""

    def stall_seconds(self) -> float:
        """Return how long operators waited for transfers while this thread continued."""

    def trim(self, parked_limit_bytes: int) -> None:
        """Return parked DEVICE memory until at most ``parked_limit_bytes`` are left."""

    @property
    def mapped_bytes(self) -> int:
        """DEVICE bytes under windows."""

    @property
    def parked_bytes(self) -> int:
        """DEVICE bytes kept for later windows."""

    def address_range(self) -> tuple[int, int]:
        """Return the first address of the windows and the first one after them."""

    def find(self, address: int) -> int:
        """Return the index of the window that contains ``address``, or -1."""

    def heal(self) -> int:
        """Remove the pages that stray accesses left in windows without memory; return how many windows had
        some."""

    def close(self, windows: Sequence[tuple[W, H | None]], exposed: Sequence[W]) -> None:
        """End the transfers and return all memory, including that of ``windows``. Tensors over ``exposed``
        windows may still be used by mistake afterwards."""


# A ChunkMemory with any kind of windows.
AnyMemory: TypeAlias = ChunkMemory[Any, Any]


class ComputeDevice(Protocol):
    """The device that runs operators and has the DEVICE memory."""

    @property
    def name(self) -> str:
        """Its name in logs."""

    @property
    def torch_device(self) -> torch.device:
        """The device of tensors over windows."""

    @property
    def block_bytes(self) -> int:
        """Chunk sizes are multiples of this."""

    @property
    def align_bytes(self) -> int:
        """Alignment of tensors in a chunk. Equal to that of tensors in memory of their own, as far as kernels
        check it: they may choose the order of summation by it."""

    @property
    def has_own_memory(self) -> bool:
        """Whether DEVICE is other memory than HOST. Then torch caches freed operator memory, so its peak
        counts at every moment."""

    @property
    def cuts_chunks(self) -> bool:
        """Whether a tensor may lie in several chunks."""

    @property
    def processors(self) -> tuple[int, ...]:
        """Numbers of the CPU's processors near it; empty if unknown or all alike."""

    def free_bytes(self) -> int:
        """Return the free DEVICE bytes."""

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> AnyMemory:
        """Reserve addresses for chunks of ``sizes`` bytes, and ``spare_bytes`` for others; takes no memory
        yet."""

    def monitor(self) -> MemoryMonitor:
        """Return a monitor of DEVICE memory; the caller closes it."""

    def model_data_bytes(self) -> int:
        """Return how much of the memory that the monitor measures belongs to chunks, of all models."""

    def settle(self) -> None:
        """Note that a model is in its chunks: memory that torch holds now does not belong to its steps."""

    def is_capturing(self) -> bool:
        """Say whether operators are being recorded for replay instead of run."""

    def synchronize(self) -> None:
        """Wait until all operators so far are finished, to time them."""

    def release_cache(self) -> None:
        """Release the DEVICE memory that torch caches."""


def open_with_spare(
    device: ComputeDevice, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None
) -> tuple[AnyMemory, int]:
    """Open memory for chunks of ``sizes``, with as many spare addresses as possible; return it and the spare
    bytes. If a limit on addresses (``ulimit -v``) prevents more, the spare equals the chunks, or is 0."""
    spare_bytes = max(sum(sizes), _LEAST_SPARE_BYTES)
    more = () if device.has_own_memory else (max(spare_bytes, _HOST_SPARE_BYTES),)
    for wanted in (*more, spare_bytes):
        with suppress(GeminiError):
            return device.open(sizes, budgets, file, spare_bytes=wanted), wanted
    return device.open(sizes, budgets, file), 0


@dataclass(frozen=True)
class TierBudgets:
    """Hard byte budgets; 0 means that the tier is absent. ``disk_dir``: the directory of DISK's unlinked
    file. ``spare_disk_bytes``: places in it for chunks that are added later; they take no space until used.
    Without ``reserve_disk`` this holds for all places. ``reads_files``: chunks lie in files of the user,
    which are DISK as long as these chunks are not written."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: str | None = None
    spare_disk_bytes: int = 0
    reserve_disk: bool = True
    reads_files: bool = False


class Space(Protocol[Cut]):
    """A reserved address range that is cut into windows."""

    def create(self, nbytes: int) -> Cut: ...


class GrowingSpace(Generic[Cut]):
    """Window spaces, each twice as large as the one before, so that few spaces hold many windows."""

    def __init__(self, reserve: Callable[[int], Space[Cut]]) -> None:
        """``reserve`` creates a space of a given size in bytes."""
        self._reserve = reserve
        self._spaces: list[Space[Cut]] = []  # keeps their windows valid
        self._size_bytes = 0  # size of the last space, and its unused rest
        self._left_bytes = 0

    def create(self, nbytes: int) -> Cut:
        """Return a new window of ``nbytes``, a multiple of the device's blocks, without memory."""
        if nbytes > self._left_bytes:
            self._size_bytes = max(2 * self._size_bytes, _FIRST_BYTES, _CHUNKS_AHEAD * nbytes)
            self._spaces.append(self._reserve(self._size_bytes))
            self._left_bytes = self._size_bytes
        self._left_bytes -= nbytes
        return self._spaces[-1].create(nbytes)
