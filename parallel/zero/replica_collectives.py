"""Collectives: the communication of data-parallel ranks for ZeRO 0 to 2; with one process, none."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any
from uuid import uuid4

import torch
from torch import distributed as dist

from gemini.comm.groups import is_over_gloo, store_of
from gemini.comm.heartbeats import Heartbeats
from gemini.comm.ranks import all_gather, break_off
from gemini.errors import ConfigError, StateError

_DIGEST_BYTES = 8
_FRAME_BYTES = 256  # size of the first message of an agreement
_EXCHANGES = "exchanges gradients (backward, step)"
_GATHERS = "gathers updated weights (step)"
_SAYS = "sends its parameters and states (wrapping, state_dict, saving)"


@dataclass
class Traffic:
    """The bytes that this rank has sent to other ranks, and the number of collectives it has begun."""

    reduce_bytes: int = 0
    gather_bytes: int = 0
    other_bytes: int = 0
    num_reduces: int = 0
    num_gathers: int = 0


class Flight:
    """A collective in flight; keeps its tensors alive."""

    def __init__(
        self, result: torch.Tensor, source: torch.Tensor, arrive: Callable[[], object] = lambda: None
    ) -> None:
        """``arrive`` waits for the collective."""
        self._result, self._source, self._arrive = result, source, arrive

    def wait(self) -> torch.Tensor:
        """Return the result when it is complete (on a GPU: when the current stream will wait for it). Raises
        StateError if a rank has left or died.
        """
        self._arrive()
        return self._result


class _GatheredSums(Flight):
    """An exchange that gathers its sums again; the result has one row, the same on all ranks."""

    def __init__(self, collectives: Collectives, parts: torch.Tensor, width: int, flight: Flight) -> None:
        super().__init__(parts, parts)
        self._collectives, self._width = collectives, width
        self._flight: Flight | None = flight

    def wait(self) -> torch.Tensor:
        """Call it once: the parts are freed before the sums are gathered."""
        assert self._flight is not None
        total = _in_order(self._flight.wait())
        self._flight = None
        self._result = self._source = total
        whole = self._collectives.gather_all(total).wait()
        return whole.view(1, -1)[:, : self._width]


def _in_order(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``rows``, added one after another."""
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    return total


