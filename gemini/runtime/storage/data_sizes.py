"""Plans the chunks of a model's parameters and computes their sizes before anything is allocated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import accumulate
from typing import NamedTuple

import torch

from gemini.chunk.chunk import ChunkKind, ChunkSpec, StateSpec, num_blocks, whole_blocks
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.layout import CHUNK_ALIGN_BYTES, ChunkLayout, TensorSlot, round_up
from gemini.comm.peers import CUT_NUMEL, Share

# A gathered chunk this many times smaller than the largest stays for the step: keeping it costs little
# memory, gathering it again costs a message.
_SMALL_PART = 16


@dataclass(frozen=True)
class GroupSpec:
    """Parameters of one dtype, and their layout. When they are wrapped, either all of them train or all are
    frozen, and the announced optimizer keeps the same states of all. ``master``: whether those that train
    have fp32 masters. ``own_share``: this rank's share of the chunks if fewer ranks cut them than the other
    chunks, as for experts that ranks have divided."""

    layout: ChunkLayout
    dtype: torch.dtype
    trainable: bool
    master: bool
    own_share: Share | None = None


class Kept(NamedTuple):
    """The states that an optimizer keeps of each parameter of a chunk; ``whole``: an update needs all of a
    parameter."""

    states: tuple[StateSpec, ...] = ()
    whole: bool = False

    def joined(self, other: Kept) -> Kept:
        """Return the states that two successive optimizers keep."""
        return Kept(tuple(dict.fromkeys(self.states + other.states)), self.whole or other.whole)


class Needs(NamedTuple):
    """The chunks that a parameter chunk needs besides itself. ``trains``: a gradient and, if the dtype
    requires them, masters. ``masters`` alone: masters exist but nothing trains yet. ``kept``: states that
    optimizers keep."""

    masters: bool = False
    trains: bool = False
    kept: Kept = Kept()


@dataclass(frozen=True)
class GroupPlan:
    """A parameter chunk and the chunks that may belong to it. Over ranks ``pieces`` cover only this rank's
    part.

    ``blocks``: for each piece, the range of its parameters' blocks, counted through the chunk.
    ``largest_numel``: the elements of the largest parameter. ``parts``: the number of chunks that the
    parameter chunk consists of, one behind another; they move separately, and no piece lies in two of them.
    ``is_own``: it has experts of this rank; other ranks have others.
    """

    numel: int
    dtype: torch.dtype
    trainable: bool
    master: bool
    pieces: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    share: Share | None
    block_bytes: int
    largest_numel: int
    parts: int = 1
    is_own: bool = False

    @property
    def updated_dtype(self) -> torch.dtype:
        """The dtype of the values that an optimizer updates: fp32 if there are masters."""
        return torch.float32 if self.master else self.dtype

    @property
    def owned(self) -> tuple[int, int]:
        """The elements ``[start, stop)`` that this rank owns."""
        return self.share.range_of(self.numel) if self.share is not None else (0, self.numel)

    @property
    def grad_parts(self) -> int:
        """The number of chunks of the gradient: as many as of the parameters if they train from the
        beginning."""
        return self.parts if self.trainable else 1

    def params(self) -> Iterator[ChunkSpec]:
        """Yield the parameter chunk, or its parts, and then this rank's shard of it."""
        yield from self._parts(ChunkKind.PARAM, self.parts)
        if self.share is not None:
            start, stop = self.owned
            yield self._spec(ChunkKind.SHARD, stop - start, self.dtype)

    def gradients(self) -> Iterator[ChunkSpec]:
        """Yield the gradient chunk, or its parts, and then this rank's shard of it. Over ranks gradients are
        summed and accumulated in fp32."""
        if self.share is None:
            yield from self._parts(ChunkKind.GRAD, self.grad_parts)
            return
        start, stop = self.owned
        yield self._spec(ChunkKind.GRAD, self.numel, torch.float32)
        yield self._spec(ChunkKind.GRAD_SHARD, stop - start, torch.float32)

    def masters(self) -> Iterator[ChunkSpec]:
        """Yield the fp32 masters, one chunk per piece; none if the parameters need none."""
        for start, stop in self.pieces if self.master else ():
            yield self._spec(ChunkKind.MASTER, stop - start, torch.float32)

    def states(self, states: Iterable[StateSpec]) -> Iterator[ChunkSpec]:
        """Yield the chunks of these states, piece by piece, one chunk per state."""
        each = list(states)
        for (start, stop), (first, end) in zip(self.pieces, self.blocks, strict=True):
            for state in each:
                numel = end - first if state.per_block else stop - start
                numel = round_up(max(numel, 1), CHUNK_ALIGN_BYTES // state.dtype.itemsize)
                yield self._spec(ChunkKind.STATE, numel, state.dtype, state.key)

    def room(self, kept: Kept) -> ChunkSpec | None:
        """Return the chunk in which the largest parameter is gathered, with its gradient and states, for an
        update that needs all of it; None if no update does, or no other rank has parts of it."""
        if self.share is None or not kept.whole:
            return None
        dtypes = (torch.float32, self.updated_dtype, *(state.dtype for state in kept.states))
        numel = sum(places_in_room(max(self.largest_numel, 1), dtypes)[1]) // torch.float32.itemsize
        return self._spec(ChunkKind.ROOM, numel, torch.float32)

    def at_first(self) -> Iterator[ChunkSpec]:
        """Yield the chunks that are created at wrapping, in the order in which they are built."""
        yield from self.params()
        if self.trainable:
            yield from self.gradients()
            yield from self.masters()

    def later(self, states: Sequence[StateSpec]) -> Iterator[ChunkSpec]:
        """Yield the chunks that may be added when parameters are unfrozen or get an optimizer; none for bytes
        of quantized weights."""
        if not self.dtype.is_floating_point and not self.dtype.is_complex:
            return
        if not self.trainable:
            yield from self.gradients()
            yield from self.masters()
        yield from self.states(states)

    def _parts(self, kind: ChunkKind, count: int) -> Iterator[ChunkSpec]:
        part = self._spec(kind, self.numel // count, self.dtype)
        yield part
        yield from [replace(part, follows=True)] * (count - 1)

    def _spec(self, kind: ChunkKind, numel: int, dtype: torch.dtype, state: str = "") -> ChunkSpec:
        return ChunkSpec(kind, numel, dtype, self.block_bytes, state)


@dataclass(frozen=True)
class DataSizes:
    """Bytes of a model's chunks before anything is allocated.

    ``total``: all chunks that are kept. ``working``: the most that an update needs on DEVICE at once.
    ``largest``: the largest chunk. Over several ranks also the chunks that are whole only while used:
    ``windows``, all parameter chunks; ``small_windows``, those of them that stay whole; ``largest_window``;
    ``largest_gradient``; ``room``, the chunk for an update that needs all of a parameter.
    """

    total: int
    working: int
    largest: int
    windows: int = 0
    small_windows: int = 0
    largest_window: int = 0
    largest_gradient: int = 0
    room: int = 0


def places_in_room(numel: int, dtypes: Iterable[torch.dtype]) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes in bytes of tensors with ``numel`` elements that lie one behind another,
    aligned like chunks."""
    sizes = [round_up(numel * dtype.itemsize, CHUNK_ALIGN_BYTES) for dtype in dtypes]
    return [0, *accumulate(sizes)][:-1], sizes


def plan_groups(
    groups: Sequence[GroupSpec],
    piece_numel: int,
    share: Share | None = None,
    block_bytes: int = CPU.block_bytes,
) -> list[GroupPlan]:
    """Return the plan of each parameter chunk, in the order of the groups. ``piece_numel``: the most elements
    of a state chunk. ``share``: for all groups that have none of their own."""
    plans = []
    step = max(CUT_NUMEL, piece_numel // CUT_NUMEL * CUT_NUMEL)
    of_all = share
    for spec in groups:
        is_own = spec.own_share is not None
        share = spec.own_share or of_all
        for chunk, bare_numel in enumerate(spec.layout.chunk_numels):
            numel = share.whole_numel(bare_numel) if share is not None else bare_numel
            first, end = share.range_of(numel) if share is not None else (0, numel)
            parts = spec.layout.parts_of(chunk)
            pieces = tuple(_pieces(first, end, step, max(1, numel // parts)))
            slots = spec.layout.slots_of(chunk)
            blocks = _blocks_of(pieces, slots)
            kind = spec.dtype, spec.trainable, spec.master
            largest = max((slot.numel for slot in slots), default=0)
            plans.append(GroupPlan(numel, *kind, pieces, blocks, share, block_bytes, largest, parts, is_own))
    return plans


def _pieces(first: int, end: int, step: int, part_numel: int) -> Iterator[tuple[int, int]]:
    """Split ``[first, end)`` into pieces of at most ``step`` elements that do not cross parts."""
    for begin in range(first, end, part_numel):
        stop = min(begin + part_numel, end)
        yield from ((start, min(start + step, stop)) for start in range(begin, stop, step))


def _blocks_of(pieces: Sequence[tuple[int, int]], slots: Sequence[TensorSlot]) -> tuple[tuple[int, int], ...]:
    """Return the range of the chunk's parameter blocks in each piece; no block is in two pieces."""
    offsets = [slot.offset for slot in slots]
    firsts = [0, *accumulate(num_blocks(slot.numel) for slot in slots)]

    def before(place: int) -> int:
        index = bisect_left(offsets, place) - 1  # the last tensor that begins before this place
        if index < 0:
            return 0
        return firsts[index] + num_blocks(min(place - offsets[index], slots[index].numel))

    return tuple((before(start), before(stop)) for start, stop in pieces)


def stays_whole(nbytes: int, largest: int) -> bool:
    """Return whether a gathered chunk is small enough, compared with the ``largest``, to stay."""
    return nbytes * _SMALL_PART <= largest


def data_sizes(needs: Iterable[tuple[GroupPlan, Needs]]) -> DataSizes:
    """Return the sizes of this rank's chunks."""
    each = [_sizes_of(plan, need) for plan, need in needs]

    def most(name: str) -> int:
        return max((getattr(one, name) for one in each), default=0)

    windows = [one.windows for one in each]
    largest_window = max(windows, default=0)
    return DataSizes(
        sum(one.total for one in each),
        most("working"),
        most("largest"),
        sum(windows),
        sum(nbytes for nbytes in windows if stays_whole(nbytes, largest_window)),
        largest_window,
        most("largest_gradient"),
        most("room"),
    )


@lru_cache(maxsize=2**14)  # unfreezing a parameter adds up all groups' sizes again
def _sizes_of(plan: GroupPlan, need: Needs) -> DataSizes:
    params, grads = list(plan.params()), list(plan.gradients()) if need.trains else []
    values = params + grads
    masters = list(plan.masters()) if need.trains or need.masters else []
    states = list(plan.states(need.kept.states))
    kept = [chunk for chunk in values if plan.share is None or chunk.kind in _SHARDS]
    by_piece = [
        sum(chunk.nbytes for chunk in (*masters[index : index + 1], *_nth(states, index, need.kept.states)))
        for index in range(len(plan.pieces))
    ]
    at_once = kept
    if plan.parts > 1 and not need.kept.whole:  # an update needs one part at a time
        at_once = [*params[:1], *grads[:1]]
    whole = [chunk for chunk in values if plan.share is not None and chunk.kind not in _SHARDS]
    room = plan.room(need.kept)
    return DataSizes(
        total=sum(chunk.nbytes for chunk in (*kept, *masters, *states)),
        working=sum(chunk.nbytes for chunk in at_once)
        + (sum(by_piece) if need.kept.whole else max(by_piece, default=0)),
        largest=max(chunk.nbytes for chunk in (*values, *masters, *states)),
        windows=sum(chunk.nbytes for chunk in whole if chunk.kind is ChunkKind.PARAM),
        largest_gradient=sum(chunk.nbytes for chunk in whole if chunk.kind is ChunkKind.GRAD),
        room=room.nbytes if room is not None else 0,
    )


def _nth(chunks: Sequence[ChunkSpec], index: int, states: Sequence[StateSpec]) -> Sequence[ChunkSpec]:
    """Return the state chunks of the piece ``index``, one per state."""
    return chunks[index * len(states) : (index + 1) * len(states)]


_SHARDS = (ChunkKind.SHARD, ChunkKind.GRAD_SHARD)


def chunk_bytes(
    groups: Sequence[GroupSpec], block_bytes: int = CPU.block_bytes
) -> dict[str, tuple[Hashable, int]]:
    """Return for each parameter name the key of its parameter chunk, and that chunk's bytes."""
    return {
        slot.name: (
            (index, slot.chunk),
            whole_blocks(spec.layout.chunk_numels[slot.chunk] * spec.dtype.itemsize, block_bytes),
        )
        for index, spec in enumerate(groups)
        for slot in spec.layout.slots
    }


def largest_operator(
    operators: Iterable[tuple[str, Sequence[str]]], chunks: Mapping[str, tuple[Hashable, int]]
) -> tuple[int, str]:
    """Return the most bytes of parameter chunks that one operator needs at once, and the operator's name.
    ``operators``: pairs of a submodule's name and the names of its parameters; ``chunks``: as from
    :func:`chunk_bytes`."""
    largest, largest_name = 0, ""
    for name, used in operators:
        sizes = dict(chunks[param] for param in used)
        if sum(sizes.values()) > largest:
            largest, largest_name = sum(sizes.values()), name
    return largest, largest_name


def needs_of(groups: Sequence[GroupSpec], trained: Mapping[str, Kept]) -> list[Needs]:
    """Return the needs of each parameter chunk if the parameters in ``trained`` train, with these states
    kept. All parameters that share a chunk with them train as well. Masters exist from the beginning."""
    found = []
    for spec in groups:
        for chunk in range(spec.layout.num_chunks):
            kept = [trained[slot.name] for slot in spec.layout.slots_of(chunk) if slot.name in trained]
            found.append(Needs(spec.trainable, bool(kept), reduce(Kept.joined, kept, Kept())))
    return found
