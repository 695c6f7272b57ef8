"""NCCL for the stand-in for CUDA: collectives of tensors on the GPU, over gloo.

They begin when the operators' stream has come to where they were called, which the caller waits for. Those of
tensors of the CPU are refused, as by NCCL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "nccl_standin"


class NcclOverGloo(dist.ProcessGroup):
    """A group whose tensors are on the GPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("over gloo", store), rank, size, timeout)

    def getBackendName(self) -> str:
        """Return the name."""
        return NAME

    @property
    def group_name(self) -> str:
        """Return what torch calls the group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._gloo

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce in place."""
        return self._gloo.allreduce(_on_cpu(tensors), opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Have all ranks have the same."""
        return self._gloo.broadcast(_on_cpu(tensors), opts)

    def allgather(self, wholes: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Any:
        """Return the parts of all ranks as tensors of their own."""
        wholes = [_on_cpu(whole) for whole in wholes]
        return self._gloo.allgather(wholes, _on_cpu(parts), opts or dist.AllgatherOptions())

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> Any:
        """Put the parts of all ranks together."""
        return self._gloo._allgather_base(*_on_cpu([whole, part]), opts or dist.AllgatherOptions())

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """Reduce, each rank its part."""
        return self._gloo._reduce_scatter_base(*_on_cpu([part, whole]), opts or dist.ReduceScatterOptions())

    def all_to_all_single(
        self, parts: Tensor, whole: Tensor, sizes_out: list[int], sizes_in: list[int], opts: Any = None
    ) -> Any:
        """Give each rank its part."""
        tensors = _on_cpu([parts, whole])
        return self._gloo.alltoall_base(*tensors, sizes_out, sizes_in, opts or dist.AllToAllOptions())

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        """Send to a rank."""
        return self._gloo.send(_on_cpu(tensors), rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        return self._gloo.recv(_on_cpu(tensors), rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        torch.cuda.current_stream().synchronize()
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Return the same memory as tensors of the CPU, once operators are done with it."""
    if any(tensor.device.type != "cuda" or not tensor.is_contiguous() for tensor in tensors):
        raise RuntimeError("NCCL takes contiguous tensors of a GPU")
    torch.cuda.current_stream().synchronize()
    return [_view(tensor) for tensor in tensors]


def _view(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def install() -> None:
    """Have the name "nccl" mean this; to be called once."""
    dist.Backend.register_backend(NAME, NcclOverGloo, devices=["cuda"])
    named: Callable[..., Any] = dist.Backend.__new__

    def find(kind: type, name: str) -> Any:
        return named(kind, NAME if name.lower() == "nccl" else name)

    dist.Backend.__new__ = find
