"""GatheredChunks: parameter chunks that are gathered (whole on DEVICE) for a while. UseOrder: predicts the
order of uses in an iteration from the previous one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import torch

from gemini.chunk import Chunk
from gemini.chunk.chunk import TensorIds
from gemini.comm.peers import Transfer
from gemini.runtime.gate.gate import Gate, TensorState
from gemini.runtime.storage.data_sizes import stays_whole
from gemini.runtime.storage.gradient import GroupShard
from gemini.runtime.storage.model_storage import ChunkGroup, ModelStorage
from gemini.sharding.owners import Owners, OwnersOfGroups

NEVER = 2**62

_DIGEST_MASK = 2**31 - 1  # two digests fit a 64-bit integer


class UseOrder:
    """The order of chunk uses in one kind of iteration. Consecutive uses of a chunk count once."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._now: list[int] = []
        self._at = 0  # position of this iteration in the known order
        self.digest = 0  # 31-bit digest of the predicted order; equal for equal orders

    def begin(self) -> None:
        """Start an iteration."""
        self._now = []
        self._at = 0

    def note(self, chunk: int) -> None:
        """Record a use of ``chunk``, and advance to its next place in the known order."""
        self._now.append(chunk)
        place = self._next_place(chunk)
        if place < NEVER:
            self._at = place + 1

    def end(self) -> None:
        """End the iteration; its order is the prediction for the next one."""
        if self._now and self._now != self._known:
            self._know(self._now)
        self.begin()

    def forget(self) -> None:
        """Predict nothing until an iteration has ended."""
        self._know([])
        self.begin()

    def next_use(self, chunk: int) -> int:
        """Return after how many uses ``chunk`` is used again; NEVER if no further use is predicted."""
        place = self._next_place(chunk)
        return place - self._at if place < NEVER else NEVER

    def upcoming(self) -> Iterator[int]:
        """Yield the predicted chunks of the rest of this iteration."""
        for place in range(self._at, len(self._known)):
            yield self._known[place]

    def _know(self, order: list[int]) -> None:
        self._known = order
        self._places = {}
        for place, chunk in enumerate(order):
            self._places.setdefault(chunk, []).append(place)
        self.digest = crc32(array("q", order).tobytes()) & _DIGEST_MASK

    def _next_place(self, chunk: int) -> int:
        places = self._places.get(chunk)
        if places is None:
            return NEVER
        index = bisect_left(places, self._at)
        return places[index] if index < len(places) else NEVER


