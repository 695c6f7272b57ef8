"""GatheredChunks: parameter chunks that are whole on DEVICE for a while. UseOrder: in which order an
iteration uses them, foretold from the one before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import torch

from gemini.chunk import Chunk, TensorIds
from gemini.comm.peers import Transfer, stays_whole
from gemini.runtime.gate.gate import Gate, TensorState
from gemini.runtime.storage.gradient import GroupShard
from gemini.runtime.storage.model_storage import ChunkGroup, ModelStorage
from gemini.sharding.owners import Owners, OwnersOfGroups

NEVER = 2**62

_DIGEST_MASK = 2**31 - 1  # so that two of them fit an integer of 64 bits


class UseOrder:
    """The uses of one kind of iteration; a use is noted where another chunk was used before it."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._now: list[int] = []
        self._at = 0  # how far in the known order this iteration has come
        self.digest = 0  # of what is foretold: equal for equal orders; 31 bits

    def begin(self) -> None:
        """Start an iteration."""
        self._now = []
        self._at = 0

    def note(self, chunk: int) -> None:
        """``chunk`` is used; the order goes on behind the next place where it was used before."""
        self._now.append(chunk)
        place = self._next_place(chunk)
        if place < NEVER:
            self._at = place + 1

    def end(self) -> None:
        """Take what this iteration did for the order of the next."""
        if self._now and self._now != self._known:
            self._know(self._now)
        self.begin()

    def forget(self) -> None:
        """Foretell nothing, until an iteration has ended."""
        self._know([])
        self.begin()

    def next_use(self, chunk: int) -> int:
        """Return how many uses from now ``chunk`` is used again; NEVER where it is not foretold."""
        place = self._next_place(chunk)
        return place - self._at if place < NEVER else NEVER

    def upcoming(self) -> Iterator[int]:
        """Yield the chunks to come in this iteration."""
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

    What operators write to it goes to the shard when it is closed: all ranks write the same.
    """

    def __init__(self, gate: Gate, group: ChunkGroup, owners: Owners) -> None:
        assert group.shard is not None
        self.shard: GroupShard = group.shard
        self.owners = owners
        self.nbytes = group.param.spec.nbytes
        self.last_use = 0
        self.is_open = False
        self.is_written = False
        assert isinstance(group.param, Chunk)  # ranks have parts of it: it is not cut
        self.anchor = gate.chunks.add_tensor(group.param)  # its pin is what keeps the chunk open
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
        """Whether it is open and nobody uses it."""
        table = self._gate.chunks.table
        return self.is_open and self._transfer is None and table.pins(self._group.param.id) == 1

    def note_written(self) -> None:
        """What it holds is newer than the shards."""
        self.is_written = True

    def open_fresh(self) -> None:
        """Open it for its first content."""
        self._gate.next_moment((self.anchor,))
        self.is_open = self.is_written = True

    def open(self, *, alone: bool) -> None:
        """Start to gather it; ``alone``: no other rank does."""
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
        """Send the shard to another owner, which gathers the chunk alone."""
        gate, tensors = self._gate, (self.shard.param_tensor,)
        gate.run_due(self._tensors)
        self.write_back()
        gate.chunks.acquire(tensors, traced=False)
        try:
            self.owners.peers.gather_to(rank, self.shard.param.tensor, None).wait()
        finally:
            gate.post_op(tensors, False)

    def wait(self) -> None:
        """Wait until all of it has arrived."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
            self._gate.chunks.release((self.shard.param_tensor,), dirty=False)

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy what was written since it was opened to the shard."""
        if not self.is_written:
            return
        shard, tensors = self.shard, (self.shard.param_tensor,)
        self._gate.next_moment((*tensors, self.anchor))
        shard.param.tensor.copy_(self._group.param.tensor[shard.start : shard.stop])
        self._gate.chunks.release(tensors, dirty=True)
        self._gate.chunks.release((self.anchor,), dirty=False)
        self.is_written = False

    def close(self) -> None:
        """Give its memory up; nobody may be using it."""
        self.wait()
        self.write_back()
        self.is_open = False
        self._gate.chunks.release((self.anchor,), dirty=False)
        self._gate.chunks.free(self._tensors)


class GatheredChunks:
    """Keeps within a number of bytes what is open, by what is used furthest ahead."""

    def __init__(self, gate: Gate, storage: ModelStorage, owners: OwnersOfGroups, room_bytes: int) -> None:
        self._gate = gate
        self._owners = owners
        self._each: list[GatheredChunk] = []
        self._of: dict[int, int] = {}  # parameter -> chunk
        self._orders = {True: UseOrder(), False: UseOrder()}
        self.order = self._orders[False]
        self._clock = 0
        self.widen(storage, room_bytes)

    def widen(self, storage: ModelStorage, room_bytes: int) -> None:
        """Take in the groups of ``storage`` that are new; have ``room_bytes`` for what is open."""
        self.room_bytes = room_bytes
        for index, group in enumerate(storage.groups[len(self._each) :], len(self._each)):
            self._each.append(GatheredChunk(self._gate, group, self._owners.of(group)))
            self._of.update((slot.param_ref.tensors[0], index) for slot in group.slots)
        largest = max((chunk.nbytes for chunk in self._each), default=0)
        self._staying = {i for i, chunk in enumerate(self._each) if stays_whole(chunk.nbytes, largest)}

    def __getitem__(self, index: int) -> GatheredChunk:
        return self._each[index]

    def used_by(self, tensors: TensorIds) -> tuple[int, ...]:
        """Return the chunks that parameters among ``tensors`` lie in, ascending, each once."""
        found = {self._of[tensor] for tensor in tensors if tensor in self._of}
        for index in found:
            self._clock += 1
            self._each[index].last_use = self._clock
        return tuple(sorted(found))

    def begin(self, *, training: bool) -> None:
        """Follow the order of steps, or of evaluations."""
        self.order = self._orders[training]
        self.order.begin()

    def end(self) -> None:
        """End the iteration whose order is followed."""
        self.order.end()
        self.order = self._orders[False]

    def open_fresh(self, index: int, in_use: Iterable[int]) -> bool:
        """Open a chunk that never had content; say whether it was one."""
        chunk = self._each[index]
        if chunk.has_shard:
            return False
        self.make_room((index,), in_use)
        chunk.open_fresh()
        return True

    def next_missing(self, in_use: Sequence[int]) -> int | None:
        """Return the first closed chunk to come that there is room for without closing one used earlier. One
        that comes from no other rank needs no start ahead."""
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
        """Close what is used last until there is room for ``wanted``, as far as anything can be closed."""
        victims = self._victims((*in_use, *wanted))
        while victims and self._missing_bytes(wanted) > 0:
            self._each[victims.pop()].close()

    def owners(self, index: int) -> Sequence[int]:
        """Return the places, among all ranks, of those that have parts of a chunk."""
        return self._each[index].owners.places

    def gather(self, index: int, askers: Sequence[int]) -> None:
        """Carry out what ``askers`` among the owners have asked for, all of these together."""
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
        """Open a chunk that no other rank has a part of; say whether it was one."""
        chunk = self._each[index]
        if not chunk.owners.is_alone:
            return False
        self.make_room((index,), in_use)
        chunk.open(alone=False)
        return True

    def close_all(self) -> None:
        """Close everything."""
        for chunk in self._each:
            if chunk.is_open:
                chunk.close()

    @property
    def foretold(self) -> int:
        """What stands for all that is foretold: equal on ranks for which it is the same."""
        return self._orders[True].digest << 31 | self._orders[False].digest

    def restart(self, *, forget: bool) -> None:
        """Begin the iteration again, with nothing open that is not in use: alike on all ranks, wherever their
        passes have ended. ``forget``: they foretell different things, or did."""
        self.wait()
        for chunk in self._each:
            if chunk.is_idle:
                chunk.close()
        for order in self._orders.values():
            order.forget() if forget else order.begin()

    def write_back(self) -> None:
        """Bring what was written since they were opened to the shards."""
        for chunk in self._each:
            chunk.write_back()

    def wait(self) -> None:
        """Wait for everything that is being gathered."""
        for chunk in self._each:
            chunk.wait()

    def repin(self) -> None:
        """Pin everything again that is open."""
        anchors = [chunk.anchor for chunk in self._each if chunk.is_open]
        if anchors:
            self._gate.chunks.acquire(anchors, traced=False)

    def _missing_bytes(self, wanted: Iterable[int]) -> int:
        return sum(c.nbytes for i, c in enumerate(self._each) if c.is_open or i in wanted) - self.room_bytes

    def _victims(self, in_use: Iterable[int]) -> list[int]:
        """Return what may be closed; what is to be closed first comes last."""
        kept = {*in_use, *self._staying}
        idle = [i for i, chunk in enumerate(self._each) if i not in kept and chunk.is_idle]
        return sorted(idle, key=lambda i: (self.order.next_use(i), -self._each[i].last_use))
