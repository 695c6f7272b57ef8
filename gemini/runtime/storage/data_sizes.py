"""Which chunks a model's parameters need, and what they take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from gemini.chunk import CPU, ChunkKind, ChunkLayout, ChunkSpec
from gemini.chunk.chunk import whole_blocks
from gemini.comm.share import Share, stays_whole

# State pieces begin at multiples of this many elements, so that every kind stays 4 KiB aligned.
_PIECE_ALIGN = 2048


@dataclass(frozen=True)
class GroupSpec:
    """Parameters of one dtype that either all train or are all frozen when they are wrapped, and their
    layout. ``master``: whether those that train have fp32 masters."""

    layout: ChunkLayout
    dtype: torch.dtype
    trainable: bool
    master: bool


class Needs(NamedTuple):
    """What a parameter chunk needs beside itself. ``trains``: a gradient and, where its type asks for them,
    masters; ``masters`` alone are what a model has that nobody trains yet. ``states``: how many of each
    element an optimizer keeps."""

    masters: bool = False
    trains: bool = False
    states: int = 0


@dataclass(frozen=True)
class GroupPlan:
    """A parameter chunk and the chunks that may go with it. Over ranks ``pieces`` cover this rank's part."""

    numel: int
    dtype: torch.dtype
    trainable: bool
    master: bool
    pieces: tuple[tuple[int, int], ...]
    share: Share | None
    block_bytes: int

    @property
    def owned(self) -> tuple[int, int]:
        """The elements ``[start, stop)`` that this rank owns."""
        return self.share.range_of(self.numel) if self.share is not None else (0, self.numel)

    def params(self) -> Iterator[ChunkSpec]:
        """Yield the chunk of parameters, then this rank's shard of it."""
        yield self._spec(ChunkKind.PARAM, self.numel, self.dtype)
        if self.share is not None:
            start, stop = self.owned
            yield self._spec(ChunkKind.SHARD, stop - start, self.dtype)

    def gradients(self) -> Iterator[ChunkSpec]:
        """Yield the chunk of gradients, then this rank's shard of it. Over ranks they are summed, and
        accumulated, in fp32."""
        if self.share is None:
            yield self._spec(ChunkKind.GRAD, self.numel, self.dtype)
            return
        start, stop = self.owned
        yield self._spec(ChunkKind.GRAD, self.numel, torch.float32)
        yield self._spec(ChunkKind.GRAD_SHARD, stop - start, torch.float32)

    def masters(self) -> Iterator[ChunkSpec]:
        """Yield the fp32 masters, one chunk a piece; none where the parameters need none."""
        for start, stop in self.pieces if self.master else ():
            yield self._spec(ChunkKind.MASTER, stop - start, torch.float32)

    def states(self, names: Iterable[str]) -> Iterator[ChunkSpec]:
        """Yield the states of these names, one chunk a piece of each, piece by piece."""
        each = list(names)
        for start, stop in self.pieces:
            for name in each:
                yield self._spec(ChunkKind.STATE, stop - start, torch.float32, name)

    def at_first(self) -> Iterator[ChunkSpec]:
        """Yield the chunks that wrapping makes, in the order in which they are built."""
        yield from self.params()
        if self.trainable:
            yield from self.gradients()
            yield from self.masters()

    def later(self, states: Sequence[str]) -> Iterator[ChunkSpec]:
        """Yield the chunks that may come once parameters were unfrozen, or have an optimizer."""
        if not self.trainable:
            yield from self.gradients()
            yield from self.masters()
        yield from self.states(states)

    def _spec(self, kind: ChunkKind, numel: int, dtype: torch.dtype, state: str = "") -> ChunkSpec:
        return ChunkSpec(kind, numel, dtype, self.block_bytes, state)


@dataclass(frozen=True)
class DataSizes:
    """Bytes of a model's chunks before anything is allocated.

    ``total``: all that is kept. ``working``: the most that an update needs on DEVICE at once. ``largest``:
    the largest chunk. Over several ranks, of what is whole only while it is used: ``windows``, all parameter
    chunks; ``small_windows``, those of them that stay; ``largest_window``; ``largest_gradient``.
    """

    total: int
    working: int
    largest: int
    windows: int = 0
    small_windows: int = 0
    largest_window: int = 0
    largest_gradient: int = 0


