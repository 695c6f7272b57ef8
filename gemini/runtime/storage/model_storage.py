"""ModelStorage: which chunks hold which part of a model's parameters, gradients and optimizer states; and
whether the weights belong together, or what failed half-way and left a mixture of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from gemini.chunk import CPU, Chunk, ChunkKind, ChunkManager, ChunkSpec, CutChunk, TensorSlot, TierBudgets
from gemini.chunk.chunk import BLOCK_NUMEL, StateSpec, num_blocks
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

HALF_LOADED = "a load failed half-way and left a mixture of what was there and what was read"


class Mixture:
    """What keeps weights from belonging together, until each of them was loaded again.

    ``reason`` is what failed half-way, empty where nothing did.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._left: Set[str] | None = None  # what is to be loaded yet; None: everything
        self._is_left: Callable[[str], bool] | None = None  # where writing to it does as well

    def begin(self, reason: str) -> None:
        """Count as a mixture for ``reason`` until :meth:`clear`."""
        self.reason, self._left, self._is_left = reason, None, None

    def await_load(self, reason: str, names: Set[str], is_left: Callable[[str], bool]) -> None:
        """Count as a mixture for ``reason`` until each of ``names`` was loaded, or ``is_left`` of it no
        more."""
        self.reason, self._left, self._is_left = reason, names, is_left

    @contextmanager
    def change(self, reason: str) -> Iterator[None]:
        """Count as a mixture for ``reason`` during the block and, where it raises, from then on."""
        before = self.reason, self._left, self._is_left
        self.begin(reason)
        yield
        self.reason, self._left, self._is_left = before

    @contextmanager
    def load(self, names: Set[str], every: Set[str]) -> Iterator[None]:
        """Count as a mixture during the block, which loads ``names`` of ``every`` weight, and, where it
        raises, from then on. After it, what else is to be loaded is left."""
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
        """Everything was loaded, or what was begun is done."""
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
                "(model.load_state_dict), before going on. What there is, model.module.state_dict() has"
            )


class MakeChunks(Protocol):
    """Gives chunks their memory."""

    def __call__(
        self, specs: Sequence[ChunkSpec], budgets: TierBudgets, *, expected: Sequence[ChunkSpec]
    ) -> ChunkManager: ...


class Room(NamedTuple):
    """A chunk for what one update needs at once, without content between updates, and its tensor."""

    chunk: Chunk
    tensor: int


class GradientWatcher(Protocol):
    """Is told of each gradient."""

    def note(self, slot: ManagedSlot, *, is_watched: bool) -> None:
        """Backward has made a gradient, which is in its chunk; ``is_watched``: hooks of the user are to see
        it next."""


