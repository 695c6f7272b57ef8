"""Managed memory that user code reads or writes by its address, which torch does not see.

Writers of files, kernels of Triton and C++, and numpy arrays bypass operators. So a request for an address
returns memory that holds the tensor until the next operator of the model: the chunk's window, pinned; or a
copy, once half of DEVICE is pinned this way. Values written there by then are written to the tensor.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini import _C
from gemini.offload.mapped_tensors import MappedTensors
from gemini.runtime.gate.gate import Gate, parameter_at
from gemini.runtime.gate.guards import span_bytes

# At most two chunks are pinned, or 1 / _DEVICE_SHARE of DEVICE.
_DEVICE_SHARE = 2


@dataclass(frozen=True)
class _Use:
    """An address that was handed out: of ``tensor`` itself, ``pinned`` or resident, or of ``copy``."""

    tensor: torch.Tensor
    copy: torch.Tensor | None
    pinned: bool
    checksum: int | None

    @property
    def memory(self) -> torch.Tensor:
        """A plain tensor over that memory."""
        return self.tensor.as_subclass(torch.Tensor) if self.copy is None else self.copy


class RawAccess:
    """The addresses of one model's tensors that were handed out since its last operator."""

    def __init__(self, gate: Gate) -> None:
        self.uses: list[_Use] = gate.raw_uses
        self._gate = gate

    def plain(self, tensor: Any) -> torch.Tensor:
        """Return a plain tensor with the values of ``tensor``, valid until the next operator. Parts of one
        parameter are parts of one memory here, too.

        Raises:
            OutOfBudgetError, IoError, StateError, EvictedAccessError: as a PreOp.
        """
        gate = self._gate
        with gate.threads.turn():
            if gate.pending and not self.uses:
                gate.run_pending()  # first: it may need more DEVICE than pinned uses would leave
            gate.snapshot.before_change(tensor._ref.tensors)
            whole = self._whole(tensor)
            use = self._use_of(whole) or self._begin(whole)
            with PlainTensors():
                return _part(tensor, whole, use.copy)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the copy with the address that :meth:`plain` has handed out for ``tensor`` since the last
        operator; None if it handed out none, or that of the window."""
        use = self._use_of(self._whole(tensor))
        return None if use is None else use.copy

    def _whole(self, tensor: Any) -> Any:
        """Return the parameter that ``tensor`` is a part of, or ``tensor`` itself if there is none (a
        gradient)."""
        with PlainTensors():
            param = self._gate.parameters.at(tensor.data_ptr()) if tensor.numel() else None
        return tensor if param is None or param.dtype != tensor.dtype else param

    def _use_of(self, whole: torch.Tensor) -> _Use | None:
        with PlainTensors():
            return next((use for use in self.uses if use.tensor.is_set_to(whole)), None)

    def _begin(self, whole: Any) -> _Use:
        """Pin ``whole`` or make a copy of it. Raises as :meth:`plain`."""
        uses = self._take()  # the PreOp below would end them
        try:
            copy, pinned = None, False
            if not self._has_room(uses, whole):
                copy = self._copy(whole)
            elif not self._gate.resident:
                self._gate.pre_op(whole._ref.tensors)
                pinned = True
            with PlainTensors():
                use = _Use(whole, copy, pinned, None)
                uses.append(replace(use, checksum=_checksum(use.memory)))
            return uses[-1]
        finally:
            self.uses += uses

    def settle(self) -> None:
        """End all uses and write changed copies back. Raises as a PreOp if a copy cannot be written back."""
        gate = self._gate
        for use in self._take():
            with PlainTensors():
                written = use.checksum != _checksum(use.memory)
            tensors: tuple[int, ...] = use.tensor._ref.tensors  # type: ignore[attr-defined]
            if written and use.copy is None:
                gate.written.note(tensors)
            if use.pinned:
                gate.post_op(tensors, written)
            elif written and use.copy is not None:
                gate.written.note(tensors)
                # Not by an intercepted copy_(): the PreOp that calls this runs with torch functions disabled.
                with gate.operator(tensors, tensors), torch.no_grad(), PlainTensors():
                    use.tensor.as_subclass(torch.Tensor).data.copy_(use.copy)

    def _take(self) -> list[_Use]:
        """Return the current uses and clear the list."""
        uses = self.uses.copy()
        self.uses.clear()
        return uses

    def _has_room(self, uses: list[_Use], tensor: Any) -> bool:
        """Say whether ``tensor`` can be used in its window, pinned or resident, rather than as a copy."""
        gate, chunks = self._gate, self._gate.chunks
        has_gaps = span_bytes(tensor) != tensor.nbytes
        if gate.resident or chunks.device.has_own_memory or has_gaps:
            return True
        tensors = [*tensor._ref.tensors]
        for use in uses:
            if use.pinned:
                tensors.extend(use.tensor._ref.tensors)  # type: ignore[attr-defined]
        pinned = {chunks.table.chunk_of(each) for each in tensors}
        taken = sum(chunks.chunks[chunk].spec.nbytes for chunk in pinned)
        return len(pinned) <= 2 or taken <= chunks.budgets.device_bytes // _DEVICE_SHARE

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy with the same layout; with a DISK tier it is mapped from a file, which the kernel
        caches as memory allows."""
        with torch.no_grad():
            copied = torch.clone(tensor)
        directory = self._gate.chunks.budgets.disk_dir
        if directory is None:
            return copied
        flat = MappedTensors(directory, copied.nbytes, 1).copy(copied.as_strided((copied.numel(),), (1,)))
        return flat.as_strided(copied.shape, copied.stride())