class GatheredChunk:
    """The whole parameter chunk of one group: open (pinned, with content) or closed (no memory at all).

    Values that operators write to it are copied to the shard when it is closed; all ranks write the same.
    """

    def __init__(self, gate: Gate, group: ChunkGroup, owners: Owners) -> None:
        assert group.shard is not None
        self.shard: GroupShard = group.shard
        self.owners = owners
        self.nbytes = group.param.spec.nbytes
        self.last_use = 0
        self.is_open = False
        self.is_written = False
        assert isinstance(group.param, Chunk)  # a chunk with shards is not cut
        self.anchor = gate.chunks.add_tensor(group.param)  # this tensor's pin keeps the chunk open
        self._gate = gate
        self._group = group
        self._tensors = [self.anchor, *(slot.param_ref.tensors[0] for slot in group.slots)]
        self._transfer: Transfer | None = None

    @property
    def has_shard(self) -> bool:
        """Whether the shard was ever written."""
        return self._gate.tensors.state(self.shard.param_tensor) != TensorState.FREE

    @property
    def is_idle(self) -> bool:
        """Whether it is open and no operator uses it."""
        table = self._gate.chunks.table
        return self.is_open and self._transfer is None and table.pins(self._group.param.id) == 1

    def note_written(self) -> None:
        """Note that its content is newer than the shards."""
        self.is_written = True

    def open_fresh(self) -> None:
        """Open it for its first content, without a gather."""
        self._gate.next_moment((self.anchor,))
        self.is_open = self.is_written = True

    def open(self, *, alone: bool) -> None:
        """Start to gather it; ``alone``: only to this rank."""
        gate, shard, peers = self._gate, self.shard, self.owners.peers
        gate.run_due(self._tensors)
        gate.next_moment((shard.param_tensor, self.anchor))
        self.is_open = True
        whole = self._group.param.tensor
        if alone:
            self._transfer = peers.gather_to(peers.share.rank, shard.param.tensor, whole)
        else:
            self._transfer = peers.gather(shard.param.tensor, whole)

    def serve(self, rank: int) -> None:
        """Send the shard to ``rank``, another owner that gathers the chunk alone."""
        gate, tensors = self._gate, (self.shard.param_tensor,)
        gate.run_due(self._tensors)
        self.write_back()
        gate.chunks.acquire(tensors, traced=False)
        try:
            self.owners.peers.gather_to(rank, self.shard.param.tensor, None).wait()
        finally:
            gate.post_op(tensors, False)

    def wait(self) -> None:
        """Wait until the gather has finished."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
            self._gate.chunks.release((self.shard.param_tensor,), dirty=False)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy values written since it was opened to the shard."""
        if not self.is_written:
            return
        shard, tensors = self.shard, (self.shard.param_tensor,)
        self._gate.next_moment((*tensors, self.anchor))
        shard.param.tensor.copy_(self._group.param.tensor[shard.start : shard.stop])
        self._gate.chunks.release(tensors, dirty=True)
        self._gate.chunks.release((self.anchor,), dirty=False)
        self.is_written = False

    def close(self) -> None:
        """Free its memory; no operator may be using it."""
        self.wait()
        self.write_back()
        self.is_open = False
        self._gate.chunks.release((self.anchor,), dirty=False)
        self._gate.chunks.free(self._tensors)