@dataclass(eq=False)
class ChunkGroup:
    """A parameter chunk and the gradient and state chunks that go with it.

    Where nothing of it trains there is no gradient, and there are no pieces. Over several ranks ``param`` and
    ``grad`` are whole only while they are used; ``shard`` is what this rank owns of them, and ``pieces``
    cover that part alone.
    """

    number: int  # in forward order, except for what came later
    plan: GroupPlan
    param: Chunk | CutChunk
    grad: Chunk | CutChunk | None = None
    pieces: list[StatePiece] = field(default_factory=list)
    shard: GroupShard | None = None
    slots: list[ManagedSlot] = field(default_factory=list)  # of the parameters that the module has
    members: list[ManagedSlot] = field(default_factory=list)  # of all that it ever had
    kept: Kept = field(default_factory=Kept)  # of its parameters, by optimizers
    watcher: GradientWatcher | None = None  # of the gradients of its parameters
    choice: int | None = None  # of the chunk table, that its chunks are members of: one of them

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 masters, be they this rank's or others'."""
        return any(piece.has_master for piece in self.pieces)

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` where an update changes them: in the shard if there is one."""
        if self.shard is not None:
            return self.shard.param_flat(start, stop)
        return self.param.tensor[start:stop]

    @property
    def updated(self) -> tuple[Chunk | CutChunk, Chunk | CutChunk | None, int]:
        """The chunks of parameters and gradients that an update uses, the latter None for what is frozen, and
        the element that both begin at: those of the shard if there is one."""
        if self.shard is not None:
            return self.shard.param, self.shard.grad, self.shard.start
        return self.param, self.grad, 0

    def stretches(self, slot: ManagedSlot, start: int, stop: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield elements ``[start, stop)`` of a parameter, counted as :meth:`values` does, by what is pinned
        at once: begin, end, and the tensors to pin."""
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
        """The elements ``[start, stop)`` of each part of a parameter chunk that is cut with its gradient; ()
        of others."""
        if not isinstance(self.grad, CutChunk):
            return ()
        size = self.grad.parts[0].spec.numel
        return [(start, start + size) for start in range(0, self.grad.spec.numel, size)]

    def tensors_under(self, piece: StatePiece, slots: Sequence[ManagedSlot]) -> list[int]:
        """Return the tensors to pin before what :meth:`values` has of ``slots`` in ``piece`` is used."""
        if not isinstance(self.param, CutChunk):
            return self.value_tensors(slots)
        found = [self.stretches(slot, *slot.overlapping(piece)) for slot in slots]
        return [tensor for stretches in found for _, _, tensors in stretches for tensor in tensors]


class ManagedSlot:
    """One parameter: its place in its group's chunks and its gradient."""

    def __init__(self, gate: Gate, group: ChunkGroup, slot: TensorSlot, first_block: int) -> None:
        """``first_block``: how many blocks the parameters before it in its chunk have."""
        self.name = slot.name
        self.group = group
        self.start = slot.offset
        self.stop = slot.offset + slot.numel
        self._first_block = first_block
        self.param_ref = _ref(gate, group.param)
        self.param_view = torch.as_strided(group.param.tensor, slot.shape, slot.stride, slot.offset)
        self.grad: SlotGradient | None = None  # None: it was never to train
        self.form: QuantizedForm | None = None  # what the bytes of a quantized weight are
        if group.grad is not None:
            self.make_grad(group.grad)

    def make_grad(self, chunk: Chunk | CutChunk) -> SlotGradient:
        """Have a gradient from now on, with its place in ``chunk``, that of the group."""
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

    def take_form(self, form: QuantizedForm) -> None:
        """Be the bytes of a quantized weight, as ``form`` has them."""
        self.form = form

    def rename(self, name: str) -> None:
        """Have the parameter called ``name`` from now on."""
        self.name = name
        if self.grad is not None:
            self.grad.rename(name)

    def overlapping(self, piece: StatePiece) -> tuple[int, int]:
        """Return the elements of the chunk that belong to both this parameter and ``piece``; empty if start
        >= stop."""
        return max(self.start, piece.start), min(self.stop, piece.stop)

    def span_under(self, piece: StatePiece) -> tuple[int, int]:
        """Return which elements of this parameter ``piece`` has."""
        start, stop = self.overlapping(piece)
        return start - self.start, stop - self.start

    def place_in(self, piece: StatePiece, state: StateSpec) -> slice:
        """Return where in the chunk of a state the values are that ``piece`` has of this parameter."""
        start, stop = self.overlapping(piece)
        if not state.per_block:
            return slice(start - piece.start, stop - piece.start)
        first = self._first_block + (start - self.start) // BLOCK_NUMEL - piece.first_block
        return slice(first, first + num_blocks(stop - start))

    def span_in(self, piece: StatePiece, state: StateSpec) -> slice:
        """Return which values of a state of this parameter, flat, ``piece`` has."""
        start, stop = (place - self.start for place in self.overlapping(piece))
        if state.per_block:
            return slice(start // BLOCK_NUMEL, num_blocks(stop))
        return slice(start, stop)

    def state_in(self, piece: StatePiece, state: StateSpec) -> torch.Tensor:
        """Return what ``piece`` has of a state of this parameter; pin its chunk before."""
        return piece.chunks[state.key].tensor[self.place_in(piece, state)]

    @property
    def pieces(self) -> list[StatePiece]:
        """The state pieces that have a part of this parameter, here."""
        return [p for p in self.group.pieces if self.start < p.stop and p.start < self.stop]

    @property
    def has_grad(self) -> bool:
        """Whether the parameter has a gradient."""
        return self.grad is not None and self.grad.exists

    @property
    def trainable_grad(self) -> SlotGradient:
        """The gradient of a parameter that trains.

        Raises:
            ConfigError: the parameter is frozen, and always was.
        """
        if self.grad is None:
            raise ConfigError(
                f"parameter {self.name!r} is frozen and has no place for a gradient; unfreeze it first: "
                "param.requires_grad_(True)"
            )
        return self.grad

    def free_grad(self) -> None:
        """Give up the gradient's memory."""
        if self.grad is not None:
            self.grad.free()


def _ref(gate: Gate, chunk: Chunk | CutChunk) -> TensorRef:
    """Return what refers to a new tensor of a chunk; of one that is cut, a tensor of each part."""
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
    """Every chunk of one model, by group; builds them and answers which tensors share them."""

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
        """Reserve windows and tiers for all groups, also for what may come later: gradients of what is
        unfrozen, and ``expected_states``, which take addresses and no memory. ``piece_numel`` bounds a state
        chunk, in elements; ``make_chunks`` gives the chunks their memory, in blocks of ``block_bytes``;
        ``share`` is this rank's part of them, None: all."""
        self._piece_numel, self._share, self._block_bytes = piece_numel, share, block_bytes
        self._expected_states = tuple(expected_states)
        self._watcher: GradientWatcher | None = None
        plans = self.plans(groups)
        specs = [chunk for plan in plans for chunk in plan.at_first()]
        self.chunks = make_chunks(specs, budgets, expected=self._expected(plans))
        self.groups: list[ChunkGroup] = []
        self._build(plans, iter(self.chunks.chunks))
        self.trains = False  # there was an optimizer: gradients count as well
        self.exchange: Chunk | None = None  # where parts of a gradient arrive from other ranks
        self.widen_exchange()
        self.room: Room | None = None  # where a parameter of which ranks have parts is whole for its update
        self._layouts = list(groups)  # of which there are no slots yet
        self.slots: dict[str, ManagedSlot] = {}
        self.mixture = Mixture()

    def register(self, gate: Gate) -> None:
        """Create a slot per parameter, whose use goes through ``gate``."""
        self._register(gate, self._layouts, 0)
        self._layouts.clear()

    def add_choice(self, groups: Sequence[ChunkGroup], members: Sequence[Sequence[int]]) -> None:
        """Have chunks of ``groups`` be a choice of the chunk table, and what comes to these groups later."""
        self.chunks.add_choice(members)
        for group in groups:
            group.choice = members[0][0]

    def watch_gradients(self, watcher: GradientWatcher | None) -> None:
        """Tell ``watcher`` of every gradient from now on; None: nobody."""
        self._watcher = watcher
        for group in self.groups:
            group.watcher = watcher

    def parameter_names(self) -> dict[int, str]:
        """Return which tensor of the chunk table is which parameter."""
        return {tensor: name for name, slot in self.slots.items() for tensor in slot.param_ref.tensors}

    def trainable_groups(self) -> Iterator[ChunkGroup]:
        """Yield the groups that an optimizer updates, in forward order."""
        return (group for group in self.groups if group.grad is not None)

    @property
    def wasted_bytes(self) -> int:
        """What parameter chunks hold beside parameters, counted as fp32."""
        used = sum(slot.param_view.numel() for slot in self.slots.copy().values())
        held = sum(group.param.spec.numel for group in self.groups)
        return (held - used) * 4

    # -- what comes later ------------------------------------------------------------------------

    def sizes(
        self, more: Mapping[ChunkGroup, Kept] = MappingProxyType({}), plans: Sequence[GroupPlan] = ()
    ) -> DataSizes:
        """Return what all chunks take, with those that an optimizer needs to train groups of ``more``, of
        which it keeps that, and those of further ``plans``."""
        trains = self.trains or bool(more)
        each = [(plan, Needs(plan.trainable and plan.master, plan.trainable and trains)) for plan in plans]
        for group in self.groups:
            trained = trains and (group.grad is not None or group in more)
            kept = group.kept.joined(more.get(group, Kept()))
            each.append((group.plan, Needs(group.has_master, trained, kept)))
        return data_sizes(each)

    def missing(self, more: Mapping[ChunkGroup, Kept]) -> list[ChunkSpec]:
        """Return the chunks of ``more``, as :meth:`sizes` has it, that are not there yet."""
        found: list[ChunkSpec] = []
        for group, kept in more.items():
            if group.grad is None:
                found += [*group.plan.gradients(), *group.plan.masters()]
            found += group.plan.states(_new(kept.states, group.kept.states))
        room = self._wider_room(more)
        return found if room is None else [*found, room]

    def add(self, more: Mapping[ChunkGroup, Kept]) -> None:
        """Make the chunks that :meth:`missing` returns. Those of masters have no content."""
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
        """Return the room that updates need with ``more``, None where what there is is large enough."""
        held = self.room.chunk.spec.numel if self.room is not None else 0
        largest = _largest_room((group.plan, group.kept.joined(kept)) for group, kept in more.items())
        return next((room for room in largest if room.numel > held), None)

    def widen_exchange(self) -> bool:
        """See to it that parts of each gradient have room; say whether there is a new chunk for them."""
        plans = [group.plan for group in self.trainable_groups()]
        if not plans or plans[0].share is None:
            return False
        largest = max(plans, key=lambda plan: plan.numel)
        if self.exchange is not None and self.exchange.spec.numel >= largest.numel:
            return False
        self.exchange = self.chunks.add_chunk(_exchange(largest))
        return True

    # -- what comes into the module later, and leaves it --------------------------------------------

    def plans(self, specs: Sequence[GroupSpec]) -> list[GroupPlan]:
        """Return the plan of each parameter chunk of ``specs``."""
        return plan_groups(specs, self._piece_numel, self._share, self._block_bytes)

    def expected(self, plans: Sequence[GroupPlan]) -> list[ChunkSpec]:
        """Return the chunks of ``plans``, at once or later."""
        return [*(chunk for plan in plans for chunk in plan.at_first()), *self._expected(plans)]

    def widen(self, specs: Sequence[GroupSpec], plans: Sequence[GroupPlan], gate: Gate) -> list[ManagedSlot]:
        """Make the chunks and slots of further parameters, which have no values yet; return the slots."""
        base = len(self.groups)
        chunks = [self.chunks.add_chunk(chunk) for plan in plans for chunk in plan.at_first()]
        self._build(plans, iter(chunks))
        return self._register(gate, specs, base)

    def rename(self, names: Mapping[ManagedSlot, str]) -> None:
        """Have exactly these parameters, by these names; the chunks of others stay."""
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
        """Return the chunks that may come once there are those of ``plans``."""
        expected = [chunk for plan in plans for chunk in plan.later(self._expected_states)]
        if plans and plans[0].share is not None:  # one for what trains now, and a larger one some day
            expected += [_exchange(max(plans, key=lambda plan: plan.numel))] * 2
            arrays = tuple(state for state in self._expected_states if not state.per_block)
            expected += _largest_room((plan, Kept(arrays, True)) for plan in plans)
        return expected

    def _register(self, gate: Gate, specs: Sequence[GroupSpec], base: int) -> list[ManagedSlot]:
        """Create the slots of ``specs``, whose first group has the number ``base``."""
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
    """Return the chunks of the gradients of a group."""
    if group.grad is None:
        return []
    return [part.id for part in group.grad.parts] if isinstance(group.grad, CutChunk) else [group.grad.id]


def master_chunks(group: ChunkGroup) -> list[list[int]]:
    """Return the chunk of the master of each piece of a group that has one."""
    return [[piece.chunks[MASTER].id] for piece in group.pieces if piece.has_master]


def _exchange(plan: GroupPlan) -> ChunkSpec:
    return ChunkSpec(ChunkKind.EXCHANGE, plan.numel, torch.float32, plan.block_bytes)


def _largest_room(updated: Iterable[tuple[GroupPlan, Kept]]) -> list[ChunkSpec]:
    """Return the room that all these have enough of; nothing where none needs one."""
    rooms = [room for plan, kept in updated if (room := plan.room(kept)) is not None]
    return [max(rooms, key=lambda room: room.numel)] if rooms else []


def _new(states: Iterable[StateSpec], known: Sequence[StateSpec]) -> list[StateSpec]:
    return [state for state in states if state not in known]
