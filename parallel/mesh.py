"""The grid of processes: named axes over torch's DeviceMesh, and the collectives along an axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini.comm.groups import group_of, new_group
from gemini.comm.ranks import ProcessGroupPeers, break_off
from gemini.errors import ConfigError
from gemini.parallel.layout import Layout

# The bytes that a rank sends, from the bytes that it passes to a collective and the number of ranks.
_SENT_BYTES: Mapping[str, Callable[[int, int], int]] = {
    "all_reduce": lambda nbytes, size: 2 * nbytes * (size - 1) // size,
    "all_gather": lambda nbytes, size: nbytes * (size - 1),
    "reduce_scatter": lambda nbytes, size: nbytes // size * (size - 1),
    "broadcast": lambda nbytes, size: nbytes * (size - 1),
    "reduce": lambda nbytes, _size: nbytes,
    "all_to_all": lambda nbytes, _size: nbytes,
    "pass_on": lambda nbytes, _size: nbytes,
    "send": lambda nbytes, _size: nbytes,
}

AXES = ("pp", "dp", "sp", "tp")  # outermost first: ranks of a tensor-parallel group are neighbours
# Parts of ``dp``: the ranks that divide the experts of a mixture, and the ranks with the same experts.
_EXPERT_AXES = ("ep", "moe_dp")


class Axis(ProcessGroupPeers):
    """The two or more ranks along an axis of the mesh, and their collectives.

    Collectives wait as those of the runtime do: if a rank leaves or dies, the others get a StateError that
    names it and its reason. ``calls`` and ``sent_bytes`` count, by collective, the calls of this rank and the
    bytes that it sent.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        super().__init__(group, None, dist.get_process_group_ranks(group))
        self.name = name
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self._parts: dict[tuple[int, ...], Axis] = {}

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.share.size

    @property
    def rank(self) -> int:
        """The index of this process in the axis."""
        return self.share.rank

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        """Replace a contiguous ``tensor`` by its sum (or maximum, if ``largest``) over the ranks; all ranks
        get the same bits.
        """
        self.note("all_reduce", tensor.nbytes)
        group = self._group_for(tensor)
        how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._run(dist.all_reduce(tensor, how, group=group, async_op=True), group, tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order. All have the same shape."""
        self.note("all_gather", tensor.nbytes)
        group, tensor = self._group_for(tensor), tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(dist.all_gather(found, tensor, group=group, async_op=True), group, tensor.device)
        return found

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over the ranks of their part for this rank. ``parts`` has one tensor for each rank,
        in rank order, all of the same shape.
        """
        self.note("reduce_scatter", parts[0].nbytes * self.size)
        group = self._group_for(parts[0])
        found = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        sent = [part.contiguous() for part in parts]
        self._run(dist.reduce_scatter(found, sent, group=group, async_op=True), group, found.device)
        return found

    def broadcast_from(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace a contiguous ``tensor`` by the tensor of ``rank``."""
        self.note("broadcast", tensor.nbytes if rank == self.rank else 0)
        group = self._group_for(tensor)
        work = dist.broadcast(tensor, group=group, group_src=rank, async_op=True)
        self._run(work, group, tensor.device)

    def reduce_to(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace a contiguous ``tensor`` on ``rank`` by its sum over the ranks; on the other ranks its
        content is undefined afterwards.
        """
        self.note("reduce", tensor.nbytes if rank != self.rank else 0)
        group = self._group_for(tensor)
        work = dist.reduce(tensor, group=group, group_dst=rank, async_op=True)
        self._run(work, group, tensor.device)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send ``parts[i]`` to rank i; return the parts received from each rank, with these ``shapes``. A
        part may be empty.
        """
        sent = torch.cat([part.reshape(-1) for part in parts])
        self.note("all_to_all", sent.nbytes, kept_bytes=parts[self.rank].nbytes)
        lengths = [math.prod(shape) for shape in shapes]
        got = sent.new_empty(sum(lengths))
        group = self._group_for(sent)
        work = dist.all_to_all_single(
            got, sent, lengths, [part.numel() for part in parts], group=group, async_op=True
        )
        self._run(work, group, sent.device)
        return [part.view(*shape) for part, shape in zip(got.split(lengths), shapes, strict=True)]

    def exchange_rows(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send ``sent[i]`` consecutive rows of a contiguous tensor to rank i; return the received rows in
        rank order, ``received[i]`` from rank i. Counts may be 0.
        """
        first = sum(sent[: self.rank])
        kept = rows[first : first + sent[self.rank]]
        self.note("all_to_all", rows.nbytes, kept_bytes=kept.nbytes)
        got = rows.new_empty(sum(received), *rows.shape[1:])
        group = self._group_for(rows)
        work = dist.all_to_all_single(got, rows, list(received), list(sent), group=group, async_op=True)
        self._run(work, group, rows.device)
        return got

    def pass_on(self, tensor: torch.Tensor) -> Arrival:
        """Send a flat ``tensor`` to the next rank (the last sends to the first) and receive one of the same
        length from the previous rank. Both transfers run until :meth:`Arrival.wait`.
        """
        self.note("pass_on", tensor.nbytes)
        group, got = self._group_for(tensor), torch.empty_like(tensor)
        to, source = ([0] * self.size for _ in range(2))
        to[(self.rank + 1) % self.size] = source[(self.rank - 1) % self.size] = tensor.numel()
        # Not isend and irecv: over gloo nothing tells whether they have ended without waiting for them.
        work = dist.all_to_all_single(got, tensor, source, to, group=group, async_op=True)
        return Arrival(got, tensor, partial(self._run, work, group, tensor.device))

    def neighbours(self, count: int) -> Axis:
        """Return the group of ``count`` consecutive ranks that contains this one, as an axis. All its ranks
        must call this in the same order.
        """
        first = self.rank // count * count
        return self.among(range(first, first + count), str(count))

    def among(self, ranks: Iterable[int], name: str = "some") -> Axis:
        """Return some ``ranks``, in ascending order and including this one, as an axis. All of them must call
        this in the same order.
        """
        key = tuple(ranks)
        if key not in self._parts:
            every = dist.get_process_group_ranks(self.group)
            group = new_group([every[rank] for rank in key], self._timeout, backend=None)
            self._parts[key] = Axis(f"{self.name}/{name}", group)
        return self._parts[key]

    def experts(self, size: int, apart: int = 1) -> tuple[Axis | None, Axis | None]:
        """Return the ``size`` ranks that divide experts with this one, and the ranks of this axis with the
        same experts; None instead of an axis of one rank. The dividing ranks are neighbours, or ``apart``
        ranks from each other if that many ranks have parts of the same sequences. All ranks call it in the
        same order.
        """
        place, shift = divmod(self.rank, apart)
        first = place // size * size
        sharing = [each * apart + shift for each in range(first, first + size)]
        copies = [each for each in range(self.size) if each // apart % size == place % size]
        return (
            self.among(sharing, "ep") if size > 1 else None,
            self.among(copies, "moe_dp") if len(copies) > 1 else None,
        )

    def again(self) -> Axis:
        """Return the same ranks as a new axis, after a rank has left this one. Collective."""
        self.leave("goes on over a new axis")
        group = new_group(dist.get_process_group_ranks(self.group), self._timeout, backend=None)
        return Axis(self.name, group)

    def totals(self) -> tuple[Counter[str], Counter[str]]:
        """Return ``calls`` and ``sent_bytes``, including those over sub-axes of these ranks."""
        calls, sent = Counter(self.calls), Counter(self.sent_bytes)
        for axis in self._parts.values():
            of_calls, of_sent = axis.totals()
            calls.update(of_calls)
            sent.update(of_sent)
        return calls, sent

    def leave(self, why: str) -> None:
        super().leave(why)
        for axis in self._parts.values():
            axis.leave(why)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """The process group of these ranks that takes CPU memory."""
        return self._on_host

    def note_sent(self, tensor: torch.Tensor) -> None:
        """Count a tensor sent to another rank of the axis."""
        self.note("send", tensor.nbytes)

    def settle(self, work: Any, doing: str) -> None:
        """Wait for a message between two ranks. Raises StateError if a rank has left or died."""
        self.heartbeats.wait(work, doing, self.break_off, of_all=False)

    def break_off(self) -> None:
        """Make pending messages fail; otherwise the end of the process would wait for them."""
        break_off(self._on_host)

    def note(self, collective: str, nbytes: int, *, kept_bytes: int = 0) -> int:
        """Count a call with ``nbytes``, minus ``kept_bytes`` for this rank; return the bytes it sends."""
        sent = _SENT_BYTES[collective](nbytes - kept_bytes, self.size)
        self.calls[collective] += 1
        self.sent_bytes[collective] += sent
        return sent

    def _run(self, work: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self._wait(work, f"computes over the axis {self.name} (forward, backward)", group, device)


class HasAxes(Protocol):
    """The interface that returns the ranks along an axis: a mesh, or a planned stand-in for one."""

    def axis(self, *names: str) -> Axis | None:
        """See :meth:`Mesh.axis`."""


class Arrival:
    """A tensor in flight from the previous rank, while one of this rank's is sent to the next."""

    def __init__(self, tensor: torch.Tensor, sent: torch.Tensor, wait: Callable[[], None]) -> None:
        self._tensor, self._sent, self._wait = tensor, sent, wait  # both buffers stay alive while in use

    def wait(self) -> torch.Tensor:
        """Wait for both transfers and return the received tensor; the sent one may be overwritten then. Call
        it once. Raises StateError as collectives do.
        """
        self._wait()
        return self._tensor


class Mesh:
    """The processes of a run, arranged by a :class:`Layout`; this process has the position of its rank.

    ``mesh["dp"]`` is the DeviceMesh of an axis, as ``process_group=`` of GeminiDDP takes it. ``mesh["ep"]``
    has the ranks that divide the experts of a mixture, ``mesh["moe_dp"]`` the ranks with the same experts;
    both are parts of ``dp``. Use the mesh as a context manager: a rank that leaves it with an error notifies
    the ranks that wait for it.
    """

    def __init__(self, layout: Layout, *, device_type: str = "cpu") -> None:
        """Collective: all ranks call it. Raises ConfigError if their number differs from the layout's."""
        started = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if started else 1
        if layout.world_size != world:
            raise ConfigError(
                f"{layout} needs {layout.world_size} processes, but there are {world}"
                + ("" if started else " (torch.distributed is not initialized: call join_ranks() first)")
            )
        if not started:
            raise ConfigError("a Mesh needs torch.distributed; call join_ranks() first, under torchrun")
        self.layout = layout
        sizes = tuple(getattr(layout, name) for name in AXES)
        self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        self._axes: dict[str, Axis] = {}
        self._device_type = device_type
        self._expert_mesh: DeviceMesh | None = None

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return the DeviceMesh of an axis. The first access to ``ep`` or ``moe_dp`` is collective."""
        if name in _EXPERT_AXES:
            return self._with_experts()[name]
        if name not in AXES:
            raise ConfigError(f"there is no axis {name!r}; the axes are {', '.join((*AXES, *_EXPERT_AXES))}")
        return self.device_mesh[name]

    def _with_experts(self) -> DeviceMesh:
        if self._expert_mesh is None:
            layout = self.layout
            sizes = (layout.pp, layout.dp // layout.ep, layout.ep, layout.sp, layout.tp)
            names = ("pp", "moe_dp", "ep", "sp", "tp")
            self._expert_mesh = init_device_mesh(self._device_type, sizes, mesh_dim_names=names)
        return self._expert_mesh

    def axis(self, *names: str) -> Axis | None:
        """Return the ranks along an axis, or along several axes as one; None if that is this rank only. All
        ranks call it in the same order.
        """
        key = ",".join(names)
        if key in _EXPERT_AXES:
            data = self.axis("dp")
            return None if data is None else data.experts(self.layout.ep)[_EXPERT_AXES.index(key)]
        if key not in self._axes:
            part = self.device_mesh[names if len(names) > 1 else names[0]]
            if part.size() == 1:
                return None
            self._axes[key] = Axis(key, group_of(part))
        return self._axes[key]

    def group(self, *names: str) -> dist.ProcessGroup:
        """Return the ranks along several axes as one group, for ``process_group=``. The group of ``"dp",
        "sp"`` has the ranks with the same weights. All ranks call it in the same order.
        """
        axis = self.axis(*names)
        return self.device_mesh[names[0]].get_group() if axis is None else axis.group

    def leave(self, why: str) -> None:
        """Tell the ranks along all axes that this rank makes no further calls, and ``why``."""
        for axis in self._axes.values():
            axis.leave(why)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _trace: object) -> None:
        self.leave("left the mesh" if kind is None else f"ended with {kind.__name__}: {error}")


@contextmanager
def counted(axis: Axis) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Yield counters of the calls and the sent bytes over ``axis`` and its sub-axes within the block. They
    are filled when the block ends.
    """
    calls_before, bytes_before = axis.totals()
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    try:
        yield calls, sent
    finally:
        calls_after, bytes_after = axis.totals()
        calls.update(calls_after - calls_before)
        sent.update(bytes_after - bytes_before)
