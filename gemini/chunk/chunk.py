"""Chunk: a fixed-size piece of model data with a window of stable addresses.

Also: reservations for chunks that are added later, the specification of optimizer states, and tensors over
chunks on HOST for the CPU.
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

TensorIds = tuple[int, ...] | list[int]  # tensor ids of the chunk table
# Consecutive elements of a tensor that may share one value of a state, like the scale of int8 moments. A
# layout never places a cut (CUT_NUMEL) inside such a block.
BLOCK_NUMEL = 256


class ChunkKind(Enum):
    """The kind of a chunk's content."""

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
    """The specification of a chunk; ``numel * itemsize`` is a multiple of 4 KiB. It takes whole blocks of the
    computing device's memory. ``state``: for a STATE chunk, its key among the states of its piece.
    ``follows``: its addresses begin where those of the previously created chunk end."""

    kind: ChunkKind
    numel: int
    dtype: torch.dtype
    block_bytes: int = 4096
    state: str = ""
    follows: bool = False

    @property
    def floats(self) -> bool:
        """Whether its addresses may change between uses: only updates use it, and they ask for the address
        each time."""
        return self.kind in (ChunkKind.MASTER, ChunkKind.STATE)

    @property
    def label(self) -> str:
        """Its name in traces and reports; states with usual names have these names."""
        return self.state if self.state in CHUNK_KINDS else self.kind.value

    @property
    def nbytes(self) -> int:
        """Its size in bytes, on every tier."""
        return whole_blocks(self.numel * self.dtype.itemsize, self.block_bytes)


def whole_blocks(nbytes: int, block_bytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``block_bytes``."""
    return -(-nbytes // block_bytes) * block_bytes


class Chunk:
    """A chunk and its addresses. The window lives as long as any tensor that views it.

    Its memory may be read or written only while the chunk is pinned on DEVICE; otherwise the address range
    may have no memory.
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
        """``view`` returns the flat view of the window at its current address."""
        self.id = chunk_id
        self.spec = spec
        self.window = window
        self.host_place = host_place
        self.disk_offset = disk_offset
        self._view = view
        self._tensor, self._address = view(), window.address

    @property
    def tensor(self) -> torch.Tensor:
        """The flat view of the window, shape ``(numel,)``; a new one after a chunk that floats has moved."""
        if self.window.address != self._address:
            self._tensor, self._address = self._view(), self.window.address
        return self._tensor

    @property
    def host(self) -> HostPlace:
        """The place of the HOST copy. Raises StateError if there is no HOST tier."""
        if self.host_place is None:
            raise StateError(f"chunk {self.id} has no place on HOST: the tier is absent")
        return self.host_place


class CutChunk:
    """Consecutive chunks used as one: one tensor over all of them. Only parts on DEVICE have memory."""

    __slots__ = ("parts", "spec", "tensor")

    def __init__(self, parts: Sequence[Chunk], tensor: torch.Tensor) -> None:
        """``tensor``: flat, over the windows of all ``parts``."""
        self.parts = tuple(parts)
        self.spec = replace(parts[0].spec, numel=sum(part.spec.numel for part in parts))
        self.tensor = tensor

    @property
    def id(self) -> int:
        """The id of the first part."""
        return self.parts[0].id

    def at(self, element: int) -> Chunk:
        """Return the part that contains this element."""
        return self.parts[element // self.parts[0].spec.numel]


class Expected:
    """Reserved addresses and places in the DISK file for chunks that are added later: bytes by kind of chunk,
    and spare addresses for unforeseen chunks."""

    def __init__(self, specs: Sequence[ChunkSpec], spare_bytes: int) -> None:
        self._bytes: Counter[ChunkKind] = Counter()
        self._spare_bytes = spare_bytes
        self._add(specs)

    def refuse(self, nbytes: int) -> None:
        """Raise ConfigError if the spare addresses do not suffice for additional chunks of ``nbytes`` in
        total."""
        if nbytes > self._spare_bytes:
            raise ConfigError(
                f"the parameters added to the model need addresses for {format_bytes(nbytes)}, but only "
                f"{format_bytes(self._spare_bytes)} of the spare addresses reserved at wrapping are left; "
                "wrap the model again with its present parameters"
            )

    def add(self, specs: Sequence[ChunkSpec]) -> None:
        """Reserve the additional chunks out of the spare addresses."""
        self._spare_bytes -= sum(spec.nbytes for spec in specs)
        self._add(specs)

    def bytes_of(self, specs: Sequence[ChunkSpec]) -> int:
        """Return the reserved bytes that ``specs`` would use if they were added now."""
        wanted: Counter[ChunkKind] = Counter()
        for spec in specs:
            wanted[spec.kind] += spec.nbytes
        return (wanted & self._bytes).total()

    def take(self, spec: ChunkSpec) -> bool:
        """Consume the reservation for a chunk; say whether there was one."""
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
    """One array that an optimizer keeps of a parameter. ``name``: the optimizer's name for it. ``dtype``: of
    the value per element, or with ``per_block`` per block of 256 elements."""

    name: str
    dtype: torch.dtype = torch.float32
    per_block: bool = False

    @property
    def key(self) -> str:
        """Its name among the states of a piece. It contains the dtype, because successive optimizers of one
        model may keep the same state in different dtypes."""
        return self.name if self.dtype == torch.float32 else f"{self.name}_{self.type_name}"

    @property
    def type_name(self) -> str:
        """The dtype's name in torch."""
        return str(self.dtype).removeprefix("torch.")

    def count(self, numel: int) -> int:
        """Return the number of values for ``numel`` elements."""
        return num_blocks(numel) if self.per_block else numel

    def nbytes(self, numel: int) -> int:
        """Return the bytes for ``numel`` elements."""
        return self.count(numel) * self.dtype.itemsize


def host_tensor(chunk: Chunk) -> torch.Tensor:
    """Return the flat tensor over a chunk that is pinned on HOST, shape ``(numel,)``. Use it only after
    :meth:`ChunkManager.wait_host` has returned, and while the chunk is pinned: the next pin may use other
    memory."""
    memory = (ctypes.c_char * chunk.spec.nbytes).from_address(chunk.host.address)
    return torch.frombuffer(memory, dtype=chunk.spec.dtype, count=chunk.spec.numel)
