"""The grid of processes: named axes over torch's DeviceMesh, and the collectives along one of them."""

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

# What a rank sends of the bytes that it gives to a collective over so many ranks.
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

AXES = ("pp", "dp", "sp", "tp")  # outermost first: ranks of a tensor parallel group are neighbours
# Parts of ``dp``: ranks that divide the experts of a mixture, and those that have the same ones.
_EXPERT_AXES = ("ep", "moe_dp")


class Axis(ProcessGroupPeers):
    """The two or more ranks along an axis of the mesh, and what they do together.

    Their collectives wait as those of the runtime do: a rank that leaves, or dies, is named to the others
    with its reason (StateError). ``calls`` and ``sent_bytes`` count, by collective, what this rank took part
    in and sent.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        super().__init__(group, None, dist.get_process_group_ranks(group))
        self.name = name
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()
        self._parts: dict[tuple[int, ...], Axis] = {}

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.share.size

    @property
    def rank(self) -> int:
        """Which of them this process is."""
        return self.share.rank

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> None:
        """Replace a contiguous ``tensor`` by its sum over the ranks, or the largest: the same bits on all."""
        self.note("all_reduce", tensor.nbytes)
        group = self._group_for(tensor)
        how = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        self._run(dist.all_reduce(tensor, how, group=group, async_op=True), group, tensor.device)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, of equal shapes, in order."""
        self.note("all_gather", tensor.nbytes)
        group, tensor = self._group_for(tensor), tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(dist.all_gather(found, tensor, group=group, async_op=True), group, tensor.device)
        return found

    def reduce_scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum over the ranks of what they have for this one: ``parts``, of equal shapes, in order
        of the ranks."""
        self.note("reduce_scatter", parts[0].nbytes * self.size)
        group = self._group_for(parts[0])
        found = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        sent = [part.contiguous() for part in parts]
        self._run(dist.reduce_scatter(found, sent, group=group, async_op=True), group, found.device)
        return found

    def broadcast_from(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace a contiguous ``tensor`` by that of ``rank``."""
        self.note("broadcast", tensor.nbytes if rank == self.rank else 0)
        group = self._group_for(tensor)
        work = dist.broadcast(tensor, group=group, group_src=rank, async_op=True)
        self._run(work, group, tensor.device)

    def reduce_to(self, tensor: torch.Tensor, rank: int) -> None:
        """Replace a contiguous ``tensor`` by its sum over the ranks, on ``rank``; on the others it is used
        up."""
        self.note("reduce", tensor.nbytes if rank != self.rank else 0)
        group = self._group_for(tensor)
        work = dist.reduce(tensor, group=group, group_dst=rank, async_op=True)
        self._run(work, group, tensor.device)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send each rank its one of ``parts``, in order of the ranks; return what they have for this one, of
        these ``shapes``. A part may be empty."""
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
        """Send each rank the next ``sent`` of the rows of a contiguous tensor, in order of the ranks; return
        the ``received`` ones, in the same order. Both may be 0."""
        first = sum(sent[: self.rank])
        kept = rows[first : first + sent[self.rank]]
        self.note("all_to_all", rows.nbytes, kept_bytes=kept.nbytes)
        got = rows.new_empty(sum(received), *rows.shape[1:])
        group = self._group_for(rows)
        work = dist.all_to_all_single(got, rows, list(received), list(sent), group=group, async_op=True)
        self._run(work, group, rows.device)
        return got

    def pass_on(self, tensor: torch.Tensor) -> Arrival:
        """Send a flat ``tensor`` to the next rank, the first one behind the last; return what comes from the
        one before, of the same length. Both are under way until :meth:`Arrival.wait`."""
        self.note("pass_on", tensor.nbytes)
        group, got = self._group_for(tensor), torch.empty_like(tensor)
        to, source = ([0] * self.size for _ in range(2))
        to[(self.rank + 1) % self.size] = source[(self.rank - 1) % self.size] = tensor.numel()
        # Not isend and irecv: over gloo nobody can see whether those have ended without waiting for them.
        work = dist.all_to_all_single(got, tensor, source, to, group=group, async_op=True)
        return Arrival(got, tensor, partial(self._run, work, group, tensor.device))

    def neighbours(self, count: int) -> Axis:
        """Return the stretch of ``count`` ranks that this one is in, as an axis of its own; all ranks of it
        call this in the same order."""
        first = self.rank // count * count
        return self.among(range(first, first + count), str(count))

    def among(self, ranks: Iterable[int], name: str = "some") -> Axis:
        """Return some ``ranks``, this one among them, in ascending order, as an axis of its own; all of them
        call this in the same order."""
        key = tuple(ranks)
        if key not in self._parts:
            every = dist.get_process_group_ranks(self.group)
            group = new_group([every[rank] for rank in key], self._timeout, backend=None)
            self._parts[key] = Axis(f"{self.name}/{name}", group)
        return self._parts[key]

    def experts(self, size: int, apart: int = 1) -> tuple[Axis | None, Axis | None]:
        """Return ``size`` ranks that divide experts, this rank among them, and the ranks of this axis that
        have the same experts; None for this rank alone. Those that divide are neighbours, or as far ``apart``
        as ranks with the same part of sequences. All ranks call it in the same order."""
        place, shift = divmod(self.rank, apart)
        first = place // size * size
        sharing = [each * apart + shift for each in range(first, first + size)]
        copies = [each for each in range(self.size) if each // apart % size == place % size]
        return (
            self.among(sharing, "ep") if size > 1 else None,
            self.among(copies, "moe_dp") if len(copies) > 1 else None,
        )

    def again(self) -> Axis:
        """Return the same ranks as a new axis, for them to go on with where one has left this one; all of
        them call it together."""
        self.leave("goes on over a new axis")
        group = new_group(dist.get_process_group_ranks(self.group), self._timeout, backend=None)
        return Axis(self.name, group)

    def totals(self) -> tuple[Counter[str], Counter[str]]:
        """Return ``calls`` and ``sent_bytes``, those over some of the ranks alone included."""
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
        """The group of these ranks that takes CPU memory."""
        return self._on_host

    def note_sent(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is sent to one of them."""
        self.note("send", tensor.nbytes)

    def settle(self, work: Any, doing: str) -> None:
        """Wait for a message between two of them. Raises StateError where a rank has left, or is gone."""
        self.attendance.wait(work, doing, self.break_off, of_all=False)

    def break_off(self) -> None:
        """Make messages that are under way fail: the end of the process would wait for them."""
        break_off(self._on_host)

    def note(self, collective: str, nbytes: int, *, kept_bytes: int = 0) -> int:
        """Count a call to which this rank gives ``nbytes``, ``kept_bytes`` of which are for itself; return
        how many it sends."""
        sent = _SENT_BYTES[collective](nbytes - kept_bytes, self.size)
        self.calls[collective] += 1
        self.sent_bytes[collective] += sent
        return sent

    def _run(self, work: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self._wait(work, f"computes over the axis {self.name} (forward, backward)", group, device)


class HasAxes(Protocol):
    """What is asked for the ranks along an axis: a mesh, or what is planned in its place."""

    def axis(self, *names: str) -> Axis | None:
        """See :meth:`Mesh.axis`."""


class Arrival:
    """A tensor that comes from another rank, while one of this rank's is on its way."""

    def __init__(self, tensor: torch.Tensor, sent: torch.Tensor, wait: Callable[[], None]) -> None:
        self._tensor, self._sent, self._wait = tensor, sent, wait  # the memory of both is in use

    def wait(self) -> torch.Tensor:
        """Return the tensor when it is there, and what was sent may be written to; call it once. Raises
        StateError as collectives do."""
        self._wait()
        return self._tensor


class Mesh:
    """The processes of a run, laid out by a :class:`Layout`; this one's place is the one of its rank.

    ``mesh["dp"]`` is the DeviceMesh of an axis, as ``process_group=`` of GeminiDDP takes it. ``mesh["ep"]``
    has the ranks that divide the experts of a mixture, ``mesh["moe_dp"]`` those that have the same experts:
    both are parts of ``dp``. Use the mesh as a context manager: a rank that leaves it with an error tells
    those that wait for it.
    """

    def __init__(self, layout: Layout, *, device_type: str = "cpu") -> None:
        """All ranks call this. Raises ConfigError where there are more or fewer than the layout has."""
        started = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if started else 1
        if layout.world_size != world:
            raise ConfigError(
                f"{layout} is for {layout.world_size} processes, and there are {world}"
                + ("" if started else " (torch.distributed is not initialized: call join_ranks() first)")
            )
        if not started:
            raise ConfigError("a Mesh needs torch.distributed: call join_ranks() under torchrun first")
        self.layout = layout
        sizes = tuple(getattr(layout, name) for name in AXES)
        self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
        self._axes: dict[str, Axis] = {}
        self._device_type = device_type
        self._expert_mesh: DeviceMesh | None = None

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return an axis; of the first of ``ep`` and ``moe_dp`` all ranks ask together."""
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
        """Return the ranks along an axis, or along several as one; None where that is this rank alone. All
        ranks call it in the same order."""
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
        """Return the ranks along several axes as one group, as ``process_group=`` takes it: of ``"dp", "sp"``
        all that have the same weights. All ranks call it in the same order."""
        axis = self.axis(*names)
        return self.device_mesh[names[0]].get_group() if axis is None else axis.group

    def leave(self, why: str) -> None:
        """Tell the ranks along all axes that this one makes no more calls with them, and ``why``."""
        for axis in self._axes.values():
            axis.leave(why)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _trace: object) -> None:
        self.leave("left the mesh" if kind is None else f"ended with {kind.__name__}: {error}")


@contextmanager
def counted(axis: Axis) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Yield the calls and the sent bytes, by collective, of what is done over ``axis``, and over some of its
    ranks alone, while it is entered; complete at its end."""
    calls_before, bytes_before = axis.totals()
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    try:
        yield calls, sent
    finally:
        calls_after, bytes_after = axis.totals()
        calls.update(calls_after - calls_before)
        sent.update(bytes_after - bytes_before)
