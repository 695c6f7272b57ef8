"""Writes the trace of a rank's step in a pipeline, for the simulator of transfers between tiers.

The moments of a step follow from the order of the pipeline, from the uses of parameters in a record, and from
the chunks that the runtime would lay out. Their times are those of the price, so all additional time of the
simulated step is waiting for transfers.

Over several ranks, chunks are whole only for a while: if there is no room, those with the furthest next use
are released (Belady's rule, as in the runtime). Activations that may leave DEVICE are chunks too: one per
segment and micro-batch, written behind the forward pass and freed behind the backward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf
from types import MappingProxyType

import torch

from gemini.chunk.chunk import ChunkKind, ChunkSpec
from gemini.chunk.layout import round_up
from gemini.forecast.machine import MachineSpeeds
from gemini.memstats.trace import BACKWARD, FORWARD, MODIFIED, OPTIMIZER, READ, WRITTEN, Trace
from gemini.parallel.pipeline.orders import Kind, Order, Simulated
from gemini.placement.planner import choose_plan
from gemini.placement.problem import Iteration, Machine
from gemini.placement.simulator import simulate
from gemini.planner.chunks import ChunkTable, StageCapacity
from gemini.planner.recomputation import passing_bytes
from gemini.planner.segment_costs import SegmentCosts
from gemini.runtime.config import STATES_OF_RULES
from gemini.runtime.storage.data_sizes import GroupPlan

_STATES = STATES_OF_RULES["adam"]
_WORTH_IT = 1e-3  # share of a step; for shorter waits no plan is made
_BLOCK_BYTES = 4096  # chunk sizes are multiples of this


@dataclass(frozen=True)
class Touch:
    """A moment of a pass: an operator reads parameters, or (``completes``) their gradients are complete.

    Attributes:
        seconds: time until the next touch.
        reserve_bytes: peak of non-model data until then.
        stored: segments with activations in chunks. Forward writes these chunks, backward reads them.
    """

    keys: tuple[str, ...]
    completes: bool
    seconds: float
    reserve_bytes: int
    stored: tuple[int, ...] = ()

    def joined(self, other: Touch) -> Touch:
        """Return one touch for both. At most one of them may have parameters."""
        return Touch(
            self.keys or other.keys,
            self.completes or other.completes,
            self.seconds + other.seconds,
            max(self.reserve_bytes, other.reserve_bytes),
            tuple(dict.fromkeys((*self.stored, *other.stored))),
        )


_NOTHING = Touch((), False, 0.0, 0)
_LAST = (Kind.BACKWARD, Kind.WEIGHT)  # the last action of a micro-batch on a stage
_EMPTY: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class RankPass:
    """A forward or backward pass of a stage with one micro-batch.

    Attributes:
        base_bytes: activations of other micro-batches that the rank holds during the pass.
        idle_seconds: time until the rank's next pass.
        ends: segments with activations that nothing needs after this pass.
    """

    phase: str
    touches: tuple[Touch, ...]
    base_bytes: int
    idle_seconds: float = 0.0
    micro_batch: int = 0
    ends: range = range(0)


@dataclass(frozen=True)
class StagePasses:
    """The passes of a pipeline rank in a step.

    Attributes:
        ranges: segments of each stage.
        again: segments that are recomputed.
        kept_of: returns the bytes that a segment keeps of a micro-batch on DEVICE.
        takes: seconds of an action, by kind and stage.
        clock: the simulated orders of all ranks.
        stored: bytes that a segment keeps in a chunk, by segment.
    """

    costs: Sequence[SegmentCosts]
    ranges: Sequence[tuple[int, int]]
    again: frozenset[int]
    kept_of: Callable[[int], float]
    takes: Mapping[tuple[Kind, int], float]
    clock: Simulated
    stored: Mapping[int, int] = field(default_factory=dict)
    between_halves: Callable[[int, int], float] = lambda *_: 0.0

    def of_rank(self, order: Order, rank: int) -> list[RankPass]:
        """Return the passes of a rank in order."""
        stages, actions = order.stages_of(rank), order.by_rank[rank]
        kept = {stage: self._kept(*self.ranges[stage]) for stage in stages}
        more = {stage: self.between_halves(*self.ranges[stage]) for stage in stages}
        passing = passing_bytes(self.costs, self.ranges)
        touches_of = cache(self._touches)
        held = dict.fromkeys(stages, 0)  # micro-batches under way
        halves = dict.fromkeys(stages, 0)  # of those, between the halves of backward
        idle = [self.clock.waits[each] for each in actions]
        # The idle time behind the last action and before the first action of the next step.
        idle.append(idle[0] + max(self.clock.idle[rank] - sum(idle), 0.0))
        passes: list[RankPass] = []
        for place, action in enumerate(actions, 1):
            forward = action.kind is Kind.FORWARD
            held[action.stage] -= 0 if forward else 1
            halves[action.stage] -= action.kind is Kind.WEIGHT
            is_half = action.kind in (Kind.INPUT, Kind.WEIGHT)
            base = passing + sum(held[stage] * kept[stage] + halves[stage] * more[stage] for stage in stages)
            base += more[action.stage] if is_half else 0.0
            touches = touches_of(action.kind, action.stage)
            ends = range(*self.ranges[action.stage]) if action.kind in _LAST else range(0)
            passes.append(
                RankPass(
                    FORWARD if forward else BACKWARD,
                    touches,
                    ceil(base),
                    idle[place],
                    action.micro_batch,
                    ends,
                )
            )
            held[action.stage] += action.kind in (Kind.FORWARD, Kind.INPUT)
            halves[action.stage] += action.kind is Kind.INPUT
        return passes

    def _kept(self, first: int, last: int) -> float:
        received = self.costs[first].begin_bytes if first else 0.0
        return received + sum(map(self.kept_of, range(first, last)))

    def _touches(self, kind: Kind, stage: int) -> tuple[Touch, ...]:
        """Return the touches of an action, with times that add up to the action's. Operators without a new
        use of parameters belong to the touch before."""
        touches: list[Touch] = []
        for each in self._all_touches(kind, stage):
            if touches and not (each.keys and touches[-1].keys):
                touches[-1] = touches[-1].joined(each)
            else:
                touches.append(each)
        touches = touches or [_NOTHING]
        total, takes = sum(each.seconds for each in touches), self.takes[kind, stage]
        if total == 0:
            return (replace(touches[0], seconds=takes), *touches[1:])
        return tuple(replace(each, seconds=each.seconds * takes / total) for each in touches)

    def _all_touches(self, kind: Kind, stage: int) -> Iterator[Touch]:
        first, last = self.ranges[stage]
        segments = range(first, last) if kind is Kind.FORWARD else range(last - 1, first - 1, -1)
        for at in segments:
            base = self._kept(first, at)
            touches: list[Touch] = []
            if kind is Kind.FORWARD or at in self.again:
                carried = 0.0 if kind is Kind.FORWARD else self.costs[at].carried_bytes
                touches += (
                    Touch(use.keys, False, use.seconds, ceil(base + carried + use.peak_bytes))
                    for use in self.costs[at].uses
                )
            if kind is not Kind.FORWARD:
                touches += _backward(self.costs[at], base, kind)
            if kind is Kind.INPUT:  # the graph stays for the weights' half
                least = ceil(self._kept(first, last) + self.costs[at].half_bytes)
                touches = [replace(each, reserve_bytes=max(each.reserve_bytes, least)) for each in touches]
            if at in self.stored and not touches and kind is not Kind.WEIGHT:  # it has no parameters
                touches = [Touch((), False, 0.0, ceil(base + self.costs[at].peak_bytes))]
            if at in self.stored and touches:
                # Forward stores after its last operator; every touch of backward needs the stored chunk.
                begin = len(touches) - 1 if kind is Kind.FORWARD else 0
                touches[begin:] = (self._with_stored(each, at) for each in touches[begin:])
            yield from touches

    def _with_stored(self, touch: Touch, at: int) -> Touch:
        """Return ``touch`` with the activations of segment ``at`` in a chunk instead of in non-model data."""
        reserve = max(touch.reserve_bytes - self.stored[at], 0)
        return replace(touch, reserve_bytes=reserve, stored=(at,))


def _backward(costs: SegmentCosts, base: float, kind: Kind) -> Iterator[Touch]:
    """Yield the touches of a backward pass: reads of parameters, last use first, and complete gradients. The
    input half of a split backward pass has only the reads, the weight half only the gradients."""
    arriving = {each.keys[0]: each for each in costs.gradients if each.keys}
    reserve = ceil(base)
    for use in reversed(costs.uses):
        own = [arriving.pop(key) for key in use.keys if key in arriving]
        reserve = max((ceil(base + each.peak_bytes) for each in own), default=reserve)
        seconds = sum(each.seconds for each in own)
        if kind is not Kind.WEIGHT and use.keys and not use.is_lookup:
            yield Touch(use.keys, False, seconds, reserve)
            seconds = 0.0
        if kind is not Kind.INPUT:
            for each in own:
                yield Touch(each.keys, True, seconds / len(own), ceil(base + each.left_bytes))
    for each in arriving.values() if kind is not Kind.INPUT else ():
        yield Touch(each.keys, True, each.seconds, ceil(base + each.left_bytes))


def trace_of(
    passes: Sequence[RankPass], update_seconds: float, table: ChunkTable, stored: Mapping[int, int] = _EMPTY
) -> Trace:
    """Return the trace of a rank that runs ``passes`` and updates its weights. ``stored``: as in
    :class:`StagePasses`."""
    return _Writer(table, stored).written(passes, update_seconds)


def least_device_bytes(trace: Trace) -> int:
    """Return the bytes that DEVICE must have: the maximum over moments of the accessed chunks plus non-model
    data."""
    return max(
        sum(trace.chunk_bytes[chunk] for chunk in chunks) + reserve
        for chunks, reserve in zip(trace.accesses, trace.non_model_bytes, strict=True)
    )


class Transfers:
    """The simulated transfers of a rank in a step.

    Attributes:
        waits: upper bound for the seconds that the rank waits, including ``copying``. At first no chunk is
            placed; :meth:`plan` may lower it.
        copying: seconds of copies in memory.

    Raises:
        OutOfBudgetError: the chunks of a moment do not fit.
    """

    def __init__(
        self, trace: Trace, machine: MachineSpeeds, capacity: StageCapacity, copying: float = 0.0
    ) -> None:
        self._budgets = Machine(
            capacity.device_bytes,
            capacity.host_bytes,
            capacity.disk_bytes,
            machine.links,
            transfers_take=machine.transfers_take,
        )
        self._iteration, self._computing = Iteration.of_trace(trace, overlap=True), sum(trace.seconds)
        self._copying = copying
        seconds = simulate(self._iteration, self._budgets).step_seconds
        self.waits = max(seconds - self._computing, 0.0) + copying
        self.is_planned = seconds - self._computing <= _WORTH_IT * seconds

    def plan(self) -> None:
        """Place chunks as the placement planner would, and update ``waits``."""
        seconds = choose_plan(self._iteration, self._budgets).simulation.step_seconds
        self.waits, self.is_planned = max(seconds - self._computing, 0.0) + self._copying, True


def least_busy_seconds(below_bytes: int, machine: MachineSpeeds, capacity: StageCapacity) -> float:
    """Return a lower bound for the seconds in which the busiest link works in a step.

    ``below_bytes`` of updated data have no room on DEVICE, so they come and go once. Both directions of a
    disk share a channel.
    """
    speeds = {each.name: each for each in machine.links}
    on_disk = max(below_bytes - capacity.host_bytes, 0)
    on_host = below_bytes - on_disk
    host = max(on_host / speeds[name].bytes_per_second for name in ("h2d", "d2h")) if on_host else 0.0
    disk = sum(on_disk / speeds[name].bytes_per_second for name in ("disk_read", "disk_write") if on_disk)
    return max(host, disk)


@dataclass
class _Chunks:
    """The chunk ids of a group."""

    whole: int
    shard: int | None = None
    grad: int | None = None
    grad_shard: int | None = None
    pieces: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def updated(self) -> int:
        """The parameter chunk that an update changes."""
        return self.whole if self.shard is None else self.shard


@dataclass(slots=True)
class _PlannedMoment:
    phase: str
    modes: dict[int, str]
    seconds: float = 0.0
    reserve_bytes: int = 0
    frees: set[int] = field(default_factory=set)


class _Writer:
    """Writes the trace of a step over the chunks of a ``table``."""

    def __init__(self, table: ChunkTable, stored: Mapping[int, int]) -> None:
        self._table = table
        self._specs: list[ChunkSpec] = []
        self._groups = [self._numbered(plan) for plan in table.groups]
        self._exchange = self._number_exchange()
        self._moments: list[_PlannedMoment] = []
        self._has_content: set[int] = set()
        self._parcels = _Parcels(stored, self._number)

    def written(self, passes: Sequence[RankPass], update_seconds: float) -> Trace:
        """Return the trace of these passes and the update behind them."""
        places_of = {id(each.touches): [self._places(t.keys) for t in each.touches] for each in passes}
        whole = None
        if self._exchange is not None:
            whole = _WholeGroups(self, _uses_of(passes, places_of))
        number = 0
        for each in passes:
            missing = self._trained_in(each) if whole is not None else {}
            for touch, places in zip(each.touches, places_of[id(each.touches)], strict=True):
                number += 1
                if whole is not None and not touch.completes:
                    whole.gather(number, places, self._moments)
                modes = self._modes(touch, places, () if whole is None else whole.arriving)
                modes |= self._parcels.modes(each, touch)
                reserve = each.base_bytes + touch.reserve_bytes
                freed = self._parcels.freed_behind(each, touch)
                self._moments.append(_PlannedMoment(each.phase, modes, touch.seconds, reserve, freed))
                if whole is not None and touch.completes:
                    self._exchange_complete(missing, touch.keys)
            self._moments[-1].seconds += each.idle_seconds
        if whole is not None:
            whole.give_up(self._moments)
        self._update(update_seconds)
        return self._trace()

    # -- chunks ----------------------------------------------------------------------------------

    def _numbered(self, plan: GroupPlan) -> _Chunks:
        whole, *shards = [self._number(each) for each in plan.params()]
        found = _Chunks(whole, shards[0] if shards else None)
        if not plan.trainable:
            return found
        found.grad, *shards = [self._number(each) for each in plan.gradients()]
        found.grad_shard = shards[0] if shards else None
        masters = [self._number(each) for each in plan.masters()]
        states = [self._number(each) for each in plan.states(_STATES)]
        count = len(_STATES)
        found.pieces = [
            (*masters[at : at + 1], *states[at * count : (at + 1) * count]) for at in range(len(plan.pieces))
        ]
        return found

    def _number(self, spec: ChunkSpec) -> int:
        self._specs.append(spec)
        return len(self._specs) - 1

    def _number_exchange(self) -> int | None:
        """Return the chunk that receives gradients from other ranks; None on one rank."""
        grads = [self._specs[each.grad] for each in self._groups if each.grad is not None]
        if all(each.shard is None for each in self._groups) or not grads:
            return None
        largest = max(grads, key=lambda each: each.nbytes)
        return self._number(replace(largest, kind=ChunkKind.EXCHANGE))

    def nbytes(self, chunk: int) -> int:
        """Return the bytes of a chunk."""
        return self._specs[chunk].nbytes

    def group(self, place: int) -> _Chunks:
        """Return the chunks of a group."""
        return self._groups[place]

    @property
    def gather_bytes(self) -> int:
        """Limit on the bytes of whole chunks."""
        return self._table.gather_bytes

    def _places(self, keys: Iterable[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._table.place_of[key] for key in keys))

    # -- moments ---------------------------------------------------------------------------------

    def _modes(self, touch: Touch, places: Iterable[int], arriving: Container[int]) -> dict[int, str]:
        """Return the access mode of each chunk that a touch needs."""
        modes: dict[int, str] = {}
        for place in places:
            group = self._groups[place]
            if touch.completes:
                assert group.grad is not None
                modes[group.grad] = self._written(group.grad)
            elif place in arriving:
                assert group.shard is not None
                modes |= {group.whole: WRITTEN, group.shard: READ}
            else:
                modes[group.whole] = READ
        return modes

    def _written(self, chunk: int) -> str:
        """Return the mode of a write to a chunk: MODIFIED if it already has content, otherwise WRITTEN."""
        mode = MODIFIED if chunk in self._has_content else WRITTEN
        self._has_content.add(chunk)
        return mode

    def _trained_in(self, each: RankPass) -> dict[int, set[str]]:
        """Return the parameters with gradients in a pass, by group."""
        found: defaultdict[int, set[str]] = defaultdict(set)
        for touch in each.touches:
            for key in touch.keys if touch.completes else ():
                found[self._table.place_of[key]].add(key)
        return found

    def _exchange_complete(self, missing: Mapping[int, set[str]], keys: Iterable[str]) -> None:
        """Exchange the gradients of groups that ``keys`` complete. ``keys`` are removed from ``missing``."""
        for key in keys:
            place = self._table.place_of[key]
            missing[place].discard(key)
            if not missing[place]:
                self._exchanged(self._groups[place])

    def _exchanged(self, group: _Chunks) -> None:
        assert self._exchange is not None
        assert group.grad is not None
        assert group.grad_shard is not None
        last = self._moments[-1]
        arrived = _PlannedMoment(last.phase, {group.grad: MODIFIED, self._exchange: WRITTEN})
        summed = _PlannedMoment(
            last.phase, {group.grad_shard: self._written(group.grad_shard), self._exchange: READ}
        )
        summed.frees = {self._exchange, group.grad}
        arrived.reserve_bytes = summed.reserve_bytes = last.reserve_bytes
        summed.seconds, last.seconds = last.seconds, 0.0
        self._has_content.discard(group.grad)
        self._moments += [arrived, summed]

    def _update(self, seconds: float) -> None:
        """Append the update of every piece."""
        numels = [b - a for plan in self._table.groups if plan.trainable for a, b in plan.pieces]
        each_takes = iter([seconds * numel / max(sum(numels), 1) for numel in numels])
        for group in self._groups:
            grad = group.grad if group.grad_shard is None else group.grad_shard
            for piece in group.pieces:
                assert grad is not None
                modes = {group.updated: MODIFIED, grad: READ, **dict.fromkeys(piece, MODIFIED)}
                self._moments.append(_PlannedMoment(OPTIMIZER, modes, next(each_takes)))
            if grad is not None and group.pieces:
                self._moments[-1].frees.add(grad)

    def _trace(self) -> Trace:
        moments = self._moments
        return Trace(
            kind="train",
            accesses=tuple(tuple(sorted(each.modes)) for each in moments),
            modes=tuple("".join(each.modes[chunk] for chunk in sorted(each.modes)) for each in moments),
            frees=tuple(tuple(sorted(each.frees)) for each in moments),
            seconds=tuple(each.seconds for each in moments),
            non_model_bytes=tuple(each.reserve_bytes for each in moments),
            phases=tuple(each.phase for each in moments),
            chunk_bytes=tuple(each.nbytes for each in self._specs),
            chunk_kinds=tuple(each.label for each in self._specs),
            links=(),
            param_order=(),
            chunk_signature="",
        )


def _uses_of(
    passes: Iterable[RankPass], places_of: Mapping[int, Sequence[Sequence[int]]]
) -> dict[int, list[int]]:
    """Return by group the numbers of the touches that read its parameters."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    number = 0
    for each in passes:
        for touch, places in zip(each.touches, places_of[id(each.touches)], strict=True):
            number += 1
            for place in () if touch.completes else places:
                found[place].append(number)
    return found


