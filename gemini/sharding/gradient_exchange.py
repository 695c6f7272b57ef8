"""GradientExchange: averages gradients over the ranks, each keeping its shard of the mean; with copies of the
model, also over the ranks with the same shard.

Parts of the same elements are added in fp32, in the order of the ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from gemini.chunk import Chunk
from gemini.comm.peers import Peers, Topic, Transfer, digest_of
from gemini.errors import StateError
from gemini.runtime.gate.gate import Gate
from gemini.runtime.storage.gradient import ShardedGradient, SlotGradient
from gemini.runtime.storage.model_storage import ChunkGroup, ModelStorage
from gemini.sharding.owners import OwnersOfGroups
from gemini.sharding.rounds import from_bits, to_bits


class Parts(Protocol):
    """Exchanges one whole gradient at a time through the exchange chunk. Both are pinned from :meth:`send`
    until :meth:`mean` has returned."""

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        """Start to send every rank its part of ``whole``, fp32. ``whole`` must not be written until the
        transfer has ended. The sum will be divided by ``count``."""
        ...

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the mean over all ranks, fp32, in the exchange chunk; ``whole`` is
        overwritten."""
        ...


class FullParts(Parts):
    """Sends parts in fp32."""

    def __init__(self, peers: Peers, buffer: torch.Tensor) -> None:
        """``buffer``: fp32, at least as large as a whole gradient."""
        self._peers = peers
        self._buffer = buffer
        self._count = peers.share.size

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        self._count = count
        return self._peers.scatter_all(whole, self._buffer[: whole.numel()])

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        share = self._peers.share
        places = list(self._buffer[: whole.numel()].view(share.size, -1).unbind(0))
        total = places[share.rank]  # nothing arrived there
        terms = [*places[: share.rank], _own(whole, self._peers), *places[share.rank + 1 :]]
        torch.add(terms[0], terms[1], out=total)
        return _add(total, terms[2:]).mul_(1.0 / self._count)


class NarrowParts(Parts):
    """Sends parts in 16 bits: half the bytes. They are divided by the number of ranks before they are
    rounded, so that none overflows unless the mean does. A rank's own part is rounded too, because which rank
    owns an element depends on the layout of chunks."""

    def __init__(self, peers: Peers, buffer: torch.Tensor, dtype: torch.dtype) -> None:
        """``buffer``: as for :class:`FullParts`; sent and received parts share it."""
        self._peers = peers
        self._buffer = buffer
        self._dtype = dtype

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        sent, arrived = self._buffer[: whole.numel()].view(self._dtype).chunk(2)
        sent.copy_(whole.mul_(1.0 / count))
        return self._peers.scatter_all(sent, arrived)

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        share = self._peers.share
        sent, arrived = self._buffer[: whole.numel()].view(self._dtype).view(2, share.size, -1)
        terms = [*arrived[: share.rank], sent[share.rank], *arrived[share.rank + 1 :]]
        total = _add(_own(whole, self._peers).copy_(terms[0]), terms[1:])
        return self._buffer[: total.numel()].copy_(total)


