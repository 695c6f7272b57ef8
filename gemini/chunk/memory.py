"""What chunks ask of the computing device: memory on DEVICE and HOST within budgets, addresses for it, and
transfers between the tiers.

Two implementations: :mod:`gemini.chunk.cpu_memory` and :mod:`gemini.chunk.gpu_memory`. Nothing above knows
which it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from gemini import _C
from gemini.errors import GeminiError
from gemini.memstats import MemoryMonitor
from gemini.offload.async_file import AsyncFile

_FIRST_BYTES = 256 * 2**20
# Addresses for what comes into a model later, at least; more of them where they are those of host memory,
# which cost nothing: a model may be built layer by layer.
_LEAST_SPARE_BYTES = 2**24
_HOST_SPARE_BYTES = 2**36
_CHUNKS_AHEAD = 16


class Window(Protocol):
    """A chunk's addresses on DEVICE, with or without memory behind them. Only those of
    a window that floats ever change."""

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
    """A chunk that lies in files of the user. ``parts``: the index of a file, where the part begins there and
    in the chunk, and its bytes."""

    files: _C.SourceFiles
    parts: tuple[tuple[int, int, int, int], ...]

    def at(self, address: int) -> list[tuple[int, int, int, int]]:
        """Return what is to be read for a chunk at ``address``."""
        return [(file, offset, address + begin, nbytes) for file, offset, begin, nbytes in self.parts]


class ChunkMemory(Protocol[W, H]):
    """The memory of one model's chunks and what moves their bytes, over windows ``W`` and HOST places ``H``
    of its own. For the thread that trains."""

    def windows(
        self, nbytes: int, *, later: bool = False, floats: bool = False, follows: bool = False
    ) -> tuple[W, H | None]:
        """Return the window and, where there is a HOST tier, the place of a chunk; ``later``: one that the
        sizes it was opened with do not count; ``floats``: its addresses may be others each time that it is
        given memory, where that is faster; ``follows``: they begin where those of the one before end, of
        devices that cut chunks."""

    def tensor(self, window: W, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the flat tensor over a window, on the computing device. It keeps the addresses."""

    def joined(self, first: W, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the flat tensor over a window and those that follow it, of devices that cut chunks."""

    def lend(self, window: W, nbytes: int) -> tuple[torch.UntypedStorage, object]:
        """Return a storage over ``nbytes`` from a window on, and an object that lives as long as the storage
        does, to refer to weakly. Of a chunk that is not cut, ``nbytes`` are those of its window."""

    def follow(self) -> None:
        """Take note of where the caller's operators run from now on."""

    def map(self, window: W, *, zero: bool) -> None:
        """Give a window memory for operators, zeros or anything. Raises OutOfBudgetError."""

    def unmap(self, window: W, *, park: bool) -> None:
        """Take a window's memory; ``park`` keeps it for the next one."""

    def map_host(self, place: H) -> None:
        """Give a place on HOST memory of zeros, for the CPU. Raises OutOfBudgetError."""

    def wait_host(self, place: H) -> None:
        """Wait until the CPU may read and write a place on HOST: of its transfers, which were reported, none
        uses it any more."""

    def unmap_host(self, place: H) -> None:
        """Take the memory of a place on HOST."""

    def fetch(self, window: W, place: H, nbytes: int) -> int:
        """Give the window memory, start copying to it; return the ticket."""

    def evict(self, place: H, window: W, nbytes: int) -> int:
        """Give the place memory, start copying to it; return the ticket."""

    def load(self, window: W, nbytes: int, offset: int) -> int:
        """Give the window memory, start reading into it; return the ticket."""

    def load_stored(self, window: W, stored: StoredChunk) -> int:
        """Give the window memory, start reading files of the user into it; return the ticket."""

    def spill(self, source: W | H, nbytes: int, offset: int) -> int:
        """Start writing to the file; return the ticket."""

    def poll(self) -> list[_C.TransferResult]:
        """Return what operators may count on, or failed, since the last call."""

    def wait_any(self, timeout_s: float) -> bool:
        """Wait until :meth:`poll` would return something or nothing is in flight; return the former."""

    @property
    def num_in_flight(self) -> int:
        """Transfers not reported yet."""

    def link_stats(self) -> dict[str, dict[str, float]]:
        """Return per link: bytes, seconds busy, seconds shared, transfers."""

    def stall_seconds(self) -> float:
        """Return for how long operators waited for transfers while this thread went on."""

    def trim(self, parked_limit_bytes: int) -> None:
        """Give parked DEVICE memory back until at most this much is left."""

    @property
    def mapped_bytes(self) -> int:
        """DEVICE bytes under windows."""

    @property
    def parked_bytes(self) -> int:
        """DEVICE bytes kept for the next window."""

    def address_range(self) -> tuple[int, int]:
        """Return the first address of the windows and the first behind them."""

    def find(self, address: int) -> int:
        """Return the index of the chunk whose window holds ``address``, or -1."""

    def heal(self) -> int:
        """Take back what stray accesses left in windows without memory; return how many had some."""

    def close(self, windows: Sequence[tuple[W, H | None]], exposed: Sequence[W]) -> None:
        """End the transfers and return all memory, also what is under ``windows``; tensors over those
        ``exposed`` may be used once more, by mistake."""


# Whatever its windows are.
AnyMemory: TypeAlias = ChunkMemory[Any, Any]


class ComputeDevice(Protocol):
    """Where operators run and DEVICE memory is."""

    @property
    def name(self) -> str:
        """What it is called in a log."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors over windows are."""

    @property
    def block_bytes(self) -> int:
        """What chunk sizes are multiples of."""

    @property
    def align_bytes(self) -> int:
        """What addresses of tensors in a chunk are multiples of: as those of tensors that have memory of
        their own, as far as kernels look, which may choose by it how they add up."""

    @property
    def has_own_memory(self) -> bool:
        """Whether DEVICE is other memory than HOST. There torch keeps what operators have given up: the most
        that they took counts at every moment."""

    @property
    def cuts_chunks(self) -> bool:
        """Whether a tensor may lie in several chunks."""

    @property
    def processors(self) -> tuple[int, ...]:
        """Numbers of the CPU's processors near it; empty: not known, or all alike."""

    def free_bytes(self) -> int:
        """Return the DEVICE bytes that could still be taken."""

    def open(
        self, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None, *, spare_bytes: int = 0
    ) -> AnyMemory:
        """Reserve addresses for chunks of ``sizes`` in bytes, and for others of ``spare_bytes`` together; no
        memory yet."""

    def monitor(self) -> MemoryMonitor:
        """Return what measures DEVICE memory; the caller closes it."""

    def model_data_bytes(self) -> int:
        """Return what of the memory that the monitor measures is chunks', of all models."""

    def settle(self) -> None:
        """Say that a model is in its chunks: memory that torch has now is not that of its steps."""

    def is_capturing(self) -> bool:
        """Say whether operators are recorded, to be repeated later, and not carried out."""

    def synchronize(self) -> None:
        """Wait until the operators so far are done: to time them."""

    def release_cache(self) -> None:
        """Have torch give back the DEVICE memory that it keeps for later."""


def open_with_spare(
    device: ComputeDevice, sizes: Sequence[int], budgets: TierBudgets, file: AsyncFile | None
) -> tuple[AnyMemory, int]:
    """Return memory with addresses for chunks of ``sizes`` and for others, and how much that is: as much
    again, or nothing, where a limit on addresses (``ulimit -v``) does not leave more."""
    spare_bytes = max(sum(sizes), _LEAST_SPARE_BYTES)
    more = () if device.has_own_memory else (max(spare_bytes, _HOST_SPARE_BYTES),)
    for wanted in (*more, spare_bytes):
        with suppress(GeminiError):
            return device.open(sizes, budgets, file, spare_bytes=wanted), wanted
    return device.open(sizes, budgets, file), 0


@dataclass(frozen=True)
class TierBudgets:
    """Hard byte budgets; 0 means that the tier is absent. ``disk_dir`` is where DISK keeps its unlinked file,
    ``spare_disk_bytes`` its places for chunks that come later: they take no space before they are used, nor
    does any without ``reserve_disk``. ``reads_files``: chunks lie in files of the user, which are DISK for
    as long as nobody writes to these chunks."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: str | None = None
    spare_disk_bytes: int = 0
    reserve_disk: bool = True
    reads_files: bool = False


class Space(Protocol[Cut]):
    """A reservation of addresses, cut into windows."""

    def create(self, nbytes: int) -> Cut: ...


class GrowingSpace(Generic[Cut]):
    """Window spaces, each twice as large as the one before: a few, however many windows they hold."""

    def __init__(self, reserve: Callable[[int], Space[Cut]]) -> None:
        """``reserve`` makes one of so many bytes."""
        self._reserve = reserve
        self._spaces: list[Space[Cut]] = []  # keeps their windows
        self._size_bytes = 0  # of the last one, and what is left of it
        self._left_bytes = 0

    def create(self, nbytes: int) -> Cut:
        """Return a new window of ``nbytes``, whole blocks of the device, without memory."""
        if nbytes > self._left_bytes:
            self._size_bytes = max(2 * self._size_bytes, _FIRST_BYTES, _CHUNKS_AHEAD * nbytes)
            self._spaces.append(self._reserve(self._size_bytes))
            self._left_bytes = self._size_bytes
        self._left_bytes -= nbytes
        return self._spaces[-1].create(nbytes)