class _Parcels:
    """The chunks for activations of segments. ``number`` assigns an id to a new chunk; freed chunks are
    reused, as in the runtime's pool."""

    def __init__(self, stored: Mapping[int, int], number: Callable[[ChunkSpec], int]) -> None:
        self._stored, self._number = stored, number
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by segment
        self._held: dict[tuple[int, int], int] = {}  # by segment and micro-batch

    def modes(self, each: RankPass, touch: Touch) -> dict[int, str]:
        """Return the access mode of each chunk that a touch needs."""
        forward = each.phase == FORWARD
        chunks = (self._chunk((at, each.micro_batch)) for at in touch.stored)
        return dict.fromkeys(chunks, WRITTEN if forward else READ)

    def freed_behind(self, each: RankPass, touch: Touch) -> set[int]:
        """Return the chunks that nothing needs after a touch.

        A chunk is freed after the last touch that needs it in the last pass of its segment. If no touch of
        that pass needs it (the weight half of a backward with frozen weights), it is freed at the end of the
        pass.
        """
        if not each.ends:
            return set()
        done = [
            at
            for at in touch.stored
            if touch is next(other for other in reversed(each.touches) if at in other.stored)
        ]
        if touch is each.touches[-1]:
            done += (at for at in each.ends if at not in touch.stored)
        freed = set[int]()
        for at in done:
            chunk = self._held.pop((at, each.micro_batch), None)
            if chunk is not None:
                self._free[at].append(chunk)
                freed.add(chunk)
        return freed

    def _chunk(self, parcel: tuple[int, int]) -> int:
        """Return the chunk of a segment and a micro-batch."""
        if parcel not in self._held:
            at = parcel[0]
            spec = ChunkSpec(ChunkKind.ACTIVATION, round_up(self._stored[at], _BLOCK_BYTES), torch.uint8)
            self._held[parcel] = self._free[at].pop(0) if self._free[at] else self._number(spec)
        return self._held[parcel]


