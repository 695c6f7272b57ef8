"""ModelStorage: the chunks that hold a model's parameters, gradients and optimizer states. Mixture: whether a
failure left weights that do not belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from gemini.chunk import Chunk, ChunkManager, TierBudgets
from gemini.chunk.chunk import BLOCK_NUMEL, ChunkKind, ChunkSpec, CutChunk, StateSpec, num_blocks
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.layout import TensorSlot
from gemini.comm.peers import Share
from gemini.errors import ConfigError, StateError
from gemini.runtime.gate.gate import CutRef, Gate, TensorRef
from gemini.runtime.gate.gradients import MASTER, StatePiece
from gemini.runtime.intercept.quantized import QuantizedForm
from gemini.runtime.storage.cut_gradient import CutGradient
from gemini.runtime.storage.data_sizes import (
    DataSizes,
    GroupPlan,
    GroupSpec,
    Kept,
    Needs,
    data_sizes,
    plan_groups,
)
from gemini.runtime.storage.gradient import GroupShard, ShardedGradient, ShardPlace, SlotGradient

HALF_LOADED = "a load failed half-way and left a mixture of old and new weights"


class Mixture:
    """Records that a load or update failed half-way, until every weight was loaded again.

    ``reason``: what failed half-way; empty if nothing did.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._left: Set[str] | None = None  # weights that must still be loaded; None: all
        self._is_left: Callable[[str], bool] | None = None  # for weights that a write completes, too

    def begin(self, reason: str) -> None:
        """Mark the weights as a mixture for ``reason`` until :meth:`clear`."""
        self.reason, self._left, self._is_left = reason, None, None

    def await_load(self, reason: str, names: Set[str], is_left: Callable[[str], bool]) -> None:
        """Mark the weights as a mixture for ``reason`` until each of ``names`` was loaded, or
        ``is_left(name)`` is False."""
        self.reason, self._left, self._is_left = reason, names, is_left

    @contextmanager
    def change(self, reason: str) -> Iterator[None]:
        """Mark the weights as a mixture for ``reason`` during the block, and permanently if it raises."""
        before = self.reason, self._left, self._is_left
        self.begin(reason)
        yield
        self.reason, self._left, self._is_left = before

    @contextmanager
    def load(self, names: Set[str], every: Set[str]) -> Iterator[None]:
        """Mark the weights as a mixture during the block, which loads ``names`` out of all names in
        ``every``; and permanently if it raises. After it, weights that an earlier failure left must still be
        loaded."""
        left: Set[str] = frozenset()
        if self.reason:
            left = every if self._left is None else self._left
        with self.change(HALF_LOADED):
            self._left = names | left
            yield
        self._left = left - names
        if not self._left:
            self.clear()

    def clear(self) -> None:
        """Mark the weights as consistent."""
        self.reason, self._left, self._is_left = "", None, None

    def refuse(self, doing: str) -> None:
        """Raise StateError if weights are a mixture."""
        if self._left is not None and self._is_left is not None:
            self._left = frozenset(filter(self._is_left, self._left))
            if not self._left:
                self.clear()
        if self.reason:
            raise StateError(
                f"{doing}: {self.reason}; load a checkpoint (gemini.checkpoint.load), or all weights "
                "(model.load_state_dict), before you continue. model.module.state_dict() returns the "
                "present values"
            )


class MakeChunks(Protocol):
    """Creates the chunk manager, which gives chunks their memory."""

    def __call__(
        self, specs: Sequence[ChunkSpec], budgets: TierBudgets, *, expected: Sequence[ChunkSpec]
    ) -> ChunkManager: ...


class Room(NamedTuple):
    """A chunk for everything that one update needs at once, without content between updates, and its
    tensor."""

    chunk: Chunk
    tensor: int


class GradientWatcher(Protocol):
    """Is notified of each gradient."""

    def note(self, slot: ManagedSlot, *, is_watched: bool) -> None:
        """Called after backward put a gradient into its chunk; ``is_watched``: hooks of the user see it
        next."""


