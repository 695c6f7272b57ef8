"""Memory of managed tensors that is asked for by its address: what torch does not see used.

Writers of files, kernels of Triton and C++, numpy arrays read it past every operator. So whoever asks for
an address is given memory that holds the tensor until the next operator of the model: the chunk's window,
pinned, or, once half of DEVICE is taken so, a copy. What was written there by then is written to the tensor.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini import _C
from gemini.offload.mapped import MappedTensors
from gemini.runtime.gate import Gate
from gemini.runtime.living import parameter_at
from gemini.runtime.saved import span_bytes

# Pinned are at most two chunks, or 1 / so much of DEVICE.
_DEVICE_SHARE = 2


@dataclass(frozen=True)
class _Use:
    """An address that was given out: of ``tensor`` itself, ``pinned`` or there for good, or of ``copy``."""

    tensor: torch.Tensor
    copy: torch.Tensor | None
    pinned: bool
    checksum: int | None

    @property
    def memory(self) -> torch.Tensor:
        """A plain tensor of that memory."""
        return self.tensor.as_subclass(torch.Tensor) if self.copy is None else self.copy


class RawAccess:
    """The addresses of one model's tensors that were given out since its last operator."""

    def __init__(self, gate: Gate) -> None:
        self.uses: list[_Use] = []  # the same object for good: every PreOp looks at it
        self._gate = gate

    def plain(self, tensor: Any) -> torch.Tensor:
        """Return a plain tensor whose memory holds ``tensor`` until the next operator.

        Raises:
            OutOfBudgetError, IoError, StateError, EvictedAccessError: as a PreOp.
        """
        gate = self._gate
        if gate.pending and not self.uses:
            gate.run_pending()  # which takes more room than uses may leave
        gate.snapshot.before_change(tensor._ref.tensors)
        uses = self._take()  # which a PreOp would end
        try:
            with PlainTensors():
                for use in uses:
                    if use.tensor.is_set_to(tensor):
                        return use.memory.detach()
            copy, pinned = None, False
            if not self._has_room(uses, tensor):
                copy = self._copy(tensor)
            elif not gate.resident:
                gate.pre_op(tensor._ref.tensors)
                pinned = True
            with PlainTensors():
                use = _Use(tensor, copy, pinned, None)
                uses.append(replace(use, checksum=_checksum(use.memory)))
                return use.memory.detach()
        finally:
            self.uses += uses

    def settle(self) -> None:
        """End all uses. Raises as a PreOp, where a copy was written to and cannot be written back."""
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
                with torch.no_grad():
                    use.tensor.copy_(use.copy)

    def _take(self) -> list[_Use]:
        """Return what is used, and forget it."""
        uses = self.uses.copy()
        self.uses.clear()
        return uses

    def _has_room(self, uses: list[_Use], tensor: Any) -> bool:
        """Say whether ``tensor`` is to be used where it is: its window is pinned, or stays."""
        gate, chunks = self._gate, self._gate.chunks
        if gate.resident or chunks.device.has_own_memory or not tensor.is_contiguous():
            return True
        tensors = [*tensor._ref.tensors]
        for use in uses:
            if use.pinned:
                tensors.extend(use.tensor._ref.tensors)  # type: ignore[attr-defined]
        pinned = {chunks.table.chunk_of(each) for each in tensors}
        taken = sum(chunks.chunks[chunk].spec.nbytes for chunk in pinned)
        return len(pinned) <= 2 or taken <= chunks.budgets.device_bytes // _DEVICE_SHARE

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy: in a file where there is a DISK tier, of which the kernel keeps what it can."""
        with torch.no_grad():
            copied = torch.clone(tensor)
        directory = self._gate.chunks.budgets.disk_dir
        return copied if directory is None else MappedTensors(directory, copied.nbytes, 1).copy(copied)


def _checksum(tensor: torch.Tensor) -> int | None:
    """Return what tells a write to the memory of ``tensor``; None: nothing does, it is a GPU's."""
    if tensor.device.type != "cpu":
        return None
    return _C.crc32c(tensor.data_ptr(), span_bytes(tensor)) if tensor.numel() else 0


def data_ptr(tensor: Any) -> int:
    """``weight.data_ptr()``: the address of memory that holds the weight until the next operator."""
    return _plain(tensor).data_ptr()


def untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """``weight.untyped_storage()``: that of the parameter alone, as if it were no part of a chunk, for those
    who ask which tensors share one. It brings nothing to DEVICE. Of a GPU's memory it is the chunk's."""
    with PlainTensors():
        param = parameter_at(tensor.data_ptr()) if tensor.device.type == "cpu" else None
        if param is None:
            return tensor.untyped_storage()
        span = (ctypes.c_char * span_bytes(param)).from_address(param.data_ptr())
        alone: torch.Tensor = torch.frombuffer(span, dtype=torch.uint8)
        return alone.untyped_storage()


def numpy(tensor: Any, *, force: bool = False) -> Any:
    """``weight.numpy()``: an array that holds the weight until the next operator."""
    with PlainTensors():
        if tensor.requires_grad and not force:
            return tensor.numpy()  # torch's refusal
    return _plain(tensor).numpy(force=force)


def array(tensor: Any, dtype: Any = None) -> Any:
    """``np.asarray(weight)``."""
    found = numpy(tensor)
    return found if dtype is None else found.astype(dtype, copy=False)


def _plain(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor._ref.manager.raw.plain(tensor)
    return found