class _WholeGroups:
    """Tracks which groups are whole while a step runs over several ranks."""

    def __init__(self, writer: _Writer, uses: Mapping[int, Sequence[int]]) -> None:
        self._writer, self._uses = writer, uses
        self._places: set[int] = set()
        self.arriving: frozenset[int] = frozenset()  # groups that the next moment gathers

    def gather(self, number: int, places: Sequence[int], moments: Sequence[_PlannedMoment]) -> None:
        """Make ``places`` whole for the touch ``number``. If there is no room, release other groups behind
        the last of ``moments``."""
        self.arriving = frozenset(places) - self._places
        room = self._writer.gather_bytes - sum(map(self._nbytes, self._places | self.arriving))
        for victim in sorted(self._places - set(places), key=lambda place: -self._next_use(place, number)):
            if room >= 0:
                break
            room += self._nbytes(victim)
            self._places.discard(victim)
            moments[-1].frees.add(self._writer.group(victim).whole)
        self._places |= self.arriving

    def give_up(self, moments: Sequence[_PlannedMoment]) -> None:
        """Release all groups behind the last pass, because weights are updated next."""
        moments[-1].frees |= {self._writer.group(place).whole for place in self._places}
        self._places.clear()

    def _nbytes(self, place: int) -> int:
        return self._writer.nbytes(self._writer.group(place).whole)

    def _next_use(self, place: int, number: int) -> float:
        uses = self._uses[place]
        following = bisect_right(uses, number)
        return uses[following] if following < len(uses) else inf