class GatheredChunks:
    """Keeps open chunks within a number of bytes; closes the chunks with the furthest next use."""

    def __init__(self, gate: Gate, storage: ModelStorage, owners: OwnersOfGroups, room_bytes: int) -> None:
        self._gate = gate
        self._owners = owners
        self._each: list[GatheredChunk] = []
        self._of: dict[int, int] = {}  # parameter tensor -> chunk index
        self._orders = {True: UseOrder(), False: UseOrder()}
        self.order = self._orders[False]
        self._clock = 0
        self.widen(storage, room_bytes)

    def widen(self, storage: ModelStorage, room_bytes: int) -> None:
        """Add the new groups of ``storage``, and set the bytes for open chunks to ``room_bytes``."""
        self.room_bytes = room_bytes
        for index, group in enumerate(storage.groups[len(self._each) :], len(self._each)):
            self._each.append(GatheredChunk(self._gate, group, self._owners.of(group)))
            self._of.update((slot.param_ref.tensors[0], index) for slot in group.slots)
        largest = max((chunk.nbytes for chunk in self._each), default=0)
        self._staying = {i for i, chunk in enumerate(self._each) if stays_whole(chunk.nbytes, largest)}

    def __getitem__(self, index: int) -> GatheredChunk:
        return self._each[index]

    def used_by(self, tensors: TensorIds) -> tuple[int, ...]:
        """Return the distinct chunks of the parameters among ``tensors``, ascending."""
        found = {self._of[tensor] for tensor in tensors if tensor in self._of}
        for index in found:
            self._clock += 1
            self._each[index].last_use = self._clock
        return tuple(sorted(found))

    def begin(self, *, training: bool) -> None:
        """Begin an iteration: follow the order of steps, or of evaluations."""
        self.order = self._orders[training]
        self.order.begin()

    def end(self) -> None:
        """End the current iteration."""
        self.order.end()
        self.order = self._orders[False]

    def open_fresh(self, index: int, in_use: Iterable[int]) -> bool:
        """Open a chunk if it never had content; say whether it was opened."""
        chunk = self._each[index]
        if chunk.has_shard:
            return False
        self.make_room((index,), in_use)
        chunk.open_fresh()
        return True

    def next_missing(self, in_use: Sequence[int]) -> int | None:
        """Return the next closed chunk in the predicted order if there is room for it without closing a chunk
        that is used earlier; None otherwise. A chunk without other owners is skipped, because opening it
        needs no lead time."""
        for index in self.order.upcoming():
            chunk = self._each[index]
            if chunk.is_open or index in in_use or not chunk.has_shard or chunk.owners.is_alone:
                continue
            due = self.order.next_use(index)
            needed = self._missing_bytes((index, *in_use))
            later = [v for v in self._victims(in_use) if self.order.next_use(v) > due]
            return index if needed <= sum(self._each[v].nbytes for v in later) else None
        return None

    def make_room(self, wanted: Sequence[int], in_use: Iterable[int]) -> None:
        """Close the chunks with the furthest next use until ``wanted`` fit or none is left to close."""
        victims = self._victims((*in_use, *wanted))
        while victims and self._missing_bytes(wanted) > 0:
            self._each[victims.pop()].close()

    def owners(self, index: int) -> Sequence[int]:
        """Return the positions, among all ranks, of the owners of a chunk."""
        return self._each[index].owners.places

    def gather(self, index: int, askers: Sequence[int]) -> None:
        """Gather a chunk to the ``askers`` among its owners; all owners take part."""
        chunk = self._each[index]
        share = chunk.owners.peers.share
        if len(askers) == share.size:
            chunk.open(alone=False)
            return
        for asker in askers:
            if asker == share.rank:
                chunk.open(alone=True)
            else:
                chunk.serve(asker)

    def open_alone(self, index: int, in_use: Iterable[int]) -> bool:
        """Open a chunk if this rank is its only owner; say whether it was opened."""
        chunk = self._each[index]
        if not chunk.owners.is_alone:
            return False
        self.make_room((index,), in_use)
        chunk.open(alone=False)
        return True

    def close_all(self) -> None:
        """Close all open chunks."""
        for chunk in self._each:
            if chunk.is_open:
                chunk.close()

    @property
    def prediction_digest(self) -> int:
        """A digest of both predicted orders: equal on ranks with equal predictions."""
        return self._orders[True].digest << 31 | self._orders[False].digest

    def restart(self, *, forget: bool) -> None:
        """Restart the iteration with all idle chunks closed, so that all ranks are in the same state, even if
        their passes ended at different operators. ``forget``: discard the predictions, which differ between
        ranks."""
        self.wait()
        for chunk in self._each:
            if chunk.is_idle:
                chunk.close()
        for order in self._orders.values():
            order.forget() if forget else order.begin()

    def write_back(self) -> None:
        """Copy values written to open chunks to their shards."""
        for chunk in self._each:
            chunk.write_back()

    def wait(self) -> None:
        """Wait for all running gathers."""
        for chunk in self._each:
            chunk.wait()

    def repin(self) -> None:
        """Pin all open chunks again."""
        anchors = [chunk.anchor for chunk in self._each if chunk.is_open]
        if anchors:
            self._gate.chunks.acquire(anchors, traced=False)

    def _missing_bytes(self, wanted: Iterable[int]) -> int:
        return sum(c.nbytes for i, c in enumerate(self._each) if c.is_open or i in wanted) - self.room_bytes

    def _victims(self, in_use: Iterable[int]) -> list[int]:
        """Return the chunks that may be closed; the last one is closed first."""
        kept = {*in_use, *self._staying}
        idle = [i for i, chunk in enumerate(self._each) if i not in kept and chunk.is_idle]
        return sorted(idle, key=lambda i: (self.order.next_use(i), -self._each[i].last_use))
