"""ActivationOffload: what autograd saves in forward becomes chunks, given back for backward.

See docs/notes/activations.md.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gemini import _C
from gemini.chunk import Chunk
from gemini.runtime.activation.recompute import Recompute
from gemini.runtime.activation.saved import (
    ChunkPool,
    Fate,
    KeepPlan,
    KeptTensor,
    Leases,
    Saved,
    Stored,
    Version,
    Weight,
    pin,
)
from gemini.runtime.gate.gate import Gate
from gemini.runtime.gate.guards import span_bytes
from gemini.runtime.intercept.tensors import MANAGED

# Below this a tensor stays where it is: its PreOps cost more than it is worth. So does one that takes less
# than half of a GPU's block.
SMALLEST_BYTES = 64 * 1024

# How many times what a tensor with gaps spans may be stored for others that lie in them.
_MOST_FOR_WHOLE = 1.25

# The share of DEVICE that a step may leave behind in the allocator's heap before it is trimmed: memory that
# is free but, between smaller pieces in use, still resident. Trimming costs page faults.
_SLACK_SHARE = 8

_ORDINARY = frozenset((torch.Tensor, nn.Parameter))


class Extent(NamedTuple):
    """Bytes ``[start, stop)`` of a storage. ``whole``: all of them are one tensor's, and it and its views
    share a version; else what lies in gaps may be somebody else's."""

    start: int
    stop: int
    whole: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        """Return what to store for a tensor. One with gaps spans what lies in them, often saved as well:
        query, key and value of one projection span almost all of it each, and share one copy of it all."""
        start = int(tensor.storage_offset()) * tensor.itemsize
        own = cls(start, start + span_bytes(tensor))
        base = tensor._base
        has_gaps = tensor.nbytes < own.stop - own.start
        if not has_gaps or base is None or base.layout is not torch.strided or base.is_nested:
            return own
        start = int(base.storage_offset()) * base.itemsize
        whole = cls(start, start + span_bytes(base), whole=True)
        contains = whole.start <= own.start and own.stop <= whole.stop
        is_same = base.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        little_more = whole.stop - whole.start <= _MOST_FOR_WHOLE * (own.stop - own.start)
        return whole if is_same and contains and little_more else own

    def address_in(self, tensor: torch.Tensor) -> int:
        """Return where the first of the bytes is, in the storage of ``tensor``."""
        return int(tensor.data_ptr()) - int(tensor.storage_offset()) * tensor.itemsize + self.start