class Collectives:
    """The ranks of one process group. ``None`` means the default group, or one process if there is none or
    ``alone`` is set.

    A sharded tensor has ``num_parts`` parts, and this rank has part number ``part``: one part per rank, or
    with ``cuts=False`` one part that all ranks have. All ranks must call every method in the same order.
    Raises ConfigError on a rank outside the group. ``traffic`` is the counter to use; None makes a new one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        cuts: bool = True,
        alone: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        if group is None and not alone and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self._group = group
        self.device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.num_parts, self.part = (self.size, self.rank) if cuts else (1, 0)
        self.traffic = traffic or Traffic()
        self._heartbeats: Heartbeats | None = None
        if self.rank < 0:
            raise ConfigError(
                "this process is not a member of dp_process_group; pass a group that contains it"
            )

    def attend(self) -> None:
        """From now on report a rank that others wait for in vain. Over gloo only; nccl has a watchdog."""
        if self._group is not None and self.size > 1 and is_over_gloo(self._group, self.device):
            store = store_of(self._group, self.first(uuid4().hex))
            self._heartbeats = Heartbeats(store, self.rank, self.size, self._group)
            weakref.finalize(self, self._heartbeats.leave, "let go of its optimizer").atexit = False

    def leave(self, why: str) -> None:
        """Tell the other ranks that this rank makes no further calls, and ``why``. Idempotent."""
        if self._heartbeats is not None:
            self._heartbeats.leave(why)

    def _begun(self, result: torch.Tensor, source: torch.Tensor, work: Any, doing: str) -> Flight:
        """Return the flight of a collective that was begun. Further collectives may begin before anything
        waits for this one.
        """
        if self._heartbeats is not None:
            self._heartbeats.begin()
        return Flight(result, source, partial(self._wait, work, doing, begun=True))

    def _wait(self, work: Any, doing: str, *, begun: bool = False) -> None:
        if self._heartbeats is None:
            work.wait()
        else:
            assert self._group is not None
            self._heartbeats.wait(work, doing, partial(break_off, self._group), begun=begun)

    def exchange(self, rows: torch.Tensor) -> Flight:
        """Send row i of ``rows`` (parts, width) to rank i; row i of the result comes from rank i. If nothing
        is sharded, the only row of the result is the sum of the ranks' rows, in fp32 or a wider type.

        Not a reduce-scatter: this moves the same bytes, and the caller sums the rows, in an order and a type
        of its choice.
        """
        if self.size == 1:
            return Flight(rows, rows)
        if self.num_parts == 1:
            return self._sum_rows(rows)
        return self._swap_rows(rows)

    def _sum_rows(self, rows: torch.Tensor) -> Flight:
        """Sum in the same order, and at the same cost, as if rows were sharded."""
        width = rows.numel()
        dtype = rows.dtype if rows.dtype.itemsize >= 4 else torch.float32
        if width % self.size == 0 and dtype == rows.dtype and rows.is_contiguous():
            parts = rows.view(self.size, -1)
            return _GatheredSums(self, parts, width, self._swap_rows(parts))
        parts = torch.zeros(self.size, -(-width // self.size), dtype=dtype, device=rows.device)
        parts.view(-1)[:width] = rows[0]
        return _GatheredSums(self, parts, width, self._swap_rows(parts))

    def _swap_rows(self, rows: torch.Tensor) -> Flight:
        self.traffic.reduce_bytes += rows[1:].nbytes
        self.traffic.num_reduces += 1
        result = torch.empty_like(rows)
        work = dist.all_to_all_single(result.view(-1), rows.view(-1), group=self._group, async_op=True)
        return self._begun(result, rows, work, _EXCHANGES)

    def gather(self, own: torch.Tensor) -> Flight:
        """Send ``own`` (width) to the ranks with other parts; result (parts, width): row i is part i."""
        return Flight(own.unsqueeze(0), own) if self.num_parts == 1 else self.gather_all(own)

    def gather_all(self, own: torch.Tensor) -> Flight:
        """Send ``own`` (width) to all ranks; row i of the result (ranks, width) comes from rank i."""
        self.traffic.gather_bytes += own.nbytes * (self.size - 1)
        self.traffic.num_gathers += 1
        result = own.new_empty(self.size, own.numel())
        work = all_gather(result.view(-1), own, group=self._group, async_op=True)
        return self._begun(result, own, work, _GATHERS)

    def gather_anywhere(self, own: torch.Tensor) -> torch.Tensor:
        """Gather the parts ``own`` as :meth:`gather` does, and wait; ``own`` may be on another device."""
        if self.num_parts == 1:
            return own.unsqueeze(0)
        self.traffic.other_bytes += own.nbytes * (self.size - 1)
        sent = own.to(self.device)
        result = sent.new_empty(self.size, sent.numel())
        work = all_gather(result.view(-1), sent, group=self._group, async_op=True)
        self._wait(work, "gathers norms (clipping) or states (state_dict, saving)")
        return result.to(own.device)

    def maximum(self, flags: list[int], doing: str) -> list[int]:
        """Return the elementwise maximum of all ranks' flags, each in [0, 255].

        The first message has the same length for every question and identifies the question: messages of
        different lengths would end the process.

        Raises:
            StateError: on all ranks: they are not ``doing`` the same.
        """
        if self.size == 1:
            return flags
        digest = sha256(f"{doing}, {len(flags)}".encode()).digest()[:_DIGEST_BYTES]
        head = [*digest, *(255 - byte for byte in digest)]
        room = _FRAME_BYTES - len(head)
        frame = self._largest([*head, *flags[:room], *bytes(max(0, room - len(flags)))], doing)
        if any(a + b != 255 for a, b in zip(frame[:_DIGEST_BYTES], frame[_DIGEST_BYTES:], strict=False)):
            each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(self.objects(doing)))
            raise StateError(
                f"ranks do different things: {each}; all of them must make the same collective calls, in "
                "the same order and with the same settings"
            )
        rest = self._largest(flags[room:], doing) if len(flags) > room else []
        return frame[len(head) : len(head) + len(flags)] + rest

    def _largest(self, flags: list[int], doing: str) -> list[int]:
        shared = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        self.traffic.other_bytes += shared.nbytes
        work = dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._wait(work, f"agrees with the others on: {doing.partition(' with ')[0]}")
        return [int(flag) for flag in shared.tolist()]

    def require_same(self, doing: str) -> None:
        """Raise StateError on all ranks if they are not about to make the same call."""
        self.maximum([], doing)

    def sum(self, values: torch.Tensor) -> None:
        """Replace ``values``, in CPU memory, by their sum over the ranks with other parts."""
        self._reduce(values, dist.ReduceOp.SUM)

    def largest(self, values: torch.Tensor) -> None:
        """Replace ``values``, in CPU memory, by the maximum over the ranks with other parts."""
        self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: torch.Tensor, how: Any) -> None:
        if self.num_parts == 1:
            return
        self.traffic.other_bytes += values.nbytes
        shared = values.to(self.device)
        work = dist.all_reduce(shared, op=how, group=self._group, async_op=True)
        self._wait(work, "sums a norm (clipping)")
        if shared is not values:
            values.copy_(shared)

    def objects(self, own: Any) -> list[Any]:
        """Return every rank's object, in rank order; objects are pickled."""
        if self.size == 1:
            return [own]
        content = self._pickled(own)
        sizes = self._all_of(torch.tensor([content.numel()], dtype=torch.int64, device=self.device)).tolist()
        padded = content.new_zeros(max(sizes))
        padded[: content.numel()] = content
        rows = self._all_of(padded).view(self.size, -1)
        return [_unpickled(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def first(self, own: Any) -> Any:
        """Return the first rank's object on every rank; it is pickled."""
        if self.size == 1:
            return own
        content = self._pickled(own if self.rank == 0 else None)
        size = torch.tensor([content.numel()], dtype=torch.int64, device=self.device)
        self._broadcast(size)
        if self.rank != 0:
            content = content.new_empty(int(size))
        self._broadcast(content)
        return own if self.rank == 0 else _unpickled(content)

    def spread(self, tensor: torch.Tensor) -> None:
        """Broadcast the values of the first rank, in place; any memory order."""
        if self.size == 1:
            return
        values = tensor.detach().contiguous()
        self._broadcast(values)
        if values.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(values)

    def _pickled(self, value: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)

    def _all_of(self, own: torch.Tensor) -> torch.Tensor:
        result = own.new_empty(self.size * own.numel())
        self._wait(all_gather(result, own, group=self._group, async_op=True), _SAYS)
        return result

    def _broadcast(self, tensor: torch.Tensor) -> None:
        assert self._group is not None
        source = dist.get_global_rank(self._group, 0)
        self._wait(dist.broadcast(tensor, src=source, group=self._group, async_op=True), _SAYS)


def _unpickled(content: torch.Tensor) -> Any:
    return pickle.loads(content.cpu().numpy().tobytes())
