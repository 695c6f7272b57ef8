"""ActivationOffload: moves tensors that autograd saves in forward into chunks, and returns them for backward.

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
from gemini.runtime.activation.saved_tensors import (
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

# A smaller tensor stays where it is: its PreOps would cost more than it saves. So does one that takes less
# than half of a GPU's block.
SMALLEST_BYTES = 64 * 1024

# A tensor with gaps may store up to this multiple of its span, for others that lie in the gaps.
_MOST_FOR_WHOLE = 1.25

# 1 / share of DEVICE that a step may leave in the allocator's heap before it is trimmed: memory that is free
# but, between smaller pieces in use, still resident. Trimming costs page faults.
SLACK_SHARE = 8

_ORDINARY = frozenset((torch.Tensor, nn.Parameter))


class Extent(NamedTuple):
    """Bytes ``[start, stop)`` of a storage. ``whole``: all of them belong to one tensor that shares a version
    with its views; otherwise bytes in gaps may belong to another tensor."""

    start: int
    stop: int
    whole: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        """Return the bytes to store for a tensor. A tensor with gaps includes the gaps, because they are
        often saved as well: query, key and value of one projection span almost all of it each, and share one
        copy."""
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
        """Return the address of the first byte in the storage of ``tensor``."""
        return int(tensor.data_ptr()) - int(tensor.storage_offset()) * tensor.itemsize + self.start


class Parcel:
    """An extent of a storage in a chunk of its own; the chunk is freed when the last reference to this is
    gone."""

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
        """``pad``: offset of the bytes from the beginning of the chunk."""
        self._gone = gone
        self.chunk, self.tensors = place[0], (place[1],)
        self.start, self.stop, self._whole = extent
        self.pad = pad
        base = _base(saved)
        self._base = base._cdata
        self._takes_id = torch._C._WeakTensorRef(base)  # type: ignore[attr-defined]  # base may be gone later
        # Keeps the id from being reused by another storage.
        self._source = StorageWeakRef(saved.untyped_storage())
        self._version = Version(saved)
        self.fate = Fate()

    def __del__(self) -> None:
        # May run at any moment on any thread: the next PreOp returns the chunk.
        self._gone.append(self.chunk)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the offset in the chunk of a tensor of the same storage; None if the chunk does not contain
        all of it, or if it was or may have been written since."""
        start = int(tensor.storage_offset()) * tensor.itemsize - self.start
        stop = start + span_bytes(tensor)
        inside = start >= 0 and stop <= self.stop - self.start
        if not inside or not self._version.is_current:
            return None
        if _base(tensor)._cdata != self._base:
            # Autograd saves an alias of an operator's result, which shares its version counter. Parts of a
            # tensor with counters of their own (unsafe_chunk) were not written yet if their count is 0.
            version, is_all = tensor._version, start == 0 and stop == self.stop - self.start
            if self._whole or version != self._version.then or not (version == 0 or is_all):
                return None
        return self.pad + start

    def fill(self, saved: torch.Tensor) -> None:
        """Copy the bytes from the original storage into the window, which is mapped."""
        nbytes = self.stop - self.start
        source = torch.empty(0, dtype=torch.uint8, device=saved.device)
        source.set_(saved.untyped_storage(), self.start, (nbytes,), (1,))
        self.chunk.tensor[self.pad : self.pad + nbytes].copy_(source)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


