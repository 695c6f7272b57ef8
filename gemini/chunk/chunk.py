"""One chunk: a fixed-size piece of model data with a window of stable addresses; chunks that are still to
come; what an optimizer keeps of parameters, as the chunks of its states know it; and chunks as the CPU uses
them where they lie on HOST.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from gemini.chunk.memory import HostPlace, Window
from gemini.errors import ConfigError, StateError
from gemini.memstats.trace import CHUNK_KINDS
from gemini.system.config import format_bytes

TensorIds = tuple[int, ...] | list[int]  # of the chunk table
# Elements of a tensor, counted from its start, that may share a value of a state: the scale of int8 moments.
# A layout sees to it that none of these blocks lies on both sides of a cut (CUT_NUMEL).
BLOCK_NUMEL = 256


class ChunkKind(Enum):
    """What a chunk holds."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    STATE = "state"
    ACTIVATION = "activation"
    SHARD = "shard"
    GRAD_SHARD = "grad_shard"
    EXCHANGE = "exchange"
    ROOM = "room"
    KV = "kv"

    @property
    def starts_at_zero(self) -> bool:
        """Whether a chunk of this kind must read as zeros before its first write."""
        return self is ChunkKind.STATE


@dataclass(frozen=True)
class ChunkSpec:
    """What to build a chunk from; ``numel * itemsize`` is a multiple of 4 KiB. It takes whole blocks of the
    computing device's memory. ``state``: of a STATE, its key among those of its piece. ``follows``: its
    addresses begin where those of the chunk made before it end."""

    kind: ChunkKind
    numel: int
    dtype: torch.dtype
    block_bytes: int = 4096
    state: str = ""
    follows: bool = False

    @property
    def floats(self) -> bool:
        """Whether nothing keeps its addresses between uses: updates ask for them each time."""
        return self.kind in (ChunkKind.MASTER, ChunkKind.STATE)

    @property
    def label(self) -> str:
        """What it is called in traces and reports, where states of usual names have those."""
        return self.state if self.state in CHUNK_KINDS else self.kind.value

    @property
    def nbytes(self) -> int:
        """Bytes on every tier."""
        return whole_blocks(self.numel * self.dtype.itemsize, self.block_bytes)


def whole_blocks(nbytes: int, block_bytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``block_bytes``."""
    return -(-nbytes // block_bytes) * block_bytes


class Chunk:
    """A chunk and its addresses. The window lives as long as any tensor that views it.

    Its memory may be read or written only while the chunk is pinned on DEVICE; elsewhere the address range
    holds nothing.
    """

    __slots__ = ("_address", "_tensor", "_view", "disk_offset", "host_place", "id", "spec", "window")

    def __init__(
        self,
        chunk_id: int,
        spec: ChunkSpec,
        window: Window,
        host_place: HostPlace | None,
        disk_offset: int,
        view: Callable[[], torch.Tensor],
    ) -> None:
        """``view`` returns the flat view of the window, where it is now."""
        self.id = chunk_id
        self.spec = spec
        self.window = window
        self.host_place = host_place
        self.disk_offset = disk_offset
        self._view = view
        self._tensor, self._address = view(), window.address

    @property
    def tensor(self) -> torch.Tensor:
        """The flat view of the window, shape ``(numel,)``; another one when a chunk that floats has moved."""
        if self.window.address != self._address:
            self._tensor, self._address = self._view(), self.window.address
        return self._tensor

    @property
    def host(self) -> HostPlace:
        """The place of the HOST copy. Raises StateError where there is no HOST tier."""
        if self.host_place is None:
            raise StateError(f"chunk {self.id} has no place on HOST: the tier is absent")
        return self.host_place


class CutChunk:
    """Chunks that follow each other, used as the one that they are parts of: one tensor over all of them.
    Only parts on DEVICE have memory."""

    __slots__ = ("parts", "spec", "tensor")

    def __init__(self, parts: Sequence[Chunk], tensor: torch.Tensor) -> None:
        """``tensor``: flat, over the windows of all ``parts``."""
        self.parts = tuple(parts)
        self.spec = replace(parts[0].spec, numel=sum(part.spec.numel for part in parts))
        self.tensor = tensor

    @property
    def id(self) -> int:
        """The first part's."""
        return self.parts[0].id

    def at(self, element: int) -> Chunk:
        """Return the part that has this element."""
        return self.parts[element // self.parts[0].spec.numel]


class Expected:
    """Bytes of addresses and of places in the DISK file, by the kind of chunk; and addresses to spare, for
    chunks that nobody foresaw."""

    def __init__(self, specs: Sequence[ChunkSpec], spare_bytes: int) -> None:
        self._bytes: Counter[ChunkKind] = Counter()
        self._spare_bytes = spare_bytes
        self._add(specs)

    def refuse(self, nbytes: int) -> None:
        """Raise ConfigError where there are no addresses for further chunks of ``nbytes`` together."""
        if nbytes > self._spare_bytes:
            raise ConfigError(
                f"what came into the model needs addresses for {format_bytes(nbytes)}, and of those reserved "
                f"beside the model's at wrapping {format_bytes(self._spare_bytes)} are left; wrap the model "
                "anew, with all that it has now"
            )

    def add(self, specs: Sequence[ChunkSpec]) -> None:
        """Expect further chunks, for which there are addresses."""
        self._spare_bytes -= sum(spec.nbytes for spec in specs)
        self._add(specs)

    def bytes_of(self, specs: Sequence[ChunkSpec]) -> int:
        """Return what is reserved for ``specs``, if they come now."""
        wanted: Counter[ChunkKind] = Counter()
        for spec in specs:
            wanted[spec.kind] += spec.nbytes
        return (wanted & self._bytes).total()

    def take(self, spec: ChunkSpec) -> bool:
        """Say whether a chunk that comes now was expected, and expect it no longer."""
        if self._bytes[spec.kind] < spec.nbytes:
            return False
        self._bytes[spec.kind] -= spec.nbytes
        return True

    def _add(self, specs: Sequence[ChunkSpec]) -> None:
        for spec in specs:
            self._bytes[spec.kind] += spec.nbytes


def num_blocks(numel: int) -> int:
    """Return the number of blocks of a tensor of ``numel`` elements."""
    return -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True)
class StateSpec:
    """One array that is kept of a parameter. ``name``: as its optimizer calls it. ``dtype``: of the value of
    every element, or of every block of 256."""

    name: str
    dtype: torch.dtype = torch.float32
    per_block: bool = False

    @property
    def key(self) -> str:
        """Its name among the states of a piece, where optimizers of one model may keep the same in different
        types one after the other."""
        return self.name if self.dtype == torch.float32 else f"{self.name}_{self.type_name}"

    @property
    def type_name(self) -> str:
        """The type, as torch calls it."""
        return str(self.dtype).removeprefix("torch.")

    def count(self, numel: int) -> int:
        """Return how many values there are for ``numel`` elements."""
        return num_blocks(numel) if self.per_block else numel

    def nbytes(self, numel: int) -> int:
        """Return their bytes for ``numel`` elements."""
        return self.count(numel) * self.dtype.itemsize


def host_tensor(chunk: Chunk) -> torch.Tensor:
    """Return the flat tensor over a chunk that is pinned on HOST, shape ``(numel,)``, to be used once
    :meth:`ChunkManager.wait_host` has returned. Its memory is another one the next time: it is valid while
    the chunk is pinned."""
    memory = (ctypes.c_char * chunk.spec.nbytes).from_address(chunk.host.address)
    return torch.frombuffer(memory, dtype=chunk.spec.dtype, count=chunk.spec.numel)
