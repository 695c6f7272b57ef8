"""StepOrder: what a step does at which moment; recorded once, then planned for and followed.

A trace says what an iteration does in the order of the program: forward, backward, update. Where updates are
put off, the schedule that the chunk table follows is made from it: the moments of forward and backward, and
before the first use of each chunk group the pending update of that group (docs/notes/overlap.md).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gemini import _C
from gemini.chunk import ChunkManager, TensorIds
from gemini.memstats import MemStatsCollector, ProcessMonitor, Trace
from gemini.placement import ModelDataSize, PlacementPlan, PlacementPolicy, TierCapacity
from gemini.runtime.pending import PendingUpdate
from gemini.runtime.phases import OPTIMIZER

logger = logging.getLogger(__name__)

# Moments after which a step counts as one that nobody ends (an evaluation that records gradients, another
# optimizer).
_LONGEST_STEP = 2**20

# Schedules kept: one in steady state, another after an evaluation, a few where updates ran one by one.
_SCHEDULES_KEPT = 8

# (phase, DEVICE bytes, HOST bytes, DISK bytes) right after a PreOp
Moment = tuple[str, int, int, int]

Accesses = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PlacementContext:
    """Everything a plan is made from, besides the trace."""

    policy: PlacementPolicy
    size: ModelDataSize
    capacity: TierCapacity
    chunk_signature: str


class StepOrder:
    """Records steps, keeps the trace and the plan made from it, and tells the chunk table what comes next."""

    def __init__(self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when it belongs to this layout."""
        self.plan: PlacementPlan = context.policy.warmup_plan(context.size, context.capacity)
        self.trace: Trace | None = None
        self.timeline: list[Moment] = []  # of the last complete step; pending updates append to it
        self._chunks = chunks
        self._context = context
        self._collector: MemStatsCollector | None = None
        self._monitor: ProcessMonitor | None = None
        self._rival: Accesses | None = None  # what the last diverging step did
        self._log: list[Moment] = []
        self._late: set[int] = set()  # moments of the log that belong to the step before
        self._updates_inside = True  # whether steps end with their own update
        self._schedules: dict[object, _C.Schedule] = {}
        self._names: dict[int, str] = {}
        self._first_uses: dict[int, None] = {}
        self._enforce()
        if memstats is not None and memstats.chunk_signature == context.chunk_signature:
            self._adopt(memstats)

    @property
    def room_bytes(self) -> int:
        """DEVICE bytes that model data may take in every period of the step."""
        reserve = max(self.plan.reserve_bytes, default=0)
        return min(self.plan.device_limit_bytes, self._context.capacity.device_bytes - reserve)

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Say which tensor is which parameter, so that a trace can list them by first use."""
        self._names = dict(names)

    # -- one step --------------------------------------------------------------------------------

    def begin(self, pending: Sequence[PendingUpdate]) -> None:
        """Start to record a step during which ``pending`` will run."""
        self._log = []
        self._late.clear()
        self.expect(pending)
        if self.trace is None and self.plan.sample_non_model:
            self._stop_collecting()
            self._monitor = ProcessMonitor()
            self._collector = MemStatsCollector(self._monitor, _C.arena_process_bytes)
            self._collector.start()

    def expect(self, pending: Sequence[PendingUpdate], *, first: bool = False) -> None:
        """Tell the table what comes next: a step, its ``pending`` updates before their groups or all
        ``first``."""
        if self.trace is not None:
            self._chunks.table.set_schedule(self._schedule(self.trace, pending, first))
        self._chunks.table.begin_step()

    def pre_op(self, tensors: TensorIds, phase: str) -> bool:
        """Acquire ``tensors`` as the next moment; see to it that what comes after is on its way. Return
        whether the step has become too long to be one."""
        chunks = self._chunks
        if self.trace is None:
            self._warmup_acquire(tensors, phase)
        else:
            chunks.acquire(tensors, traced=True)
            try:
                chunks.prefetch()
            except BaseException:  # of another chunk's transfer
                chunks.release(tensors, dirty=False)
                raise
        log = self._log
        log.append((phase, *chunks.table.usages()))
        return len(log) == _LONGEST_STEP

    def note_late(self, *, traced: bool) -> None:
        """Count the moment that :meth:`pre_op` has just logged, if ``traced``, or this untraced access to
        the step before, which left its update pending."""
        if traced:
            self._late.add(len(self._log) - 1)
            self.timeline.append(self._log[-1])
        else:
            self.timeline.append((OPTIMIZER, *self._chunks.table.usages()))

    def _warmup_acquire(self, tensors: TensorIds, phase: str) -> None:
        chunks = self._chunks
        # Sample before the layout changes.
        if self._collector is not None:
            self._collector.sample(chunks.table.moment(), phase)
        chunks.acquire(tensors, traced=True)
        if self._collector is not None:
            self._collector.note_model_data()
        for tensor in tensors:
            self._first_uses.setdefault(tensor)

    def end(self, pending: Sequence[PendingUpdate]) -> None:
        """Close the step, which leaves ``pending``; learn from it when it was the first or a new one."""
        diverged = self._chunks.table.end_step()
        own = [index for index in range(len(self._log)) if index not in self._late]
        num_updates = sum(1 for index in own if self._log[index][0] == OPTIMIZER)
        if self.trace is None:
            self._adopt(self._recorded_trace())
        elif diverged or (pending and OPTIMIZER not in self.trace.phases):
            self._reconsider(own, pending)
        self.timeline = [self._log[index] for index in own]
        self._log = []
        self._late.clear()
        if pending or num_updates:  # else a step that was skipped: the next one may be like the one before
            self._updates_inside = not pending
        self.expect(pending)

    def abandon(self) -> None:
        """Forget the step: what it recorded does not say what an iteration does."""
        self._log = []
        self._late.clear()
        self._stop_collecting()
        self._chunks.table.begin_step()

    def close(self) -> None:
        """End what measures."""
        self._stop_collecting()

    # -- inside ----------------------------------------------------------------------------------

    def _stop_collecting(self) -> None:
        self._collector = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _recorded_trace(self) -> Trace:
        accesses = tuple(tuple(chunks) for chunks in self._chunks.table.record())
        non_model = self._collector.finish() if self._collector is not None else (0,) * len(accesses)
        self._stop_collecting()
        specs = [chunk.spec for chunk in self._chunks.chunks]
        return Trace(
            kind="train",
            accesses=accesses,
            modes=tuple("m" * len(chunks) for chunks in accesses),  # any may have been written
            frees=((),) * len(accesses),
            seconds=(0.0,) * len(accesses),
            non_model_bytes=non_model,
            phases=tuple(moment[0] for moment in self._log),
            chunk_bytes=tuple(spec.nbytes for spec in specs),
            chunk_kinds=tuple(spec.kind.value for spec in specs),
            links=(),
            param_order=tuple(self._names[t] for t in self._first_uses if t in self._names),
            chunk_signature=self._context.chunk_signature,
        )

    def _adopt(self, trace: Trace) -> None:
        """Plan the iterations to come from ``trace``."""
        self.trace = trace
        self._rival = None
        self._schedules.clear()
        context = self._context
        self.plan = context.policy.plan(context.size, context.capacity, trace)
        self._enforce()
        self.expect(())
        peak = max(self.plan.reserve_bytes, default=0)
        if peak + context.size.working_set_bytes > context.capacity.device_bytes:
            logger.warning(
                "the recorded step needed %d bytes for non-model data; with the %d bytes that the largest "
                "update needs this is more "
                "than device_bytes=%d: model data is kept to the minimum; raise device_bytes or lower the "
                "batch size",
                peak,
                context.size.working_set_bytes,
                context.capacity.device_bytes,
            )

    def _enforce(self) -> None:
        self._chunks.table.set_limit(self.plan.device_limit_bytes)
        self._chunks.park_limit_bytes = max(0, self.room_bytes)

    def _schedule(self, trace: Trace, pending: Sequence[PendingUpdate], first: bool) -> _C.Schedule:
        key = (tuple((update.order, update.accesses) for update in pending), first, self._updates_inside)
        schedule = self._schedules.get(key)
        if schedule is None:
            if len(self._schedules) == _SCHEDULES_KEPT:
                self._schedules.clear()
            places = place_updates(trace, pending, first=first, inside=self._updates_inside)
            reserve = self.plan.reserve_bytes
            schedule = _C.Schedule(
                [chunks for chunks, _ in places],
                [reserve[moment] for _, moment in places] if reserve else [],
                len(self._chunks.chunks),
            )
            self._schedules[key] = schedule
        return schedule

    def _reconsider(self, own: Sequence[int], pending: Sequence[PendingUpdate]) -> None:
        """A step left the trace: keep the old plan for a passing change, adopt the new order once it
        repeats. ``own`` are the moments that belong to the step itself."""
        assert self.trace is not None
        record = self._chunks.table.record()
        phases = [self._log[index][0] for index in own]
        phases += [OPTIMIZER for update in pending for _ in update.accesses]
        accesses = tuple(tuple(record[index]) for index in own)
        accesses += tuple(chunks for update in pending for chunks in update.accesses)
        if accesses == self.trace.accesses:
            return  # only the updates came at another time
        same = _core(self.trace.accesses, self.trace.phases) == _core(accesses, phases)
        if same and OPTIMIZER not in phases:
            return  # an update was skipped
        if not same and accesses != self._rival:
            self._rival = accesses
            logger.info("a step left the recorded order; it ran with least-recently-used eviction")
            return
        non_model = self.trace.non_model_bytes
        if same:
            kept = [n for n, phase in zip(non_model, self.trace.phases, strict=True) if phase != OPTIMIZER]
            kept += kept[-1:] * (len(accesses) - len(kept))
        else:
            kept = [max(non_model, default=0)] * len(accesses)
        self._adopt(
            replace(
                self.trace,
                accesses=accesses,
                modes=tuple("m" * len(chunks) for chunks in accesses),
                frees=((),) * len(accesses),
                seconds=(0.0,) * len(accesses),
                non_model_bytes=tuple(kept),
                phases=tuple(phases),
            )
        )


def place_updates(
    trace: Trace, pending: Sequence[PendingUpdate], *, first: bool, inside: bool
) -> list[tuple[tuple[int, ...], int]]:
    """Return what a step accesses at each moment, with the moment of ``trace`` whose period that lies in.

    A pending update comes before the first moment that uses a chunk of its group, all of them at the
    beginning where ``first``; ``inside``: the step ends with the update that the trace ends with. Before the
    first moment of the trace lies its last period: the iteration repeats.
    """
    core = [index for index, phase in enumerate(trace.phases) if phase != OPTIMIZER]
    places: list[tuple[tuple[int, ...], int]] = []
    waiting = {chunk: update for update in pending for chunk in update.chunks}
    left = {update.order: update for update in pending}
    period = len(trace.phases) - 1

    def place(updates: Sequence[PendingUpdate]) -> None:
        for update in updates:
            places.extend((chunks, period) for chunks in update.accesses)
            del left[update.order]

    if first:
        place(list(pending))
    for moment in core:
        needed = {waiting[chunk].order for chunk in trace.accesses[moment] if chunk in waiting}
        place([left[order] for order in sorted(needed & left.keys())])
        places.append((trace.accesses[moment], moment))
        period = moment
    place(list(left.values()))
    if inside:
        places += [(trace.accesses[i], i) for i, phase in enumerate(trace.phases) if phase == OPTIMIZER]
    return places


def _core(accesses: Accesses, phases: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the moments that are no updates."""
    return [chunks for chunks, phase in zip(accesses, phases, strict=True) if phase != OPTIMIZER]