@dataclass(eq=False)
class ChunkGroup:
    """A parameter chunk and the gradient and state chunks that belong to it.

    If no parameter of it trains, it has no gradient and no pieces. Over several ranks ``param`` and ``grad``
    are whole only while they are used; ``shard`` is this rank's part of them, and ``pieces`` cover only this
    part.
    """

    number: int  # in forward order, except for groups added later
    plan: GroupPlan
    param: Chunk | CutChunk
    grad: Chunk | CutChunk | None = None
    pieces: list[StatePiece] = field(default_factory=list)
    shard: GroupShard | None = None
    slots: list[ManagedSlot] = field(default_factory=list)  # parameters that the module has now
    members: list[ManagedSlot] = field(default_factory=list)  # all parameters that it ever had
    kept: Kept = field(default_factory=Kept)  # states of its parameters that optimizers keep
    watcher: GradientWatcher | None = None  # notified of its gradients
    choice: int | None = None  # a chunk of the choice that its chunks belong to

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 masters, on this rank or on others."""
        return any(piece.has_master for piece in self.pieces)

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the memory that an update changes: of the shard if there is
        one."""
        if self.shard is not None:
            return self.shard.param_flat(start, stop)
        return self.param.tensor[start:stop]

    @property
    def updated(self) -> tuple[Chunk | CutChunk, Chunk | CutChunk | None, int]:
        """The parameter and gradient chunks that an update uses, and the element at which both begin. The
        gradient chunk is None for a frozen group. Shards, if there are any."""
        if self.shard is not None:
            return self.shard.param, self.shard.grad, self.shard.start
        return self.param, self.grad, 0

    def stretches(self, slot: ManagedSlot, start: int, stop: int) -> Iterator[tuple[int, int, list[int]]]:
        """Split elements ``[start, stop)`` of a parameter, counted as in :meth:`values`, into stretches that
        are pinned one at a time. Yields the begin, the end, and the tensors to pin."""
        if not isinstance(self.param, CutChunk):
            yield start, stop, self.value_tensors([slot])
            return
        size = self.param.parts[0].spec.numel
        for index in range(start // size, -(-stop // size)):
            begin, end = max(start, index * size), min(stop, (index + 1) * size)
            yield begin, end, [slot.param_ref.tensors[index]]

    def value_tensors(self, slots: Sequence[ManagedSlot]) -> list[int]:
        """Return the tensors to pin before :meth:`values` of ``slots`` are used."""
        if self.shard is not None:
            return [self.shard.param_tensor]
        return [tensor for slot in slots for tensor in slot.param_ref.tensors]

    @property
    def parts(self) -> Sequence[tuple[int, int]]:
        """The elements ``[start, stop)`` of each part, if both parameter and gradient chunk are cut; else
        ()."""
        if not isinstance(self.grad, CutChunk):
            return ()
        size = self.grad.parts[0].spec.numel
        return [(start, start + size) for start in range(0, self.grad.spec.numel, size)]

    def tensors_under(self, piece: StatePiece, slots: Sequence[ManagedSlot]) -> list[int]:
        """Return the tensors to pin before the elements of ``slots`` within ``piece`` are used."""
        if not isinstance(self.param, CutChunk):
            return self.value_tensors(slots)
        found = [self.stretches(slot, *slot.overlapping(piece)) for slot in slots]
        return [tensor for stretches in found for _, _, tensors in stretches for tensor in tensors]


class ManagedSlot:
    """The place of one parameter in its group's chunks, and its gradient."""

    def __init__(self, gate: Gate, group: ChunkGroup, slot: TensorSlot, first_block: int) -> None:
        """``first_block``: the number of blocks of all parameters before it in its chunk."""
        self.name = slot.name
        self.group = group
        self.start = slot.offset
        self.stop = slot.offset + slot.numel
        self._first_block = first_block
        self.param_ref = _ref(gate, group.param)
        self.param_view = torch.as_strided(group.param.tensor, slot.shape, slot.stride, slot.offset)
        self.grad: SlotGradient | None = None  # None: it was frozen when wrapped and since
        self.form: QuantizedForm | None = None  # format of a quantized weight's bytes
        if group.grad is not None:
            self.make_grad(group.grad)

    def make_grad(self, chunk: Chunk | CutChunk) -> SlotGradient:
        """Create the gradient, with its place in ``chunk``, the group's gradient chunk."""
        gate, view, shard = self.param_ref.manager, self.param_view, self.group.shard
        add = gate.chunks.add_tensor
        place = torch.as_strided(chunk.tensor, view.shape, view.stride(), self.start)
        if isinstance(chunk, CutChunk):
            self.grad = CutGradient(self.name, _cut_ref(gate, chunk), place)
            assert isinstance(self.param_ref, CutRef)
            self.param_ref.train_rows(self.grad)
        elif shard is not None and shard.grad is not None:
            assert isinstance(self.group.grad, Chunk)
            own = shard.clip(self.start, self.stop)
            part = ShardPlace(add(shard.grad), shard, *own, self.start)
            self.grad = ShardedGradient(self.name, gate, add(chunk), place, part)
        else:
            self.grad = SlotGradient(self.name, gate, TensorRef(gate, add(chunk)), place)
        return self.grad

    def set_quantized_form(self, form: QuantizedForm) -> None:
        """Note that the parameter is the bytes of a quantized weight in the format ``form``."""
        self.form = form

    def rename(self, name: str) -> None:
        """Set the parameter's name."""
        self.name = name
        if self.grad is not None:
            self.grad.rename(name)

    def overlapping(self, piece: StatePiece) -> tuple[int, int]:
        """Return the range of chunk elements that both this parameter and ``piece`` contain; empty if start
        >= stop."""
        return max(self.start, piece.start), min(self.stop, piece.stop)

    def span_under(self, piece: StatePiece) -> tuple[int, int]:
        """Return the range of this parameter's elements that ``piece`` contains."""
        start, stop = self.overlapping(piece)
        return start - self.start, stop - self.start

    def place_in(self, piece: StatePiece, state: StateSpec) -> slice:
        """Return the slice of a state's chunk with the values of this parameter in ``piece``."""
        start, stop = self.overlapping(piece)
        if not state.per_block:
            return slice(start - piece.start, stop - piece.start)
        first = self._first_block + (start - self.start) // BLOCK_NUMEL - piece.first_block
        return slice(first, first + num_blocks(stop - start))

    def span_in(self, piece: StatePiece, state: StateSpec) -> slice:
        """Return the slice of this parameter's state, flat, that ``piece`` contains."""
        start, stop = (place - self.start for place in self.overlapping(piece))
        if state.per_block:
            return slice(start // BLOCK_NUMEL, num_blocks(stop))
        return slice(start, stop)

    def state_in(self, piece: StatePiece, state: StateSpec) -> torch.Tensor:
        """Return the values of this parameter's state in ``piece``; pin the state's chunk before."""
        return piece.chunks[state.key].tensor[self.place_in(piece, state)]

    @property
    def pieces(self) -> list[StatePiece]:
        """The state pieces on this rank that contain a part of this parameter."""
        return [p for p in self.group.pieces if self.start < p.stop and p.start < self.stop]

    @property
    def has_grad(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.grad is not None and self.grad.exists

    @property
    def trainable_grad(self) -> SlotGradient:
        """The gradient of a parameter that trains.

        Raises:
            ConfigError: the parameter is frozen and always was.
        """
        if self.grad is None:
            raise ConfigError(
                f"parameter {self.name!r} is frozen and has no memory for a gradient; unfreeze it "
                "first: param.requires_grad_(True)"
            )
        return self.grad

    def free_grad(self) -> None:
        """Discard the gradient and free its memory."""
        if self.grad is not None:
            self.grad.free()


def _ref(gate: Gate, chunk: Chunk | CutChunk) -> TensorRef:
    """Return a reference to a new tensor of a chunk; of a cut chunk, to a tensor of each part."""
    add = gate.chunks.add_tensor
    return _cut_ref(gate, chunk) if isinstance(chunk, CutChunk) else TensorRef(gate, add(chunk))


def _cut_ref(gate: Gate, chunk: CutChunk) -> CutRef:
    gate.expect_cut()
    tensors = [gate.chunks.add_tensor(part) for part in chunk.parts]
    first = chunk.parts[0]
    return CutRef(gate, tensors, first.window.address, first.spec.nbytes)


def slot_of(param: torch.Tensor) -> ManagedSlot:
    """Return the slot of a managed parameter."""
    slot = param._slot  # type: ignore[attr-defined]
    assert isinstance(slot, ManagedSlot)
    return slot


class ModelStorage:
    """All chunks of one model, by group: creates them, and finds the chunks and slots of parameters."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        piece_numel: int,
        budgets: TierBudgets,
        make_chunks: MakeChunks = ChunkManager,
        share: Share | None = None,
        block_bytes: int = CPU.block_bytes,
        expected_states: Sequence[StateSpec] = (),
    ) -> None:
        """Reserve windows and tiers for all groups, and addresses (no memory) for chunks that may come later:
        gradients of parameters that are unfrozen, and ``expected_states``. ``piece_numel``: the most elements
        of a state chunk. ``make_chunks`` gives the chunks their memory, in blocks of ``block_bytes``.
        ``share``: this rank's part of the chunks; None: all."""
        self._piece_numel, self._share, self._block_bytes = piece_numel, share, block_bytes
        self._expected_states = tuple(expected_states)
        self._watcher: GradientWatcher | None = None
        plans = self.plans(groups)
        specs = [chunk for plan in plans for chunk in plan.at_first()]
        self.chunks = make_chunks(specs, budgets, expected=self._expected(plans))
        self.groups: list[ChunkGroup] = []
        self._build(plans, iter(self.chunks.chunks))
        self.trains = False  # an optimizer was created: gradients count in sizes, too
        self.exchange: Chunk | None = None  # receives parts of gradients from other ranks
        self.widen_exchange()
        self.room: Room | None = None  # holds a whole parameter that is cut over ranks during its update
        self._layouts = list(groups)  # layouts without slots so far
        self.slots: dict[str, ManagedSlot] = {}
        self.mixture = Mixture()

    def register(self, gate: Gate) -> None:
        """Create a slot per parameter; uses of the parameters go through ``gate``."""
        self._register(gate, self._layouts, 0)
        self._layouts.clear()

    def add_choice(self, groups: Sequence[ChunkGroup], members: Sequence[Sequence[int]]) -> None:
        """Register chunks of ``groups`` as a choice in the chunk table; chunks that these groups get later
        join it."""
        self.chunks.add_choice(members)
        for group in groups:
            group.choice = members[0][0]

    def watch_gradients(self, watcher: GradientWatcher | None) -> None:
        """Notify ``watcher`` of every gradient from now on; None: nobody."""
        self._watcher = watcher
        for group in self.groups:
            group.watcher = watcher

    def parameter_names(self) -> dict[int, str]:
        """Return the parameter name of each tensor of the chunk table."""
        return {tensor: name for name, slot in self.slots.items() for tensor in slot.param_ref.tensors}

    def trainable_groups(self) -> Iterator[ChunkGroup]:
        """Yield the groups that an optimizer updates, in forward order."""
        return (group for group in self.groups if group.grad is not None)

    @property
    def wasted_bytes(self) -> int:
        """Padding of the parameter chunks, counted as fp32."""
        used = sum(slot.param_view.numel() for slot in self.slots.copy().values())
        held = sum(group.param.spec.numel for group in self.groups)
        return (held - used) * 4

    # -- later chunks ----------------------------------------------------------------------------

    def sizes(
        self, more: Mapping[ChunkGroup, Kept] = MappingProxyType({}), plans: Sequence[GroupPlan] = ()
    ) -> DataSizes:
        """Return the sizes of all chunks, as if an optimizer trained the groups in ``more`` and kept these
        states of them, and as if the groups of ``plans`` were added."""
        trains = self.trains or bool(more)
        each = [(plan, Needs(plan.trainable and plan.master, plan.trainable and trains)) for plan in plans]
        for group in self.groups:
            trained = trains and (group.grad is not None or group in more)
            kept = group.kept.joined(more.get(group, Kept()))
            each.append((group.plan, Needs(group.has_master, trained, kept)))
        return data_sizes(each)

    def missing(self, more: Mapping[ChunkGroup, Kept]) -> list[ChunkSpec]:
        """Return the chunks that :meth:`sizes` counts for ``more`` and that do not exist yet."""
        found: list[ChunkSpec] = []
        for group, kept in more.items():
            if group.grad is None:
                found += [*group.plan.gradients(), *group.plan.masters()]
            found += group.plan.states(_new(kept.states, group.kept.states))
        room = self._wider_room(more)
        return found if room is None else [*found, room]

    def add(self, more: Mapping[ChunkGroup, Kept]) -> None:
        """Create the chunks that :meth:`missing` returns. Those of masters have no content."""
        room = self._wider_room(more)
        for group, kept in more.items():
            if group.grad is None:
                self._add_gradients(group, iter([self.chunks.add_chunk(c) for c in group.plan.gradients()]))
                for piece, spec in zip(group.pieces, group.plan.masters(), strict=False):
                    self._add_state(piece, MASTER, self.chunks.add_chunk(spec))
                self._widen_choice(group, [gradient_chunks(group), *master_chunks(group)])
            self._add_states(group, _new(kept.states, group.kept.states))
            group.kept = group.kept.joined(kept)
        if room is not None:
            chunk = self.chunks.add_chunk(room)
            self.room = Room(chunk, self.chunks.add_tensor(chunk))
        self.trains = True

    def _wider_room(self, more: Mapping[ChunkGroup, Kept]) -> ChunkSpec | None:
        """Return the room that updates need with ``more``; None if the existing one is large enough."""
        held = self.room.chunk.spec.numel if self.room is not None else 0
        largest = _largest_room((group.plan, group.kept.joined(kept)) for group, kept in more.items())
        return next((room for room in largest if room.numel > held), None)

    def widen_exchange(self) -> bool:
        """Make the exchange chunk large enough for the largest gradient; say whether a new chunk was
        created."""
        plans = [group.plan for group in self.trainable_groups()]
        if not plans or plans[0].share is None:
            return False
        largest = max(plans, key=lambda plan: plan.numel)
        if self.exchange is not None and self.exchange.spec.numel >= largest.numel:
            return False
        self.exchange = self.chunks.add_chunk(_exchange(largest))
        return True

    # -- parameters added to the module later, or removed -------------------------------------------

    def plans(self, specs: Sequence[GroupSpec]) -> list[GroupPlan]:
        """Return the plan of each parameter chunk of ``specs``."""
        return plan_groups(specs, self._piece_numel, self._share, self._block_bytes)

    def expected(self, plans: Sequence[GroupPlan]) -> list[ChunkSpec]:
        """Return the chunks of ``plans``, those created at once and those that may come later."""
        return [*(chunk for plan in plans for chunk in plan.at_first()), *self._expected(plans)]

    def widen(self, specs: Sequence[GroupSpec], plans: Sequence[GroupPlan], gate: Gate) -> list[ManagedSlot]:
        """Create the chunks and slots of additional parameters, without values; return the slots."""
        base = len(self.groups)
        chunks = [self.chunks.add_chunk(chunk) for plan in plans for chunk in plan.at_first()]
        self._build(plans, iter(chunks))
        return self._register(gate, specs, base)

    def rename(self, names: Mapping[ManagedSlot, str]) -> None:
        """Set the current parameters and their names. Chunks of parameters that are left out stay."""
        for slot, name in names.items():
            slot.rename(name)
        self.slots.clear()
        self.slots.update((name, slot) for slot, name in names.items())
        for group in self.groups:
            group.slots.clear()
        for slot in sorted(names, key=lambda slot: slot.start):
            slot.group.slots.append(slot)

    # -- inside ----------------------------------------------------------------------------------

    def _expected(self, plans: Sequence[GroupPlan]) -> list[ChunkSpec]:
        """Return the chunks that may come later for groups with these ``plans``."""
        expected = [chunk for plan in plans for chunk in plan.later(self._expected_states)]
        # One for the parameters that train now, and a larger one later.
        if plans and plans[0].share is not None:
            expected += [_exchange(max(plans, key=lambda plan: plan.numel))] * 2
            arrays = tuple(state for state in self._expected_states if not state.per_block)
            expected += _largest_room((plan, Kept(arrays, True)) for plan in plans)
        return expected

    def _register(self, gate: Gate, specs: Sequence[GroupSpec], base: int) -> list[ManagedSlot]:
        """Create the slots of ``specs``; ``base`` is the number of their first group."""
        slots = []
        for spec in specs:
            first_blocks: Counter[int] = Counter()
            for place in spec.layout.slots:
                group = self.groups[base + place.chunk]
                slot = ManagedSlot(gate, group, place, first_blocks[place.chunk])
                first_blocks[place.chunk] += num_blocks(place.numel)
                group.slots.append(slot)
                group.members.append(slot)
                self.slots[place.name] = slot
                slots.append(slot)
            base += spec.layout.num_chunks
        return slots

    def _build(self, plans: Sequence[GroupPlan], chunks: Iterator[Chunk]) -> None:
        for plan in plans:
            parts = [next(chunks) for _ in range(plan.parts)]
            param = parts[0] if len(parts) == 1 else self.chunks.join(parts)
            group = ChunkGroup(len(self.groups), plan, param, watcher=self._watcher)
            if plan.share is not None:
                shard = next(chunks)
                group.shard = GroupShard(*plan.owned, shard, self.chunks.add_tensor(shard), None)
            if plan.trainable:
                self._add_gradients(group, chunks)
                for piece in group.pieces if plan.master else ():
                    self._add_state(piece, MASTER, next(chunks))
            self.groups.append(group)

    def _add_gradients(self, group: ChunkGroup, chunks: Iterator[Chunk]) -> None:
        parts = [next(chunks) for _ in range(group.plan.grad_parts)]
        group.grad = parts[0] if len(parts) == 1 else self.chunks.join(parts)
        if group.shard is not None:
            group.shard = replace(group.shard, grad=next(chunks))
        each = zip(group.plan.pieces, group.plan.blocks, strict=True)
        group.pieces = [StatePiece(start, stop, first) for (start, stop), (first, _) in each]

    def _add_states(self, group: ChunkGroup, states: Sequence[StateSpec]) -> None:
        specs = group.plan.states(states)
        for piece in group.pieces:
            for state in states:
                self._add_state(piece, state.key, self.chunks.add_chunk(next(specs)))
        kept = [[piece.chunks[state.key].id for state in states] for piece in group.pieces]
        self._widen_choice(group, kept if states else ())

    def _widen_choice(self, group: ChunkGroup, members: Sequence[Sequence[int]]) -> None:
        if group.choice is not None:
            self.chunks.widen_choice(group.choice, members)

    def _add_state(self, piece: StatePiece, key: str, chunk: Chunk) -> None:
        piece.chunks[key] = chunk
        piece.tensors[key] = self.chunks.add_tensor(chunk)


def gradient_chunks(group: ChunkGroup) -> list[int]:
    """Return the gradient chunks of a group."""
    if group.grad is None:
        return []
    return [part.id for part in group.grad.parts] if isinstance(group.grad, CutChunk) else [group.grad.id]


def master_chunks(group: ChunkGroup) -> list[list[int]]:
    """Return the master chunk of each piece of a group that has one, in a list of its own."""
    return [[piece.chunks[MASTER].id] for piece in group.pieces if piece.has_master]


def _exchange(plan: GroupPlan) -> ChunkSpec:
    return ChunkSpec(ChunkKind.EXCHANGE, plan.numel, torch.float32, plan.block_bytes)


def _largest_room(updated: Iterable[tuple[GroupPlan, Kept]]) -> list[ChunkSpec]:
    """Return the room that is large enough for each of these; empty if none needs one."""
    rooms = [room for plan, kept in updated if (room := plan.room(kept)) is not None]
    return [max(rooms, key=lambda room: room.numel)] if rooms else []


def _new(states: Iterable[StateSpec], known: Sequence[StateSpec]) -> list[StateSpec]:
    return [state for state in states if state not in known]