class ActivationOffload:
    """Puts tensors that autograd saves during forward passes into chunks of one model."""

    def __init__(self, gate: Gate, keep: KeepPlan | None, recompute: Recompute | None = None) -> None:
        """``keep`` decides which tensors stay where they are; None: none. ``recompute`` chooses blocks that
        save nothing; None: none."""
        self._gate = gate
        self._keep = keep
        self.recompute = recompute
        self._pool = ChunkPool(gate.chunks)
        self._leases = Leases(gate)
        self._gone: deque[Chunk] = deque()  # of parcels without references
        gate.settle_before(self._gone, self.settle)
        self._parcels: dict[int, list[weakref.ref[Parcel]]] = {}  # by the id of their storage
        self._buffers: set[int] = set()  # ids of storages of buffers, which are never offloaded
        device = gate.chunks.device
        self._device = device.torch_device
        self._smallest_bytes = max(SMALLEST_BYTES, device.block_bytes // 2 if device.has_own_memory else 0)
        self._trims = not device.has_own_memory  # torch's allocator manages GPU memory by blocks
        self._slack_bytes = gate.chunks.budgets.device_bytes // SLACK_SHARE
        self._untrimmed_bytes = 0  # bytes freed into the heap since it was last trimmed

    @contextmanager
    def saving(self, module: nn.Module) -> Iterator[None]:
        """Put tensors that autograd saves within the block, a forward pass of ``module``, into chunks."""
        self._parcels = {key: refs for key, refs in self._parcels.items() if any(ref() for ref in refs)}
        self._buffers = {buffer.untyped_storage()._cdata for buffer in module.buffers()}
        kept = self._keep.forward() if self._keep is not None else nullcontext()
        recomputed = self.recompute.forward(self._pack) if self.recompute is not None else nullcontext()
        with kept, recomputed, saved_tensors_hooks(self._pack, _restore):
            yield
        self._trim()

    @property
    def waiting(self) -> bool:
        """Whether :meth:`settle` has work."""
        return bool(self._gone or self._leases.ended)

    def settle(self) -> None:
        """Unpin chunks that backward no longer uses, and free parcels without references."""
        self._leases.settle()
        while self._gone:
            self._leases.settle()  # the pin of a parcel ends before the parcel is gone
            self._pool.give_back(self._gone[0])
            self._leave_behind(self._gone.popleft())

    def end_step(self, *, on_trace: bool) -> bool:
        """Begin the next step; ``on_trace``: the step that ends followed a recorded order. Returns whether
        the next step must be recorded."""
        anew = self.recompute is not None and self.recompute.end_step(on_trace=on_trace)
        # If blocks will be recomputed, the next step saves less, so this step's record of kept tensors does
        # not apply.
        waits = anew or (self.recompute is not None and not self.recompute.decided)
        keeps = self._keep is not None and self._keep.end_step(on_trace=on_trace and not waits)
        return anew or keeps

    @property
    def kept_bytes(self) -> int:
        """Bytes of the saved tensors of a step that stay where they are although they could be stored."""
        return self._keep.kept_bytes if self._keep is not None else 0

    @property
    def keeps_all(self) -> bool:
        """Whether all saved tensors of a step stay where they are."""
        return self._keep is not None and self._keep.keeps_all

    # -- called by autograd --------------------------------------------------------------------------

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
        """Save a managed tensor for a custom function; no hook brackets the backward of such a function."""
        ref = tensor._ref  # type: ignore[attr-defined]
        # A quantized wrapper without memory of its own.
        is_wrapper = getattr(tensor, "_twin", None) is not None
        if ref.manager is not self._gate or is_wrapper:
            return KeptTensor(tensor)
        chunks = self._gate.chunks
        chunk = chunks.chunks[chunks.table.chunk_of(ref.tensors[0])]
        owner = Weight(chunk, ref.tensors)
        return Stored(tensor, self._leases, owner, tensor.data_ptr() - chunk.window.address)

    def _worth_storing(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is ordinary memory that the graph keeps, and large enough."""
        return (
            type(tensor) in _ORDINARY
            and tensor.device == self._device
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
            and span_bytes(tensor) >= self._smallest_bytes
            and (address := tensor.data_ptr()) != 0  # 0 if its storage was resized to nothing, for example
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
        # Keep the alignment of the original memory: kernels may sum in another order if it differs.
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
        """Count memory that goes into the heap and stays resident: in forward the stored tensor's memory, in
        backward that of gradients of about the same size."""
        self._untrimmed_bytes += chunk.spec.nbytes
        if self._untrimmed_bytes > self._slack_bytes:
            self._trim()

    def _trim(self) -> None:
        """Return free heap memory to the system."""
        if self._untrimmed_bytes and self._trims:
            _C.malloc_trim()
        self._untrimmed_bytes = 0


def _restore(saved: Saved) -> torch.Tensor:
    return saved.restore()
