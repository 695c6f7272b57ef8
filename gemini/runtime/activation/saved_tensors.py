"""Tensors that autograd saved: their chunks, the plan that keeps some of them on DEVICE, the objects that
autograd holds instead of them, and tensors over windows that may outlive their operator."""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from gemini import _C
from gemini.chunk import Chunk, ChunkManager
from gemini.chunk.chunk import ChunkKind, ChunkSpec, whole_blocks
from gemini.errors import OutOfBudgetError
from gemini.memstats.trace import BACKWARD
from gemini.runtime.gate.gate import Gate
from gemini.system.config import format_bytes, format_enough

_SIZES_PER_OCTAVE = 8  # at most an eighth of a chunk is padding


class ChunkPool:
    """Chunks of a few sizes, created when needed and then reused.

    Among free chunks of a size the oldest is taken: steps with the same sequence of takes and returns use the
    same chunks for the same tensors, as a trace requires.
    """

    def __init__(self, chunks: ChunkManager) -> None:
        self._chunks = chunks
        self._block_bytes = chunks.device.block_bytes
        self._free: dict[int, list[int]] = {}  # size in bytes -> heap of chunk ids
        self._tensors: dict[int, int] = {}  # chunk id -> its tensor in the table

    def take(self, nbytes: int) -> tuple[Chunk, int]:
        """Return a chunk of at least ``nbytes`` without content, and its tensor in the table.

        Raises:
            OutOfBudgetError: it is larger than DEVICE, or the DISK file has no place for another chunk.
        """
        size = rounded_bytes(nbytes, self._block_bytes)
        device_bytes = self._chunks.budgets.device_bytes
        if size > device_bytes:
            raise OutOfBudgetError(
                f"an activation of {format_bytes(nbytes)}, which activation_offload stores in one piece of "
                f"{format_bytes(size)}, is more than DEVICE with {format_bytes(device_bytes)} holds; raise "
                "device_bytes above that, lower the batch size, or put torch.utils.checkpoint around the "
                "layers that save it; the chunk size does not matter here"
            )
        if not self._free.get(size) and not self._chunks.has_place(size):
            size = self._larger(size)
        free = self._free.setdefault(size, [])
        if free:
            chunk = self._chunks.chunks[heapq.heappop(free)]
            return chunk, self._tensors[chunk.id]
        chunk = self._chunks.add_chunk(ChunkSpec(ChunkKind.ACTIVATION, size, torch.uint8, self._block_bytes))
        tensor = self._tensors[chunk.id] = self._chunks.add_tensor(chunk)
        return chunk, tensor

    def _larger(self, nbytes: int) -> int:
        """Return the smallest size above ``nbytes`` with a free chunk. After batches of many shapes the file
        may have no place for more chunks."""
        larger = [size for size, free in self._free.items() if free and size > nbytes]
        if not larger:
            raise OutOfBudgetError(
                f"DISK has no space for another activation chunk of {format_bytes(nbytes)}; raise "
                "disk_bytes or use fewer different batch shapes"
            )
        return min(larger)

    def give_back(self, chunk: Chunk) -> None:
        """Free the content of ``chunk``, which no operator uses; it may be taken again."""
        self._chunks.free((self._tensors[chunk.id],))
        heapq.heappush(self._free[chunk.spec.nbytes], chunk.id)


def too_large_error(chunks: ChunkManager, chunk: Chunk) -> OutOfBudgetError | None:
    """Return the error for an activation that does not fit on DEVICE beside the pinned chunks; None if it
    fits."""
    pinned = [other for other in chunks.chunks if other is not chunk and chunks.table.pins(other.id)]
    pinned_bytes = sum(other.spec.nbytes for other in pinned)
    saved_bytes = sum(other.spec.nbytes for other in pinned if other.spec.kind is ChunkKind.ACTIVATION)
    needed_bytes, device_bytes = pinned_bytes + chunk.spec.nbytes, chunks.budgets.device_bytes
    if needed_bytes <= device_bytes:
        return None
    return OutOfBudgetError(
        f"an activation in one piece of {format_bytes(chunk.spec.nbytes)}, which activation_offload stores, "
        f"does not fit DEVICE with {format_bytes(device_bytes)} beside what the operator that saves or uses "
        f"it has pinned: {format_bytes(pinned_bytes - saved_bytes)} of model data and "
        f"{format_bytes(saved_bytes)} of other activations; raise device_bytes to "
        f"{format_enough(needed_bytes)} or more, lower the batch size, or put torch.utils.checkpoint around "
        "the layers that save it"
    )