def _part(tensor: torch.Tensor, whole: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    """Return ``tensor``, a part of ``whole``, as a plain tensor; inside ``copy`` if there is one."""
    if copy is None:
        return tensor.as_subclass(torch.Tensor).detach()
    offset = (tensor.data_ptr() - whole.data_ptr()) // whole.itemsize
    return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset() + offset)


def _checksum(tensor: torch.Tensor) -> int | None:
    """Return a checksum that detects writes to the memory of ``tensor``; None for GPU memory, where writes
    are not detected."""
    if tensor.device.type != "cpu":
        return None
    return _C.crc32c(tensor.data_ptr(), span_bytes(tensor)) if tensor.numel() else 0


def data_ptr(tensor: Any) -> int:
    """Implement ``weight.data_ptr()``: the address of memory that holds the weight until the next
    operator."""
    return _plain(tensor).data_ptr()


def untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Implement ``weight.untyped_storage()``: a storage of the parameter alone, as if it were not part of a
    chunk, for code that checks which tensors share a storage. It fetches nothing. For GPU memory it is the
    chunk's storage.

    If :func:`data_ptr` has handed out the address of a copy, it is the copy's storage.
    """
    with PlainTensors():
        param: Any = parameter_at(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        if param is None:
            return tensor.untyped_storage()
        copy: torch.Tensor | None = param._ref.manager.raw.copy_of(tensor)
        if copy is not None:
            return copy.untyped_storage()
        span = (ctypes.c_char * span_bytes(param)).from_address(param.data_ptr())
        alone: torch.Tensor = torch.frombuffer(span, dtype=torch.uint8)
        return alone.untyped_storage()


def numpy(tensor: Any, *, force: bool = False) -> Any:
    """Implement ``weight.numpy()``: an array that holds the weight until the next operator."""
    with PlainTensors():
        if tensor.requires_grad and not force:
            return tensor.numpy()  # torch's refusal
    return _plain(tensor).numpy(force=force)


def array(tensor: Any, dtype: Any = None) -> Any:
    """Implement ``np.asarray(weight)``."""
    found = numpy(tensor)
    return found if dtype is None else found.astype(dtype, copy=False)


def dlpack(tensor: Any, **options: Any) -> Any:
    """Implement ``weight.__dlpack__()``: memory that holds the weight until the next operator."""
    with PlainTensors():
        if tensor.requires_grad:
            return tensor.__dlpack__(**options)  # torch's refusal
    return _plain(tensor).__dlpack__(**options)


def _plain(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor._ref.manager.raw.plain(tensor)
    return found