class Parcel:
    """An extent of a storage in a chunk of its own, for as long as somebody holds this."""

    __slots__ = (
        "__weakref__",
        "_base",
        "_gone",
        "_source",
        "_takes_id",
        "_version",
        "_whole",
        "chunk",
        "fate",
        "pad",
        "start",
        "stop",
        "tensors",
    )

    def __init__(
        self, saved: torch.Tensor, extent: Extent, pad: int, place: tuple[Chunk, int], gone: deque[Chunk]
    ) -> None:
        """``pad``: how far behind the begin of the chunk the bytes begin."""
        self._gone = gone
        self.chunk, self.tensors = place[0], (place[1],)
        self.start, self.stop, self._whole = extent
        self.pad = pad
        base = _base(saved)
        self._base = base._cdata
        self._takes_id = torch._C._WeakTensorRef(base)  # type: ignore[attr-defined]  # which may be gone
        self._source = StorageWeakRef(saved.untyped_storage())  # no other storage gets its id meanwhile
        self._version = Version(saved)
        self.fate = Fate()

    def __del__(self) -> None:
        # At any moment and on any thread: the next PreOp gives the chunk back.
        self._gone.append(self.chunk)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return where a tensor of the same storage begins in the chunk; None: not all of it is there, or
        it was written since, or may have been."""
        start = int(tensor.storage_offset()) * tensor.itemsize - self.start
        stop = start + span_bytes(tensor)
        inside = start >= 0 and stop <= self.stop - self.start
        if not inside or not self._version.is_current:
            return None
        if _base(tensor)._cdata != self._base:
            # What autograd saves of an operator's result is an alias of it, and counts with it. Parts of a
            # tensor that count for themselves (unsafe_chunk) were not written yet where they count 0.
            version, is_all = tensor._version, start == 0 and stop == self.stop - self.start
            if self._whole or version != self._version.then or not (version == 0 or is_all):
                return None
        return self.pad + start

    def fill(self, saved: torch.Tensor) -> None:
        """Copy the bytes from where they are into the window, which is mapped."""
        nbytes = self.stop - self.start
        source = torch.empty(0, dtype=torch.uint8, device=saved.device)
        source.set_(saved.untyped_storage(), self.start, (nbytes,), (1,))
        self.chunk.tensor[self.pad : self.pad + nbytes].copy_(source)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


class ActivationOffload:
    """Puts what autograd saves during forward passes into chunks of one model's gate."""

    def __init__(self, gate: Gate, keep: KeepPlan | None, recompute: Recompute | None = None) -> None:
        """``keep`` decides what stays where it is; None: nothing does. ``recompute``: what is not saved at
        all; None: nothing."""
        self._gate = gate
        self._keep = keep
        self.recompute = recompute
        self._pool = ChunkPool(gate.chunks)
        self._leases = Leases(gate)
        self._gone: deque[Chunk] = deque()  # of parcels that nobody holds any more
        gate.settle_before(self._gone, self.settle)
        self._parcels: dict[int, list[weakref.ref[Parcel]]] = {}  # by the id of their storage
        self._buffers: set[int] = set()  # ids of storages that stay anyway
        device = gate.chunks.device
        self._device = device.torch_device
        self._smallest_bytes = max(SMALLEST_BYTES, device.block_bytes // 2 if device.has_own_memory else 0)
        self._trims = not device.has_own_memory  # torch gives a GPU's memory away by blocks
        self._slack_bytes = gate.chunks.budgets.device_bytes // _SLACK_SHARE
        self._untrimmed_bytes = 0  # stored or used up since the allocator returned what it had free

    @contextmanager
    def saving(self, module: nn.Module) -> Iterator[None]:
        """Put what autograd saves within the block, a forward pass of ``module``, into chunks."""
        self._parcels = {key: refs for key, refs in self._parcels.items() if any(ref() for ref in refs)}
        self._buffers = {buffer.untyped_storage()._cdata for buffer in module.buffers()}
        kept = self._keep.forward() if self._keep is not None else nullcontext()
        recomputed = self.recompute.forward(self._pack) if self.recompute is not None else nullcontext()
        with kept, recomputed, saved_tensors_hooks(self._pack, _restore):
            yield
        self._trim()

    @property
    def waiting(self) -> bool:
        """Whether there is something to settle."""
        return bool(self._gone or self._leases.ended)

    def settle(self) -> None:
        """Unpin what backward is done with, and free what nobody can ask for any more."""
        self._leases.settle()
        while self._gone:
            self._leases.settle()  # the pin of a parcel ended before it was gone
            self._pool.give_back(self._gone[0])
            self._leave_behind(self._gone.popleft())

    def end_step(self, *, on_trace: bool) -> bool:
        """Begin the next step; ``on_trace``: the one that ends followed a recorded order. Return whether
        the next is to be recorded."""
        anew = self.recompute is not None and self.recompute.end_step(on_trace=on_trace)
        # What stayed in a step that saved more says nothing of the next one.
        waits = anew or (self.recompute is not None and not self.recompute.decided)
        keeps = self._keep is not None and self._keep.end_step(on_trace=on_trace and not waits)
        return anew or keeps

    @property
    def keeps_all(self) -> bool:
        """Whether all that a step saves stays where it is."""
        return self._keep is not None and self._keep.keeps_all

    # -- what autograd calls ---------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Saved:
        called_by_operator = not torch._C._is_torch_function_enabled()
        with PlainTensors():
            if type(tensor) in MANAGED and not called_by_operator:
                return self._weight(tensor)
            if not self._worth_storing(tensor):
                return KeptTensor(tensor)
            nbytes = span_bytes(tensor)
            if self._keep is not None and (self._gate.resident or self._keep.next_stays(nbytes)):
                return KeptTensor(tensor)
            parcel, offset = self._find(tensor) or self._store(tensor)
            if self._keep is not None:
                self._keep.note(nbytes, parcel.fate)
            return Stored(tensor, self._leases, parcel, offset)

    def _weight(self, tensor: torch.Tensor) -> Saved:
        """Save a managed tensor for a custom function, whose backward no hook brackets."""
        ref = tensor._ref  # type: ignore[attr-defined]
        is_wrapper = getattr(tensor, "_twin", None) is not None  # of quantized values, with no memory
        if ref.manager is not self._gate or is_wrapper:
            return KeptTensor(tensor)
        chunks = self._gate.chunks
        chunk = chunks.chunks[chunks.table.chunk_of(ref.tensors[0])]
        owner = Weight(chunk, ref.tensors)
        return Stored(tensor, self._leases, owner, tensor.data_ptr() - chunk.window.address)

    def _worth_storing(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is ordinary memory that the graph keeps, and enough of it."""
        return (
            type(tensor) in _ORDINARY
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
            and span_bytes(tensor) >= self._smallest_bytes
            and (address := tensor.data_ptr()) != 0  # one that was resized away, say
            and address % tensor.itemsize == 0
            and address not in self._gate.windows
            and tensor.untyped_storage()._cdata not in self._buffers
        )

    def _find(self, tensor: torch.Tensor) -> tuple[Parcel, int] | None:
        for ref in self._parcels.get(tensor.untyped_storage()._cdata, ()):
            parcel = ref()
            offset = parcel.offset_of(tensor) if parcel is not None else None
            if parcel is not None and offset is not None:
                return parcel, offset
        return None

    def _store(self, tensor: torch.Tensor) -> tuple[Parcel, int]:
        """Copy a tensor into a chunk.

        Raises:
            OutOfBudgetError, IoError, EvictedAccessError: as a PreOp; nothing is stored.
        """
        gate = self._gate
        if self.waiting:
            self.settle()
        extent = Extent.of(tensor)
        # Aligned as they were in their own memory: kernels may sum in another order where that differs.
        pad = extent.address_in(tensor) % gate.chunks.device.align_bytes
        parcel = Parcel(tensor, extent, pad, self._pool.take(extent.stop - extent.start + pad), self._gone)
        pin(gate, parcel)
        try:
            since = time.perf_counter()
            parcel.fill(tensor)
        finally:
            gate.post_op(parcel.tensors, dirty=True)
        self._parcels.setdefault(tensor.untyped_storage()._cdata, []).append(weakref.ref(parcel))
        self._leave_behind(parcel.chunk)
        if self.recompute is not None:
            self.recompute.note_copy(parcel.chunk.spec.nbytes, time.perf_counter() - since)
        offset = parcel.offset_of(tensor)
        assert offset is not None, "a tensor lies in its own extent"
        return parcel, offset

    def _leave_behind(self, chunk: Chunk) -> None:
        """Count what goes into the heap and stays resident: in forward the memory of the tensor that was
        stored in ``chunk``, in backward that of the gradients made with it, which are about as large."""
        self._untrimmed_bytes += chunk.spec.nbytes
        if self._untrimmed_bytes > self._slack_bytes:
            self._trim()

    def _trim(self) -> None:
        """Return to the system what tensors have left behind."""
        if self._untrimmed_bytes and self._trims:
            _C.malloc_trim()
        self._untrimmed_bytes = 0


def _restore(saved: Saved) -> torch.Tensor:
    return saved.restore()