def rounded_bytes(nbytes: int, block_bytes: int) -> int:
    """Return the chunk size for ``nbytes``: whole blocks, with ``_SIZES_PER_OCTAVE`` sizes per doubling."""
    octave: int = 1 << max(nbytes - 1, 1).bit_length() - 1
    return whole_blocks(nbytes, max(block_bytes, octave // _SIZES_PER_OCTAVE))


class Fate:
    """Whether saved bytes stayed on DEVICE until backward asked for them."""

    __slots__ = ("stayed",)

    def __init__(self) -> None:
        self.stayed: bool | None = None  # None: not used yet

    def settle(self, table: _C.ChunkTable, chunk: int) -> None:
        """Record at the first use whether the bytes never left DEVICE: then no other tier has a copy."""
        if self.stayed is None:
            self.stayed = table.is_dirty(chunk) and not table.in_flight(chunk)


class KeepPlan:
    """Decides which of a step's saved tensors stay where they are, by their place in the order.

    In the first steps all go into chunks, and OPT decides which chunks leave DEVICE. The other tensors were
    copied needlessly: from then on they stay. A tensor of another size than expected at its place goes into a
    chunk.
    """

    def __init__(self) -> None:
        self._fates: list[tuple[int, Fate]] = []  # (bytes, fate) of tensors that this step put into chunks
        self._plan: list[tuple[int, bool]] | None = None  # (bytes, stays)
        self._next = 0

    @property
    def decided(self) -> bool:
        """Whether the plan is made."""
        return self._plan is not None

    @property
    def keeps_all(self) -> bool:
        """Whether all expected tensors stay where they are."""
        return self._plan is not None and all(stays for _, stays in self._plan)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the expected tensors that stay where they are; those that share memory count each."""
        return sum(nbytes for nbytes, stays in self._plan or () if stays)

    def next_stays(self, nbytes: int) -> bool:
        """Say whether the tensor that is saved next stays where it is."""
        place = self._next
        self._next += 1
        if self._plan is None or place >= len(self._plan):
            return False
        return self._plan[place] == (nbytes, True)

    def note(self, nbytes: int, fate: Fate) -> None:
        """Record the fate of the tensor that the last :meth:`next_stays` was about."""
        if self._plan is None:
            self._fates.append((nbytes, fate))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of a forward pass. Tensors of a pass that raised do not count, because it will be
        repeated."""
        fates, place = len(self._fates), self._next
        try:
            yield
        except BaseException:
            del self._fates[fates:]
            self._next = place
            raise

    def end_step(self, *, on_trace: bool) -> bool:
        """Begin the next step; make the plan if this step followed a recorded order. Returns whether that
        changes which tensors go into chunks."""
        fates, self._fates = self._fates, []
        self._next = 0
        if self.decided or not on_trace or not fates:
            return False
        self._plan = [(nbytes, bool(fate.stayed)) for nbytes, fate in fates]
        return any(stays for _, stays in self._plan)


class Tenant(Protocol):
    """The memory that a lease pins. ``tensors``: its ids in the chunk table. ``fate``: records whether it
    stayed on DEVICE. Its memory is ``chunk`` and, if it is cut, the chunks that follow, one per tensor."""

    @property
    def tensors(self) -> tuple[int, ...]: ...

    @property
    def chunk(self) -> Chunk: ...

    @property
    def fate(self) -> Fate | None: ...


def pin(gate: Gate, tenant: Tenant) -> None:
    """Fetch the tenant's chunk and pin it.

    Raises:
        OutOfBudgetError, IoError, EvictedAccessError: as a PreOp; nothing is pinned.
    """
    try:
        gate.pre_op(tenant.tensors)
    except OutOfBudgetError as error:
        is_saved = tenant.chunk.spec.kind is ChunkKind.ACTIVATION
        too_large = too_large_error(gate.chunks, tenant.chunk) if is_saved else None
        if too_large is None:
            raise
        raise too_large from error


class Leases:
    """Pins that last as long as a storage lives.

    The receiver of a saved tensor may keep it: checkpointing runs a whole block again from it, and a graph of
    second derivatives saves it again. So the pin belongs to the storage, not to the node: it ends with the
    last tensor over the storage. This may happen at any moment and on any thread; then it is only recorded,
    and the next PreOp unpins.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._living: dict[int, tuple[weakref.ref[object], Tenant]] = {}  # by the id of the reference
        self.ended: deque[tuple[int, ...]] = deque()  # tensors to unpin, once per entry
        gate.settle_before(self.ended, self.settle)
        gate.repins.append(self.repin)

    def storage(self, tenant: Tenant) -> torch.UntypedStorage:
        """Fetch the tenant's chunk and return its window as a storage; the chunk is pinned while the storage
        lives.

        Raises:
            OutOfBudgetError, IoError, EvictedAccessError: as a PreOp; nothing is pinned.
        """
        gate = self._gate
        if torch._C._current_graph_task_id() != -1:
            gate.enter(BACKWARD)
        if tenant.fate is not None:
            tenant.fate.settle(gate.chunks.table, tenant.chunk.id)
        pin(gate, tenant)
        try:
            storage, life = gate.chunks.lend(tenant.chunk, len(tenant.tensors))
            lease = weakref.ref(life, self._end)
            self._living[id(lease)] = lease, tenant
        except BaseException:
            gate.post_op(tenant.tensors, False)
            raise
        return storage

    def settle(self) -> None:
        """Unpin tensors with storages that no longer exist."""
        while self.ended:
            self._gate.chunks.release(self.ended.popleft(), dirty=False)

    def repin(self) -> None:
        """Pin live tensors again after everything was unpinned; nothing may have been evicted meanwhile."""
        self.ended.clear()
        living = [tensor for _, tenant in list(self._living.values()) for tensor in tenant.tensors]
        if living:
            self._gate.chunks.acquire(living, traced=False)

    def _end(self, lease: weakref.ref[object]) -> None:
        _, tenant = self._living.pop(id(lease))
        self.ended.append(tenant.tensors)


class Saved(Protocol):
    """Replaces a saved tensor until backward asks for it."""

    def restore(self) -> torch.Tensor:
        """Return the tensor; may be called again.

        Raises:
            RuntimeError: the tensor was written since it was saved.
        """
        ...


class Version:
    """The version of a tensor when it was saved, and its current one. Keeps none of the tensor's memory
    alive, unless it is nested or sparse."""

    __slots__ = ("_witness", "then")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An alias shares the version counter, and still does after its data is replaced.
        self._witness = tensor.detach()
        self.then = self._witness._version
        if tensor.layout is torch.strided and not tensor.is_nested:  # other layouts do not allow it
            self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @property
    def is_current(self) -> bool:
        """Whether the tensor was not written since."""
        return self._witness._version == self.then

    def require_current(self, shape: tuple[int, ...]) -> None:
        """Raise RuntimeError if the tensor was written since. Autograd does not check versions of tensors
        saved through hooks."""
        now = self._witness._version
        if now != self.then:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a {self._witness.dtype} tensor of shape {list(shape)} is at version {now}; "
                f"expected version {self.then} instead. Write to a clone of what an operator saved"
            )


class KeptTensor:
    """A saved tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # with its graph it would be a reference cycle
        self._version = Version(tensor)

    def restore(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError if it was written since."""
        nested = self._tensor.is_nested  # a nested tensor has many shapes
        self._version.require_current(() if nested else tuple(self._tensor.shape))
        return self._tensor


class Stored:
    """A saved tensor with its bytes in a chunk, ``offset`` bytes behind the beginning of its window."""

    __slots__ = ("_dtype", "_leases", "_offset", "_shape", "_stride", "_tenant", "_version")

    def __init__(self, tensor: torch.Tensor, leases: Leases, tenant: Tenant, offset: int) -> None:
        self._dtype, self._shape, self._stride = tensor.dtype, tuple(tensor.shape), tensor.stride()
        self._version = Version(tensor)
        self._leases = leases
        self._tenant = tenant
        self._offset = offset // tensor.itemsize

    def restore(self) -> torch.Tensor:
        """Fetch the bytes to DEVICE, where they stay while the result is in use.

        Raises:
            RuntimeError: the tensor was written since.
            OutOfBudgetError, IoError, EvictedAccessError: as a PreOp.
        """
        self._version.require_current(self._shape)
        storage = self._leases.storage(self._tenant)
        tensor = torch.empty(0, dtype=self._dtype, device=storage.device)
        tensor.set_(storage, self._offset, self._shape, self._stride)
        return tensor


@dataclass(frozen=True)
class Weight:
    """The memory of a managed tensor as a tenant; its parameter keeps it."""

    chunk: Chunk
    tensors: tuple[int, ...]
    fate: None = None