def plan_groups(
    groups: Sequence[GroupSpec],
    piece_numel: int,
    share: Share | None = None,
    block_bytes: int = CPU.block_bytes,
) -> list[GroupPlan]:
    """Return the plan of each parameter chunk, those of the first group first. ``piece_numel`` bounds a state
    chunk, in elements."""
    plans = []
    step = max(_PIECE_ALIGN, piece_numel // _PIECE_ALIGN * _PIECE_ALIGN)
    for spec in groups:
        for bare_numel in spec.layout.chunk_numels:
            numel = share.whole_numel(bare_numel) if share is not None else bare_numel
            first, end = share.range_of(numel) if share is not None else (0, numel)
            pieces = tuple((start, min(start + step, end)) for start in range(first, end, step))
            plans.append(
                GroupPlan(numel, spec.dtype, spec.trainable, spec.master, pieces, share, block_bytes)
            )
    return plans


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
    )


@lru_cache(maxsize=2**14)  # for each parameter that is unfrozen the sizes of all groups are added up
def _sizes_of(plan: GroupPlan, need: Needs) -> DataSizes:
    values = list(plan.params())
    values += plan.gradients() if need.trains else ()
    masters = list(plan.masters()) if need.trains or need.masters else []
    states = list(plan.states(map(str, range(need.states))))
    kept = [chunk for chunk in values if plan.share is None or chunk.kind in _SHARDS]
    piece = max((stop - start for start, stop in plan.pieces), default=0)
    kinds = bool(masters) + need.states
    whole = [chunk for chunk in values if plan.share is not None and chunk.kind not in _SHARDS]
    return DataSizes(
        total=sum(chunk.nbytes for chunk in (*kept, *masters, *states)),
        working=sum(chunk.nbytes for chunk in kept) + kinds * whole_blocks(piece * 4, plan.block_bytes),
        largest=max(chunk.nbytes for chunk in (*values, *masters, *states)),
        windows=sum(chunk.nbytes for chunk in whole if chunk.kind is ChunkKind.PARAM),
        largest_gradient=sum(chunk.nbytes for chunk in whole if chunk.kind is ChunkKind.GRAD),
    )


_SHARDS = (ChunkKind.SHARD, ChunkKind.GRAD_SHARD)


def largest_operator(
    operators: Iterable[tuple[str, Sequence[str]]],
    groups: Sequence[GroupSpec],
    block_bytes: int = CPU.block_bytes,
) -> tuple[int, str]:
    """Return the most bytes of parameter chunks that one of the ``operators``, of which each names its
    parameters, takes at once, and that submodule's name."""

    def nbytes(spec: GroupSpec, chunk: int) -> int:
        return whole_blocks(spec.layout.chunk_numels[chunk] * spec.dtype.itemsize, block_bytes)

    chunks = {
        slot.name: ((index, slot.chunk), nbytes(spec, slot.chunk))
        for index, spec in enumerate(groups)
        for slot in spec.layout.slots
    }
    largest, largest_name = 0, ""
    for name, used in operators:
        sizes = dict(chunks[param] for param in used)
        if sum(sizes.values()) > largest:
            largest, largest_name = sum(sizes.values()), name
    return largest, largest_name


def needs_of(groups: Sequence[GroupSpec], trained: Mapping[str, int]) -> list[Needs]:
    """Return what each parameter chunk needs where the parameters that ``trained`` names train, each with so
    many states; what shares a chunk with them trains as well. Masters are there from the beginning."""
    found = []
    for spec in groups:
        for chunk in range(spec.layout.num_chunks):
            states = [trained[slot.name] for slot in spec.layout.slots_of(chunk) if slot.name in trained]
            found.append(Needs(spec.trainable, bool(states), max(states, default=0)))
    return found
