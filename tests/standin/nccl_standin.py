"""NCCL for the stand-in for CUDA: collectives of tensors on the GPU, over gloo.

They are late as NCCL's are, in a stream of their own: they begin when the operators' stream has come to where
they were called, and who waits for one has the operators' stream wait, not the thread. Tensors of the CPU are
refused, as by NCCL.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from cuda_standin import Event, Stream, current_stream, index_of, run_on_stream, stream
from torch import Tensor

NAME = "nccl_standin"
MAX_DELAY_SECONDS = 2e-3


class LateWork(dist._Work):
    """A collective under way."""

    def __init__(self, own: Stream, tensors: list[Tensor]) -> None:
        super().__init__()
        self._done: Event = own.record_event()
        self._own = own
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Have the operators' stream wait for it."""
        current_stream().wait_event(self._done)
        return True

    def synchronize(self) -> None:
        """Do the same."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether it is done."""
        return self._done.query()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return what is done when the stream has come to it."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(
            devices=[torch.device("cuda", index_of(None))]
        )
        with stream(self._own):
            future.set_result(self._tensors)
        return future


class NcclOverGloo(dist.ProcessGroup):
    """A group whose tensors are on the GPU."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("over gloo", store), rank, size, timeout)
        self._stream = Stream()

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

    def _start(self, collective: Callable[..., Any], results: list[Tensor], *given: Any) -> LateWork:
        """Have the own stream carry out a collective of gloo on tensors, and what else it takes."""
        arguments = [_on_cpu(each) for each in given]

        def run() -> None:
            time.sleep(random.random() * MAX_DELAY_SECONDS)
            collective(*arguments).wait()

        self._stream.wait_stream(current_stream())
        run_on_stream(self._stream, run, keep=given)
        return LateWork(self._stream, results)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce in place."""
        return self._start(self._gloo.allreduce, tensors, tensors, opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Have all ranks have the same."""
        return self._start(self._gloo.broadcast, tensors, tensors, opts)

    def allgather(self, wholes: list[list[Tensor]], parts: list[Tensor], opts: Any = None) -> Any:
        """Return the parts of all ranks as tensors of their own."""
        return self._start(self._gloo.allgather, wholes[0], wholes, parts, opts or dist.AllgatherOptions())

    def all_gather_single(self, whole: Tensor, part: Tensor, opts: Any = None) -> Any:
        """Put the parts of all ranks together."""
        opts = opts or dist.AllgatherOptions()
        return self._start(self._gloo._allgather_base, [whole], whole, part, opts)

    def reduce_scatter_single(self, part: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """Reduce, each rank its part."""
        opts = opts or dist.ReduceScatterOptions()
        return self._start(self._gloo._reduce_scatter_base, [part], part, whole, opts)

    def all_to_all_single(
        self, parts: Tensor, whole: Tensor, sizes_out: list[int], sizes_in: list[int], opts: Any = None
    ) -> Any:
        """Give each rank its part."""
        opts = opts or dist.AllToAllOptions()
        return self._start(self._gloo.alltoall_base, [parts], parts, whole, sizes_out, sizes_in, opts)

    # What torch before 2.13 calls them.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        """Send to a rank."""
        return self._start(self._gloo.send, tensors, tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        return self._start(self._gloo.recv, tensors, tensors, rank, tag)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        torch.cuda.synchronize()
        return self._gloo.barrier(opts or dist.BarrierOptions())


def _on_cpu(value: Any) -> Any:
    """Return the same memory as tensors of the CPU, for tensors, and lists of them."""
    if isinstance(value, list):
        return [_on_cpu(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cuda" or not value.is_contiguous():
        raise RuntimeError("NCCL takes contiguous tensors of a GPU")
    return _view(value)


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