class LoneParts(Parts):
    """For a single owner: nothing is sent."""

    def __init__(self, peers: Peers, buffer: torch.Tensor) -> None:
        """``buffer``: as for :class:`FullParts`."""
        self._peers = peers
        self._buffer = buffer
        self._count = 1

    def send(self, whole: torch.Tensor, count: int) -> Transfer:
        self._count = count
        return self._peers.scatter_all(whole, self._buffer)

    def mean(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.mul(whole, 1.0 / self._count, out=self._buffer[: whole.numel()])


def _own(whole: torch.Tensor, peers: Peers) -> torch.Tensor:
    start, stop = peers.share.range_of(whole.numel())
    return whole[start:stop]


def _add(total: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    for term in terms:
        total.add_(term)
    return total


_SCALE, _DOUBLE = struct.Struct("=q"), struct.Struct("=d")
_NO_SCALE = 0


class GradientExchange:
    """Exchanges the gradients of a chunk group once all of them are complete on every rank, and the rest at
    the end of the step. Missing gradients of a rank count as zeros.

    Parts of the same elements are added in the order of the ranks, so the bits of the result do not depend on
    how parameters are laid out in chunks.
    """

    def __init__(
        self,
        gate: Gate,
        storage: ModelStorage,
        peers: Peers,
        owners: OwnersOfGroups,
        enter_round: Callable[[], None],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._owners = owners
        self._is_held = False  # gradients accumulate without an exchange
        self._count = peers.share.size  # divisor of the sums
        self._gate = gate
        self._peers = peers
        self._enter_round = enter_round
        self._groups = storage.groups
        # Indices into _gradients with a gradient on this rank since the last discard.
        self._had: set[int] = set()
        self._arrived: list[set[int]] = []
        self._kept: set[int] = set()  # indices that are exchanged only at the end of the step
        self._complete: set[int] = set()
        self._under_way: tuple[int, Transfer] | None = None
        self._unequal: set[int] = set()  # groups with a shard mean that differs between copies of the model
        self._reduce_dtype = reduce_dtype
        # For this rank's own expert groups, and for others; created when used.
        self._parts: dict[bool, Parts] = {}
        self._buffer: torch.Tensor = torch.empty(0, dtype=torch.float32, device="cpu")
        self._buffer_tensor = -1
        self._set_buffer(storage.exchange)
        self._gradients: list[ShardedGradient] = []
        self._add_new_groups()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let gradients accumulate within the block, without an exchange."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def divide_by(self, count: int) -> None:
        """Set the divisor of sums to ``count``, the number of ranks that have gradients."""
        self._count = count

    def add(self, storage: ModelStorage, grad: SlotGradient) -> None:
        """Include ``grad``, of a parameter that was unfrozen, in exchanges. Collective."""
        self.settle()
        if storage.widen_exchange():
            self._set_buffer(storage.exchange)
        (index,) = (i for i, group in enumerate(self._groups) if grad in _gradients(group))
        assert isinstance(grad, ShardedGradient)
        self._add(index, grad)

    def widen(self, storage: ModelStorage) -> None:
        """Include the gradients of new groups in exchanges. Collective."""
        self.settle()
        if storage.widen_exchange():
            self._set_buffer(storage.exchange)
        self._add_new_groups()

    def keep(self, grad: ShardedGradient) -> None:
        """Let ``grad`` accumulate whole on each rank until the end of the step, even if others are exchanged
        earlier, because a value is added to it then."""
        self._kept.add(self._gradients.index(grad))

    def _add_new_groups(self) -> None:
        for index in range(len(self._arrived), len(self._groups)):
            self._arrived.append(set())
            for grad in _gradients(self._groups[index]):
                self._add(index, grad)

    def _add(self, index: int, grad: ShardedGradient) -> None:
        grad.set_events(_Events(self, index, len(self._gradients)))
        self._gradients.append(grad)

    def _set_buffer(self, exchange: Chunk | None) -> None:
        """Use ``exchange`` for received parts; None: there are no gradients."""
        if exchange is not None:
            self._buffer = exchange.tensor
            self._buffer_tensor = self._gate.chunks.add_tensor(exchange)
        self._parts.clear()

    def _parts_of(self, group: ChunkGroup) -> Parts:
        """Return the Parts for the owners of ``group``."""
        is_own = group.plan.is_own
        if is_own not in self._parts:
            owners = self._owners.of(group)
            if owners.is_alone:
                self._parts[is_own] = LoneParts(owners.peers, self._buffer)
            elif self._reduce_dtype is None:
                self._parts[is_own] = FullParts(owners.peers, self._buffer)
            else:
                self._parts[is_own] = NarrowParts(owners.peers, self._buffer, self._reduce_dtype)
        return self._parts[is_own]

    def complete(self) -> list[int]:
        """Return the groups with all gradients complete on this rank that wait for the other ranks."""
        return sorted(self._complete)

    def exchange(self, index: int) -> None:
        """Exchange the gradients of a group; finishes the previous exchange first. Collective."""
        self.settle()
        self._complete.discard(index)
        self._arrived[index].clear()
        group, gate = self._groups[index], self._gate
        assert group.grad is not None
        whole = [grad.ref.tensors[0] for grad in _gradients(group)]
        gate.next_moment((*whole, self._buffer_tensor))
        for grad in _gradients(group):
            if not grad.is_local:
                grad.view.zero_()
        self._under_way = index, self._parts_of(group).send(group.grad.tensor, self._count)

    def wait(self) -> None:
        """Wait for a running exchange and discard its result."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way[1].wait()

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for a running exchange and add its mean to the shard."""
        if self._under_way is None:
            return
        index = self._under_way[0]
        self.wait()
        group, gate = self._groups[index], self._gate
        assert group.grad is not None
        mean = self._parts_of(group).mean(group.grad.tensor)
        whole = [grad.ref.tensors[0] for grad in _gradients(group)]
        gate.chunks.release(whole, dirty=True)
        for grad in _gradients(group):
            grad.free_whole()
        shard = group.shard
        assert shard is not None
        assert shard.grad is not None
        own = [tensor for grad in _gradients(group) for tensor in grad.update_tensors]
        gate.run_due(own)  # the previous step's update reads the shard
        gate.next_moment(own)
        if any(grad.is_shared for grad in _gradients(group)):
            for grad in _gradients(group):
                if not grad.is_shared:  # a discarded gradient does not leave zeros
                    grad.value.zero_()
            shard.grad.tensor.add_(mean)
        else:
            shard.grad.tensor.copy_(mean)
        gate.chunks.release(own, dirty=True)
        for grad in _gradients(group):
            grad.note_mean()
        if self._peers.share.replicas > 1:
            self._unequal.add(index)
        gate.chunks.release((self._buffer_tensor,), dirty=False)
        gate.chunks.free((self._buffer_tensor,))

    @torch.no_grad()
    def _average_replicas(self) -> None:
        """Average all shards over the copies of the model; shards that were equal stay the same, up to
        rounding."""
        gate = self._gate
        for index in sorted(self._unequal):
            group = self._groups[index]
            assert group.shard is not None
            assert group.shard.grad is not None
            own = [tensor for grad in _gradients(group) for tensor in grad.update_tensors]
            gate.next_moment((*own, self._buffer_tensor))
            for grad in _gradients(group):
                if not grad.is_shared:
                    grad.value.zero_()
                grad.note_mean()
            average_over_copies(self._peers, group.shard.grad.tensor, self._buffer, self._reduce_dtype)
            gate.chunks.release(own, dirty=True)
            gate.chunks.release((self._buffer_tensor,), dirty=False)
            gate.chunks.free((self._buffer_tensor,))
        self._unequal.clear()

    def finish(self, doing: str = "", loss: float | None = None) -> float | None:
        """Exchange the remaining gradients; afterwards a gradient exists on all ranks if it existed on one.
        Returns the mean of the losses of the ranks that pass one. ``doing``: the purpose, which must be equal
        on all ranks.

        Raises:
            StateError: on all ranks, if the purposes or loss scales differ; nothing was exchanged.
        """
        self.settle()
        left = [i for i, group in enumerate(self._groups) if any(g.is_local for g in _gradients(group))]
        words = to_bits(left, len(self._groups))
        had_here = to_bits(sorted(self._had), len(self._gradients))
        scale = _bits_of(self._gate.gradient_scale.value)
        doing = f"{doing}, {len(self._gradients)} parameters that train"
        head = [digest_of(doing), scale, int(loss is not None), _bits_of(loss or 0.0)]
        said = self._peers.exchange(Topic.GRADIENTS, [*head, *words, *had_here])
        scales = {message[1] for message in said} - {_NO_SCALE}
        if any(message[0] != said[0][0] for message in said) or len(scales) > 1:
            _refuse_different(self._peers.say(f"{doing}, gradients scaled by {_scale_of(scale)}"))
        self._gate.gradient_scale.agree(_scale_of(max(scales, default=_NO_SCALE)))
        losses = [_scale_of(message[3]) or 0.0 for message in said if message[2]]
        said = [message[len(head) :] for message in said]
        for index in _union(message[: len(words)] for message in said):
            self.exchange(index)
        self.settle()
        self._average_replicas()
        self._complete.clear()
        had = set(_union(message[len(words) :] for message in said))
        for place, grad in enumerate(self._gradients):
            if place not in had and grad.exists:
                grad.free_shard()
        return sum(losses) / len(losses) if losses else None

    def forget(self, *, keep: bool) -> None:
        """Called before the gradients are discarded, or with ``keep`` filled with zeros."""
        self.settle()
        if not keep:
            self._had.clear()
            self._unequal.clear()
        self._complete.clear()
        for arrived in self._arrived:
            arrived.clear()

    def settle_group(self, index: int) -> None:
        """Finish the running exchange if it is that of the group ``index``."""
        if self._under_way is not None and self._under_way[0] == index:
            self.settle()

    def note_presence(self, place: int, *, present: bool) -> None:
        """Record whether a gradient exists on this rank."""
        if present:
            self._had.add(place)
        else:
            self._had.discard(place)

    def note_arrival(self, index: int, place: int) -> bool:
        """Record a gradient that backward made; say whether it is offered for exchange now."""
        self._had.add(place)
        if self._is_held or place in self._kept:
            return False
        arrived = self._arrived[index]
        arrived.add(place)
        if len(arrived) == len(_gradients(self._groups[index])):
            if self._owners.of(self._groups[index]).is_alone:
                self.exchange(index)  # no other rank contributes
                return True
            self._complete.add(index)
            self._enter_round()
        return True


class _Events:
    """Notifies the exchange about one gradient of a group."""

    __slots__ = ("_exchange", "_index", "_place")

    def __init__(self, exchange: GradientExchange, index: int, place: int) -> None:
        self._exchange = exchange
        self._index = index
        self._place = place

    def arrived(self) -> bool:
        return self._exchange.note_arrival(self._index, self._place)

    def assigned(self) -> None:
        self._exchange.note_presence(self._place, present=True)

    def discarded(self) -> None:
        self._exchange.note_presence(self._place, present=False)

    def settle(self) -> None:
        self._exchange.settle_group(self._index)


def _gradients(group: ChunkGroup) -> list[ShardedGradient]:
    return [slot.grad for slot in group.slots if isinstance(slot.grad, ShardedGradient)]


def _refuse_different(doing: Sequence[str]) -> None:
    each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(doing))
    raise StateError(
        f"ranks use gradients differently, so that parts of one weight would not belong together: {each}; "
        "give all of them the same"
    )


def _bits_of(scale: float | None) -> int:
    return _NO_SCALE if scale is None else int(_SCALE.unpack(_DOUBLE.pack(scale))[0])


def _scale_of(bits: int) -> float | None:
    return None if bits == _NO_SCALE else float(_DOUBLE.unpack(_SCALE.pack(bits))[0])


def _union(sets: Iterable[Sequence[int]]) -> list[int]:
    """Return the union of several sets of bits as ascending numbers."""
    return sorted({number for words in sets for number in from_bits(words)})


def average_over_copies(
    peers: Peers, values: torch.Tensor, buffer: torch.Tensor, dtype: torch.dtype | None
) -> None:
    """Replace fp32 ``values`` by their mean over the copies, the same on all of them, added in the order of
    the copies.

    Values are sent in ``dtype`` (None: fp32). With 16 bits they are divided by the number of copies before
    they are rounded, and added in fp32; their mean is sent back in 16 bits too, so every rank has it rounded.

    Args:
        values: with ``dtype`` an even number of elements.
        buffer: fp32, one element more per copy than ``values``; is overwritten.
    """
    copies = peers.share.replicas
    if dtype is None:
        _sum(peers, values, buffer, None)
        values.mul_(1.0 / copies)
        return
    half = values.numel() // 2
    narrow = buffer[:half].view(dtype).copy_(values.mul_(1.0 / copies))
    _sum(peers, narrow, buffer[half:].view(dtype), values)
    values.copy_(narrow)


def _sum(peers: Peers, values: torch.Tensor, buffer: torch.Tensor, scratch: torch.Tensor | None) -> None:
    """Replace ``values`` by their sum, added in ``scratch`` (None: in their own dtype).

    Each rank adds one part of the values for all copies and sends the sum to the others: less than twice the
    bytes of the values, for any number of copies.
    """
    own, copies = peers.share.replica, peers.share.replicas
    parts = values.tensor_split(copies)
    mine, size = parts[own], parts[own].numel()
    others = [copy for copy in range(copies) if copy != own]
    terms = [buffer[copy * size : (copy + 1) * size] for copy in range(copies)]
    peers.swap_copies([(copy, parts[copy], terms[copy]) for copy in others])
    total, terms[own] = terms[own] if scratch is None else scratch[:size], mine
    total.copy_(terms[0])
    for term in terms[1:]:
        total.add_(term)  # in the dtype of the total
    mine.copy_(total)
    peers.swap_copies([(copy, mine, parts[copy]) for copy in others])
