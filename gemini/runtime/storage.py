"""ModelStorage: which chunks hold which part of a model's parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from gemini.chunk import CPU, Chunk, ChunkKind, ChunkLayout, ChunkManager, ChunkSpec, TensorSlot, TierBudgets
from gemini.chunk.chunk import whole_blocks
from gemini.errors import ConfigError
from gemini.runtime.blocks import is_compiled
from gemini.runtime.gate import Gate, TensorRef
from gemini.runtime.gradient import SlotGradient
from gemini.runtime.mixture import Mixture
from gemini.runtime.state_piece import StatePiece
from gemini.zero.gradient import ShardedGradient, ShardPlace
from gemini.zero.share import GroupShard, Share, stays_whole

# State pieces begin at multiples of this many elements, so that every kind stays 4 KiB aligned.
_PIECE_ALIGN = 2048


@dataclass(frozen=True)
class GroupSpec:
    """Parameters of one dtype that either all train or are all frozen, and their layout."""

    layout: ChunkLayout
    dtype: torch.dtype
    trainable: bool
    master: bool


class GradientWatcher(Protocol):
    """Is told of each gradient."""

    def note(self, slot: ManagedSlot, *, is_watched: bool) -> None:
        """Backward has made a gradient, which is in its chunk; ``is_watched``: hooks of the user are to see
        it next."""


@dataclass
class ChunkGroup:
    """A parameter chunk and the gradient and state chunks that go with it.

    Over several ranks ``param`` and ``grad`` are whole only while they are used; ``shard`` is what this rank
    owns of them, and ``pieces`` cover that part alone.
    """

    param: Chunk
    grad: Chunk | None
    pieces: list[StatePiece]
    shard: GroupShard | None = None
    slots: list[ManagedSlot] = field(default_factory=list)
    watcher: GradientWatcher | None = None  # of the gradients of its parameters

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 masters, be they this rank's or others'."""
        return any(piece.has(ChunkKind.MASTER) for piece in self.pieces)

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` where an update changes them: in the shard if there is one."""
        if self.shard is not None:
            return self.shard.param_flat(start, stop)
        return self.param.tensor[start:stop]

    @property
    def updated(self) -> tuple[Chunk, Chunk | None, int]:
        """The chunks of parameters and gradients that an update uses, the latter None for what is frozen, and
        the element that both begin at: those of the shard if there is one."""
        if self.shard is not None:
            return self.shard.param, self.shard.grad, self.shard.start
        return self.param, self.grad, 0

    def value_tensors(self, slots: Sequence[ManagedSlot]) -> list[int]:
        """Return the tensors to pin before :meth:`values` of ``slots`` are used."""
        if self.shard is not None:
            return [self.shard.param_tensor]
        return [slot.param_ref.tensors[0] for slot in slots]


class ManagedSlot:
    """One parameter: its place in its group's chunks and its gradient."""

    def __init__(self, gate: Gate, group: ChunkGroup, slot: TensorSlot) -> None:
        self.name = slot.name
        self.group = group
        self.start = slot.offset
        self.stop = slot.offset + slot.numel
        add = gate.chunks.add_tensor
        self.param_ref = TensorRef(gate, add(group.param))
        self.param_view = torch.as_strided(group.param.tensor, slot.shape, slot.stride, slot.offset)
        self.grad: SlotGradient | None = None  # None: frozen when the model was wrapped
        if group.grad is not None:
            view = torch.as_strided(group.grad.tensor, slot.shape, slot.stride, slot.offset)
            if group.shard is not None and group.shard.grad is not None:
                own = group.shard.clip(self.start, self.stop)
                place = ShardPlace(add(group.shard.grad), group.shard, *own, self.start)
                self.grad = ShardedGradient(slot.name, gate, add(group.grad), view, place)
            else:
                self.grad = SlotGradient(slot.name, gate, add(group.grad), view)

    def overlapping(self, piece: StatePiece) -> tuple[int, int]:
        """Return the elements of the chunk that belong to both this parameter and ``piece``; empty if start
        >= stop."""
        return max(self.start, piece.start), min(self.stop, piece.stop)

    @property
    def has_grad(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.grad is not None and self.grad.exists

    @property
    def trainable_grad(self) -> SlotGradient:
        """The gradient of a parameter that trains.

        Raises:
            ConfigError: the parameter was frozen when the model was wrapped.
        """
        if self.grad is None:
            raise ConfigError(
                f"parameter {self.name!r} was frozen when the model was wrapped; wrap it after unfreezing"
            )
        return self.grad

    def free_grad(self) -> None:
        """Give up the gradient's memory."""
        if self.grad is not None:
            self.grad.free()


def slot_of(param: torch.Tensor) -> ManagedSlot:
    """Return the slot of a managed parameter."""
    slot = param._slot  # type: ignore[attr-defined]
    assert isinstance(slot, ManagedSlot)
    return slot


class ModelStorage:
    """Every chunk of one model, by group; builds them and answers which tensors share them."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        piece_numel: int,
        budgets: TierBudgets,
        make_chunks: Callable[[Sequence[ChunkSpec], TierBudgets], ChunkManager] = ChunkManager,
        share: Share | None = None,
        block_bytes: int = CPU.block_bytes,
    ) -> None:
        """Reserve windows and tiers for all groups. ``piece_numel`` bounds a state chunk, in elements;
        ``make_chunks`` gives the chunks their memory, in blocks of ``block_bytes``; ``share`` is this rank's
        part of them, None: all."""
        self._plans = [
            _plan_group(spec, numel, piece_numel, share, block_bytes)
            for spec in groups
            for numel in spec.layout.chunk_numels
        ]
        specs = [chunk for plan in self._plans for chunk in plan.specs()]
        largest = max((plan.numel for plan in self._plans if plan.trainable), default=0)
        if share is not None and largest:
            specs.append(ChunkSpec(ChunkKind.EXCHANGE, largest, torch.float32, block_bytes))
        self.chunks = make_chunks(specs, budgets)
        self.groups = self._build()
        # Where parts of a gradient arrive from other ranks.
        self.exchange = self.chunks.chunks[-1] if share is not None and largest else None
        self._layouts = [(spec, base) for spec, base in zip(groups, _bases(groups), strict=True)]
        self.slots: dict[str, ManagedSlot] = {}
        self.mixture = Mixture()

    def register(self, gate: Gate) -> None:
        """Create a slot per parameter, whose use goes through ``gate``."""
        for spec, base in self._layouts:
            for slot in spec.layout.slots:
                group = self.groups[base + slot.chunk]
                managed = ManagedSlot(gate, group, slot)
                group.slots.append(managed)
                self.slots[slot.name] = managed

    def watch_gradients(self, watcher: GradientWatcher | None) -> None:
        """Tell ``watcher`` of every gradient from now on; None: nobody."""
        for group in self.groups:
            group.watcher = watcher

    def parameter_names(self) -> dict[int, str]:
        """Return which tensor of the chunk table is which parameter."""
        return {slot.param_ref.tensors[0]: name for name, slot in self.slots.items()}

    def trainable_groups(self) -> Iterator[ChunkGroup]:
        """Yield the groups that an optimizer updates, in forward order."""
        return (group for group in self.groups if group.grad is not None)

    @property
    def wasted_bytes(self) -> int:
        """What parameter chunks hold beside parameters, counted as fp32."""
        used = sum(slot.param_view.numel() for slot in self.slots.copy().values())
        held = sum(group.param.spec.numel for group in self.groups)
        return (held - used) * 4

    def _build(self) -> list[ChunkGroup]:
        chunks = iter(self.chunks.chunks)
        groups = []
        for plan in self._plans:
            param = next(chunks)
            grad = next(chunks) if plan.trainable else None
            shard = self._shard(plan, chunks) if plan.share is not None else None
            pieces = []
            for start, stop in plan.pieces:
                owned = {kind: next(chunks) for kind in plan.state_kinds}
                tensors = {kind: self.chunks.add_tensor(chunk) for kind, chunk in owned.items()}
                pieces.append(StatePiece(start, stop, owned, tensors))
            groups.append(ChunkGroup(param, grad, pieces, shard))
        return groups

    def _shard(self, plan: _GroupPlan, chunks: Iterator[Chunk]) -> GroupShard:
        param = next(chunks)
        grad = next(chunks) if plan.trainable else None
        return GroupShard(*plan.owned, param, self.chunks.add_tensor(param), grad)


@dataclass(frozen=True)
class _GroupPlan:
    numel: int
    dtype: torch.dtype
    trainable: bool
    state_kinds: tuple[ChunkKind, ...]
    pieces: tuple[tuple[int, int], ...]
    share: Share | None
    block_bytes: int

    @property
    def owned(self) -> tuple[int, int]:
        """The elements ``[start, stop)`` that this rank owns."""
        return self.share.range_of(self.numel) if self.share is not None else (0, self.numel)

    def whole(self) -> Iterator[ChunkSpec]:
        """Yield the chunks that hold the parameters and their gradients whole."""
        # Over ranks gradients are summed, and accumulated, in fp32.
        grad_dtype = self.dtype if self.share is None else torch.float32
        yield self._spec(ChunkKind.PARAM, self.numel, self.dtype)
        if self.trainable:
            yield self._spec(ChunkKind.GRAD, self.numel, grad_dtype)

    def kept(self) -> Iterator[ChunkSpec]:
        """Yield the further chunks: this rank's shards and optimizer states."""
        if self.share is not None:
            start, stop = self.owned
            yield self._spec(ChunkKind.SHARD, stop - start, self.dtype)
            if self.trainable:
                yield self._spec(ChunkKind.GRAD_SHARD, stop - start, torch.float32)
        for start, stop in self.pieces:
            for kind in self.state_kinds:
                yield self._spec(kind, stop - start, torch.float32)

    def _spec(self, kind: ChunkKind, numel: int, dtype: torch.dtype) -> ChunkSpec:
        return ChunkSpec(kind, numel, dtype, self.block_bytes)

    def specs(self) -> Iterator[ChunkSpec]:
        """Yield the chunks of the group in the order in which they are built."""
        yield from self.whole()
        yield from self.kept()


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


def model_data_sizes(
    groups: Sequence[GroupSpec],
    piece_numel: int,
    share: Share | None = None,
    block_bytes: int = CPU.block_bytes,
) -> DataSizes:
    """Return the sizes of this rank's chunks."""
    total, working, largest = 0, 0, 0
    windows, gradients = [0], [0]
    for spec in groups:
        for numel in spec.layout.chunk_numels:
            plan = _plan_group(spec, numel, piece_numel, share, block_bytes)
            whole, kept = list(plan.whole()), list(plan.kept())
            total += sum(chunk.nbytes for chunk in (kept if share is not None else whole + kept))
            largest = max(largest, *(chunk.nbytes for chunk in whole + kept))
            state = max((stop - start for start, stop in plan.pieces), default=0) * 4
            states = whole_blocks(state, block_bytes) * len(plan.state_kinds)
            values = [c for c in kept if c.kind in _SHARDS] if share is not None else whole
            working = max(working, sum(chunk.nbytes for chunk in values) + states)
            if share is not None:
                windows.append(whole[0].nbytes)
                gradients += [chunk.nbytes for chunk in whole[1:]]
    small = sum(nbytes for nbytes in windows if stays_whole(nbytes, max(windows)))
    return DataSizes(total, working, largest, sum(windows), small, max(windows), max(gradients))


_SHARDS = (ChunkKind.SHARD, ChunkKind.GRAD_SHARD)


def largest_operator(
    module: nn.Module, groups: Sequence[GroupSpec], block_bytes: int = CPU.block_bytes
) -> tuple[int, str]:
    """Return the most bytes of parameter chunks that one submodule's operator takes at once, and that
    submodule's name.

    Known for torch's own layers: an operator takes the parameters that its submodule holds directly;
    attention takes its output projection's too; and for what is compiled, which takes all. What other
    submodules do with theirs shows only when they run.
    """

    def nbytes(spec: GroupSpec, chunk: int) -> int:
        return whole_blocks(spec.layout.chunk_numels[chunk] * spec.dtype.itemsize, block_bytes)

    chunks = {
        slot.name: ((index, slot.chunk), nbytes(spec, slot.chunk))
        for index, spec in enumerate(groups)
        for slot in spec.layout.slots
    }
    names = {id(param): name for name, param in module.named_parameters()}
    largest, largest_name = 0, ""
    for name, owner in module.named_modules():
        home = type(owner).__module__
        whole = is_compiled(owner)
        if not whole and (not home.startswith("torch.nn.modules.") or home == nn.ParameterList.__module__):
            continue
        used = owner.parameters(recurse=whole or isinstance(owner, nn.MultiheadAttention))
        sizes = dict(chunks[names[id(param)]] for param in used)
        if sum(sizes.values()) > largest:
            largest, largest_name = sum(sizes.values()), name or type(owner).__name__
    return largest, largest_name


def _plan_group(
    spec: GroupSpec, numel: int, piece_numel: int, share: Share | None, block_bytes: int
) -> _GroupPlan:
    kinds: tuple[ChunkKind, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    if share is not None:
        numel = share.whole_numel(numel)
    if spec.trainable:
        kinds = (ChunkKind.EXP_AVG, ChunkKind.EXP_AVG_SQ)
        kinds = (ChunkKind.MASTER, *kinds) if spec.master else kinds
        step = max(_PIECE_ALIGN, piece_numel // _PIECE_ALIGN * _PIECE_ALIGN)
        first, end = share.range_of(numel) if share is not None else (0, numel)
        pieces = tuple((start, min(start + step, end)) for start in range(first, end, step))
    return _GroupPlan(numel, spec.dtype, spec.trainable, kinds, pieces, share, block_bytes)


def _bases(groups: Sequence[GroupSpec]) -> list[int]:
    bases, base = [], 0
    for spec in groups:
        bases.append(base)
        base += len(spec.layout.chunk_numels)
    return bases
