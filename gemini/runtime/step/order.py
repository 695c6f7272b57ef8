"""The order of an iteration, its trace and the plan made from it.

Learned: the common part of training steps and evaluations: recording, the trace, the plan. StepOrder:
training steps, with updates that may run later or earlier. UpdateOperators: pins the chunks of updates.

A trace lists an iteration in program order: forward, backward, update. If updates are deferred, the schedule
for the chunk table is derived from it: the moments of forward and backward, with the pending update of each
chunk group before the first use of that group. If updates run in backward, each follows the last gradient of
its group (docs/notes/overlap.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from gemini.chunk import ChunkManager
from gemini.chunk.chunk import ChunkKind, TensorIds
from gemini.memstats import Trace
from gemini.memstats.trace import BACKWARD, OPTIMIZER
from gemini.placement import ModelDataSize, PlacementPlan, PlacementPolicy, TierCapacity
from gemini.placement.problem import CPU_TRANSFERS_TAKE, Machine, update_groups
from gemini.placement.report import PlannedStep
from gemini.runtime.gate.gate import Gate
from gemini.runtime.gate.pending_work import BEGUN_AT_ONCE, PendingUpdate, UpdateThread
from gemini.runtime.intercept.compiled import num_compilations
from gemini.runtime.step.recorder import Accesses, LinkMeter, MomentLog, Recorded, Recorder, StepMeter
from gemini.runtime.step.schedule import (
    Place,
    Planned,
    PromisedStep,
    StepPlanner,
    completed,
    reordered,
    steady_modes,
    typical_seconds,
)
from gemini.runtime.storage.host_choice import HostUpdates
from gemini.system.config import format_bytes
from gemini.system.process import paused_collector

logger = logging.getLogger(__name__)


TIMED_ITERATIONS = 3  # the one with the median computing time counts


@dataclass(frozen=True)
class PlacementContext:
    """The inputs of a plan besides the trace.

    ``capacity``: the tiers for chunks that plans cover. ``other_bytes``: chunks that no plan covers, because
    they come and go; ``other_device_bytes`` of DEVICE are set aside for them.
    """

    policy: PlacementPolicy
    size: ModelDataSize
    capacity: TierCapacity
    chunk_signature: str
    other_bytes: int = 0
    other_device_bytes: int = 0

    @property
    def all_may_stay(self) -> bool:
        """Whether the chunks outside plans fit their DEVICE share, so that no other chunk must leave for
        them."""
        return self.other_bytes <= self.other_device_bytes


class Learned:
    """The common part of training steps and evaluation passes: recording, trace and plan.

    The first iteration is the warmup. Its record becomes the trace, and the plan is made. A warmup touches
    memory for the first time, so its times are not typical. Therefore the first iterations that follow a new
    trace are timed. Their typical times make the trace final, and the plan is made once more.
    """

    def __init__(
        self, kind: str, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None
    ) -> None:
        """Start in warmup, or with the plan made from ``memstats`` if that has this ``kind`` and layout."""
        self.withheld_bytes = 0  # DEVICE bytes left free since memory ran out
        self._expected_bytes = 0  # non-model bytes that a warmup is known to need at most
        self.measures = False  # measure the next iteration's non-model memory again
        self._context = context
        self.plan: PlacementPlan = self._warmup_plan()
        self.trace: Trace | None = None
        self.timed = False  # whether the times of the trace are final
        self._candidates: list[Trace] = []  # iterations that followed the trace, timed
        self._kind = kind
        self._chunks = chunks
        taken = 0.0 if chunks.device.has_own_memory else CPU_TRANSFERS_TAKE
        self.planner = StepPlanner(context.capacity, transfers_take=taken)
        self._recorder = Recorder(chunks)
        self.pre_op = self._recorder.pre_op  # called per operator
        self.beside = self._recorder.beside
        self._links = LinkMeter(chunks)
        self._rival: Accesses | None = None  # accesses of the last diverging iteration
        self._names: dict[int, str] = {}
        self._num_compilations = 0  # count at the start of the iteration
        self._memstats = memstats  # given trace, kept until its chunks exist
        self._adopt_given()

    @property
    def has_order(self) -> bool:
        """Whether the order of iterations is known: recorded, or given for chunks that do not exist yet."""
        return self.trace is not None or self._memstats is not None

    @property
    def room_bytes(self) -> int:
        """DEVICE bytes that model data may take in every period, without chunks outside plans."""
        reserve = max(self.plan.reserve_bytes, default=0)
        return min(self.plan.device_limit_bytes, self._context.capacity.device_bytes - reserve)

    def measure(self, wanted: bool) -> None:
        """Set whether the next iteration's non-model memory is measured although its order is known."""
        self.measures = wanted

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Set the parameter name of each tensor, so that a trace can list parameters by first use."""
        self._names = dict(names)

    def enforce(self) -> None:
        """Apply the plan's limit to the chunk table and the arenas."""
        others = self._context.other_device_bytes
        self._chunks.table.set_limit(self.plan.device_limit_bytes + others)
        # Once non-model memory is known, parked blocks stay within room_bytes, so they take none of it.
        # Before that, blocks are parked only while memory is short.
        self._chunks.park(max(0, self.room_bytes + others), always=self.trace is not None)

    def start_recording(self) -> None:
        """Start to record an iteration, and measure times and memory that are not known yet."""
        warmup = self.trace is None
        self._num_compilations = num_compilations()
        if not self.timed and not self._candidates:
            self._links.begin()
        sampled = self.measures or (warmup and self.plan.sample_non_model)
        self._recorder.begin(warmup=warmup, timed=not self.timed, sampled=sampled)

    def abandon(self) -> None:
        """Discard the record of this iteration: it is not typical."""
        self._recorder.stop()
        self._recorder.forget()

    def close(self) -> None:
        """Stop all measuring."""
        self._recorder.stop()

    @property
    def log(self) -> MomentLog:
        """The moments of the current iteration so far."""
        return self._recorder.log

    def measured(self) -> Trace | None:
        """Return the trace with the speed of every link, needed or not; None until its times are final."""
        if self.trace is None or not self.timed:
            return None
        return replace(self.trace, links=self.trace.links or self._links.speeds())

    def machine(self, trace: Trace) -> Machine:
        """Return the tiers and links that iterations of ``trace`` have under the plan in force. Raises
        ConfigError if the trace lacks the speed of a link."""
        return self.planner.machine(trace, self.plan)

    # -- learning --------------------------------------------------------------------------------

    def learn(self, recorded: Recorded) -> None:
        """Make the warmup's record the trace. If torch.compile ran meanwhile, the next iteration is the
        warmup instead."""
        if num_compilations() != self._num_compilations:
            return
        specs = [chunk.spec for chunk in self._chunks.chunks]
        trace = Trace(
            kind=self._kind,
            accesses=recorded.accesses,
            modes=steady_modes(recorded.modes, recorded.accesses, recorded.frees),
            frees=recorded.frees,
            seconds=recorded.seconds,
            non_model_bytes=recorded.non_model_bytes,
            phases=recorded.phases,
            chunk_bytes=tuple(spec.nbytes for spec in specs),
            chunk_kinds=tuple(spec.label for spec in specs),
            links=(),
            param_order=tuple(
                dict.fromkeys(self._names[t] for t in self._recorder.first_uses if t in self._names)
            ),
            chunk_signature=self._context.chunk_signature,
        )
        self._adopt(self._with_links(trace), timed=False)

    def complete(self, trace: Trace | None) -> None:
        """Collect the times of this iteration, if ``trace`` has any. After TIMED_ITERATIONS of them make the
        trace final and plan again. The final trace is the median iteration with typical times per period."""
        if trace is None or num_compilations() != self._num_compilations:
            return
        self._candidates.append(trace)
        if len(self._candidates) == TIMED_ITERATIONS:
            middle = sorted(self._candidates, key=lambda one: sum(one.seconds))[TIMED_ITERATIONS // 2]
            seconds = typical_seconds([one.seconds for one in self._candidates])
            self._adopt(self._with_links(self.grown(replace(middle, seconds=seconds))), timed=True)

    def grown(self, trace: Trace) -> Trace:
        """Return ``trace`` with the chunks that were created since it was recorded: those of activations."""
        specs = [chunk.spec for chunk in self._chunks.chunks]
        return replace(
            trace,
            chunk_bytes=tuple(spec.nbytes for spec in specs),
            chunk_kinds=tuple(spec.label for spec in specs),
        )

    def repeats(self, accesses: Accesses) -> bool:
        """Say whether the previous iteration that left the trace had these accesses; remember them."""
        repeated = accesses == self._rival
        self._rival = accesses
        return repeated

    def forget(self) -> None:
        """Return to the state before the warmup."""
        self.plan = self._warmup_plan()
        self.planner.forget()
        self.trace, self.timed, self._rival = None, False, None
        self._candidates.clear()

    def schedule_of(
        self, trace: Trace, places: Sequence[Place], *, steady: bool, on_host: Sequence[int] = ()
    ) -> Planned:
        """Return the schedule for the table; with a plan if the order is ``steady``, which means it will
        repeat. ``on_host``: the places with operators that the CPU runs on HOST."""
        final = steady and self.timed
        return self.planner.schedule(trace, places, self.plan, final=final, on_host=on_host)

    def replan(self, context: PlacementContext) -> None:
        """Discard the trace and plan for model data of another size; use the originally given trace if it has
        the current chunks."""
        self._context = context
        self.planner.take(context.capacity)
        self.forget()
        self._adopt_given()

    def withhold(self, nbytes: int) -> None:
        """Plan again, with ``nbytes`` of DEVICE left free in addition to the policy's reserve."""
        self.withheld_bytes = nbytes
        if self.trace is None:
            self.plan = self._warmup_plan()
        else:
            self._adopt(self.trace, timed=self.timed)

    # -- inside ----------------------------------------------------------------------------------

    def _warmup_plan(self) -> PlacementPlan:
        context = self._context
        device_bytes = context.capacity.device_bytes
        plan = context.policy.warmup_plan(context.size, context.capacity)
        if self._expected_bytes:
            room = max(device_bytes - self._expected_bytes, context.size.working_set_bytes)
            plan = replace(plan, device_limit_bytes=min(plan.device_limit_bytes, room))
        return plan.withholding(self.withheld_bytes, device_bytes)

    def _adopt(self, trace: Trace, *, timed: bool) -> None:
        """Make ``trace`` the trace and plan the next iterations from it; ``timed``: its times are final."""
        context = self._context
        plan = context.policy.plan(context.size, context.capacity, trace)
        self._expected_bytes = 0
        self.plan = plan.withholding(self.withheld_bytes, context.capacity.device_bytes)
        self.planner.forget()
        self.trace = trace
        self.timed = timed
        self._rival = None
        self._candidates.clear()

    def _adopt_given(self) -> None:
        trace = self._memstats
        if trace is None:
            return
        own = tuple(chunk.spec.nbytes for chunk in self._chunks.chunks)
        known = min(len(own), len(trace.chunk_bytes))
        if not self._belongs(trace) or trace.chunk_bytes[:known] != own[:known]:
            self._memstats = None
        elif max((chunk for chunks in trace.accesses for chunk in chunks), default=-1) < known:
            self._memstats = None
            self._adopt(trace if trace.chunk_bytes == own else self.grown(trace), timed=True)

    def _belongs(self, trace: Trace) -> bool:
        return trace.kind == self._kind and trace.chunk_signature == self._context.chunk_signature

    def _with_links(self, trace: Trace) -> Trace:
        """Return ``trace`` with the speeds of the links, unless all model data fits on DEVICE."""
        chunks = max(self._context.size.total_bytes, sum(trace.chunk_bytes))  # includes chunks of activations
        needed = chunks + max(trace.reserve_bytes(), default=0)
        fits = needed + (self._context.capacity.non_model_bytes or 0) <= self._context.capacity.device_bytes
        return trace if fits else replace(trace, links=self._links.speeds())


# Number of cached schedules: one for steady steps, one after an evaluation, and a few for updates that ran
# one by one.
_SCHEDULES_KEPT = 8


class EarlyUpdate(NamedTuple):
    """The moments of an update that may run in backward, after moment ``behind``."""

    behind: int
    moments: tuple[int, ...]


class StepOrder(Learned):
    """Records steps, keeps the trace and its plan, and sets the chunk table's schedule."""

    def __init__(self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None) -> None:
        """Start in warmup, or with the plan made from ``memstats`` if that is of a step with this layout."""
        self._warned = False  # that activations and the largest update do not fit together
        self.updates_in_backward = False  # whether updates run in backward, if they can be moved
        self.timeline = MomentLog()  # the last complete step; pending updates append to it
        self.host_chunks: frozenset[int] = frozenset()  # chunks of states that are updated on HOST
        self._host_updates: HostUpdates | None = None  # chooses host_chunks
        self._early: dict[int, EarlyUpdate] = {}  # in the trace, by gradient chunk
        self._inside: set[int] = set()  # gradient chunks with updates that may not run early
        self._late: set[int] = set()  # moments of the log that belong to the previous step
        self._updates_inside = True  # whether steps end with their own update
        self._schedules: dict[object, Planned] = {}
        self._planned: PlannedStep | None = None  # the latest planned steady step that was followed
        self._expected: PlannedStep | None = None  # the plan behind the table's current schedule
        self._promised = PromisedStep(StepMeter(chunks))
        super().__init__("train", chunks, context, memstats)
        self.enforce()
        self.expect(())

    @property
    def moves_updates(self) -> bool:
        """Whether updates may run at another time than the end of their step: the order is known, there are
        transfers to hide, and the largest update fits beside the non-model memory of the worst period."""
        size = self._context.size
        transfers = self.room_bytes < size.total_bytes or bool(self.host_chunks)
        return self.trace is not None and transfers and size.working_set_bytes <= self.room_bytes

    def update_in_backward(self, wanted: bool) -> None:
        """Set whether updates run in backward, if they can be moved at all."""
        self.updates_in_backward = wanted

    @property
    def host_updates(self) -> HostUpdates | None:
        """Chooses the states that are updated on HOST; None: no states."""
        return self._host_updates

    @host_updates.setter
    def host_updates(self, updates: HostUpdates | None) -> None:
        self._host_updates = updates
        self._choose_host_chunks()
        self._forget_plans()
        self.resume(())

    def is_on_host(self, chunks: Sequence[int]) -> bool:
        """Whether the update that needs ``chunks`` at once runs on HOST."""
        return not self.host_chunks.isdisjoint(chunks)

    @property
    def overlaps(self) -> bool:
        """Whether the last step left its update to the next one."""
        return not self._updates_inside

    def is_early(self, gradient: int) -> bool:
        """Whether the update that consumes gradient chunk ``gradient`` may run in backward, after the last
        moment of that chunk."""
        return self.updates_in_backward and self.moves_updates and gradient in self._early

    def keep_inside(self, gradient: int) -> None:
        """From the next step on, expect the update that consumes gradient chunk ``gradient`` at the end of
        its step."""
        self._inside.add(gradient)
        self._early.pop(gradient, None)

    # -- one step --------------------------------------------------------------------------------

    def begin(self, pending: Sequence[PendingUpdate]) -> None:
        """Start to record a step. The ``pending`` updates will run in it."""
        self._late.clear()
        self.resume(pending)
        self.start_recording()
        # A GPU runs operators after their calls returned, so the end of a step is not known and no step is
        # measured.
        self._promised.begin(None if self._chunks.device.has_own_memory else self._expected)

    def expect(self, pending: Sequence[PendingUpdate], *, first: bool = False) -> None:
        """Set the table's schedule for the next step. Its ``pending`` updates come before their groups, or
        all of them ``first``."""
        found = self._schedule(self.trace, pending, first) if self.trace is not None else None
        self._expected = found.step if found is not None else None
        self._chunks.table.set_schedule(found.schedule if found is not None else None)
        self._chunks.table.begin_step()

    def resume(self, pending: Sequence[PendingUpdate]) -> None:
        """Apply the plan and the schedule of the next step again; an evaluation may have replaced both."""
        self.enforce()
        self.expect(pending)

    def note_late(self, *, traced: bool) -> None:
        """Assign an access to the previous step, which left its update pending: the moment that
        :meth:`pre_op` just logged, if ``traced``, else an untraced access."""
        log = self._recorder.log
        if traced:
            self._late.add(len(log) - 1)
        self.timeline.append(OPTIMIZER, log.usages[-3:] if traced else self._chunks.usages())

    @paused_collector()  # a trace has as many objects as moments
    def end(self, pending: Sequence[PendingUpdate]) -> None:
        """End the step, which leaves ``pending`` updates; make or change the trace if it was the first step
        or had a new order."""
        diverged = self._chunks.table.end_step()
        self._promised.end(followed=not diverged)
        log = self._recorder.log
        own = log.without(self._late) if self._late else log
        num_updates = own.phases.count(OPTIMIZER)
        try:
            if self.trace is None:
                self.learn(self._recorder.end())
            elif diverged or (pending and OPTIMIZER not in self.trace.phases):
                kept = [index for index in range(len(log)) if index not in self._late]
                self._reconsider(self._recorder.end().moments(kept), pending, self.grown(self.trace))
            elif not self.timed:
                self.complete(completed(self.grown(self.trace), self._recorder.end()))
        finally:  # policies may raise
            self._recorder.stop()
            self.timeline = own
            self._recorder.forget()
            self._late.clear()
            # Otherwise the step was skipped: the next may be like the previous one.
            if pending or num_updates:
                self._updates_inside = not pending
            self.resume(pending)

    def record_again(self, kept_bytes: int) -> None:
        """Discard the trace: the next step is a warmup. Its non-model memory may take what the trace had and
        ``kept_bytes`` more; model data leaves this room. No update may be pending."""
        reserve = self.trace.reserve_bytes() if self.trace is not None else ()
        self._expected_bytes = max(reserve, default=0) + kept_bytes
        self._forget_plans()
        self.forget()
        self.resume(())

    def replan(self, context: PlacementContext) -> None:
        """Plan again for another ``context``. No update may be pending."""
        self._forget_plans()
        super().replan(context)
        self._choose_host_chunks()

    def abandon(self) -> None:
        """Discard the record of this step: it is not typical."""
        super().abandon()
        self._promised.end(followed=False)
        self._late.clear()
        self._chunks.table.begin_step()

    def planned(self) -> PlannedStep | None:
        """Return the latest planned steady step that was followed, with the time it takes at the pace of the
        last steps. Simulates it again if the pace has changed."""
        return self._promised.renewed(self._planned)

    # -- inside ----------------------------------------------------------------------------------

    def _forget_plans(self) -> None:
        self._schedules.clear()
        self._planned = None
        self._promised.forget()

    def _adopt(self, trace: Trace, *, timed: bool) -> None:
        self._forget_plans()
        super()._adopt(trace, timed=timed)
        self._choose_host_chunks()
        self._early = {
            chunk: update for chunk, update in early_updates(trace).items() if chunk not in self._inside
        }
        context = self._context
        peak = max(self.plan.reserve_bytes, default=0) - self.withheld_bytes
        if peak + context.size.working_set_bytes > context.capacity.device_bytes and not self._warned:
            self._warned = True
            logger.warning(
                "activations and temporaries of the recorded step took %s; with the %s that the largest "
                "update needs this is more than device_bytes=%d (%s): model data is kept to the minimum; "
                "raise device_bytes or lower the batch size; torch.utils.checkpoint and "
                "activation_offload='auto' help too, where the program does not use them yet",
                format_bytes(peak),
                format_bytes(context.size.working_set_bytes),
                context.capacity.device_bytes,
                format_bytes(context.capacity.device_bytes),
            )

    def _schedule(self, trace: Trace, pending: Sequence[PendingUpdate], first: bool) -> Planned:
        early = tuple(self._early.values()) if self.updates_in_backward and self.moves_updates else ()
        key = (tuple((u.order, u.accesses) for u in pending), first, self._updates_inside, early)
        found = self._schedules.get(key)
        if found is None:
            if len(self._schedules) == _SCHEDULES_KEPT:
                self._schedules.clear()
            places = place_updates(trace, pending, first=first, inside=self._updates_inside, early=early)
            on_host = [index for index, place in enumerate(places) if self._is_on_host(place, trace)]
            found = self.schedule_of(trace, places, steady=not first, on_host=on_host)
            self._schedules[key] = found
        if found.step is not None:
            self._planned = found.step
        return found

    def _is_on_host(self, place: Place, trace: Trace) -> bool:
        is_update = place.moment is None or trace.phases[place.moment] == OPTIMIZER
        return is_update and self.is_on_host(place.chunks)

    def _choose_host_chunks(self) -> None:
        updates, trace = self._host_updates, self.trace
        if updates is None:
            self.host_chunks = frozenset()
        elif trace is None:
            self.host_chunks = updates.on_host(None, ())
        else:
            self.host_chunks = updates.on_host(self.room_bytes, trace.links)

    def _reconsider(self, own: Recorded, pending: Sequence[PendingUpdate], trace: Trace) -> None:
        """Handle a step that left the trace: keep the old plan if the change is temporary, adopt the new
        order once it repeats. ``own``: the moments that belong to this step."""
        recorded = _with_pending(own.moments(_program_order(own, trace)), pending, trace)
        if recorded.accesses == trace.accesses:
            return  # only the updates ran at another time
        same = _core(trace.accesses, trace.phases) == _core(recorded.accesses, recorded.phases)
        if same and OPTIMIZER not in recorded.phases:
            return  # an update was skipped
        if same or self.repeats(recorded.accesses):
            self._adopt(reordered(trace, recorded, keep_reserve=same), timed=False)
        else:
            logger.info("a step left the recorded order; it ran with least-recently-used eviction")


def place_updates(
    trace: Trace,
    pending: Sequence[PendingUpdate],
    *,
    first: bool,
    inside: bool,
    early: Sequence[EarlyUpdate] = (),
) -> list[Place]:
    """Return the moments of a step in the order in which they run.

    A pending update comes before the first moment that uses a chunk of its group, or with ``first`` all come
    at the beginning. After each update come those that the CPU begins at that time. ``inside``: the step ends
    with the update at the end of the trace, except for the parts that run ``early``. The period before the
    first moment is the trace's last period, because the iteration repeats.
    """
    core = [index for index, phase in enumerate(trace.phases) if phase != OPTIMIZER]
    updates = [index for index, phase in enumerate(trace.phases) if phase == OPTIMIZER]
    known = {trace.accesses[index]: index for index in updates}
    places: list[Place] = []
    waiting = {chunk: update for update in pending for chunk in update.chunks}
    left = {update.order: update for update in pending}
    period = len(trace.phases) - 1
    begins = [update.order for update in pending if update.can_begin]

    def place(orders: Sequence[tuple[int, int]]) -> None:
        for order in orders:
            if order in left:
                accesses = left.pop(order).accesses
                places.extend(Place(chunks, period, known.get(chunks)) for chunks in accesses)

    def run(orders: Sequence[tuple[int, int]]) -> None:
        for order in orders:
            place([order])
            place([each for each in begins if each in left][:BEGUN_AT_ONCE])

    behind: dict[int, list[int]] = {}
    for update in early if inside else ():
        behind.setdefault(update.behind, []).extend(update.moments)
    if first:
        run(list(left))
    ran: set[tuple[int, int]] = set()
    for moment in core:
        if left:
            needed = {waiting[chunk].order for chunk in trace.accesses[moment] if chunk in waiting} - ran
            run(sorted(needed))
            ran |= needed
        places.append(Place(trace.accesses[moment], moment, moment))
        if moment in behind:
            places += [Place(trace.accesses[index], moment, index) for index in behind[moment]]
        period = moment
    place(list(left))
    if inside:
        done = {index for update in early for index in update.moments}
        places += [Place(trace.accesses[index], index, index) for index in updates if index not in done]
    return places


def early_updates(trace: Trace) -> dict[int, EarlyUpdate]:
    """Return the updates that may run in backward, by gradient chunk. These are the groups with parameters
    that are not used after the last moment that uses their gradients."""
    last = {
        chunk: moment
        for moment, phase in enumerate(trace.phases)
        if phase == BACKWARD
        for chunk in trace.accesses[moment]
    }
    found = {}
    for moments in update_groups(trace):
        used = {chunk for moment in moments for chunk in trace.accesses[moment]}
        grads = [chunk for chunk in used if trace.chunk_kinds[chunk] == ChunkKind.GRAD.value]
        if (
            len(grads) == 1
            and grads[0] in last
            and max(last.get(chunk, -1) for chunk in used) == last[grads[0]]
        ):
            found[grads[0]] = EarlyUpdate(last[grads[0]], tuple(moments))
    return found


def _program_order(own: Recorded, trace: Trace) -> list[int]:
    """Return the indices of a step's moments in program order: updates at the end, in the order of
    ``trace``."""
    places = {
        chunks: index for index, chunks in enumerate(trace.accesses) if trace.phases[index] == OPTIMIZER
    }
    updates = [index for index, phase in enumerate(own.phases) if phase == OPTIMIZER]
    updates.sort(key=lambda index: places.get(own.accesses[index], len(trace.phases)))
    return [index for index, phase in enumerate(own.phases) if phase != OPTIMIZER] + updates


def _core(accesses: Accesses, phases: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the moments that are not updates."""
    return [chunks for chunks, phase in zip(accesses, phases, strict=True) if phase != OPTIMIZER]


def _with_pending(own: Recorded, pending: Sequence[PendingUpdate], trace: Trace) -> Recorded:
    """Return ``own`` with the pending updates appended; modes and frees of each are those of the same update
    in ``trace``."""
    known = {chunks: index for index, chunks in enumerate(trace.accesses) if trace.phases[index] == OPTIMIZER}
    left = tuple(chunks for update in pending for chunks in update.accesses)
    likes = [known.get(chunks) for chunks in left]
    count = len(left)
    return Recorded(
        accesses=own.accesses + left,
        modes=own.modes
        + tuple(
            "m" * len(chunks) if like is None else trace.modes[like]
            for chunks, like in zip(left, likes, strict=True)
        ),
        frees=own.frees + tuple(() if like is None else trace.frees[like] for like in likes),
        phases=own.phases + (OPTIMIZER,) * count,
        seconds=own.seconds + (0.0,) * count,
        non_model_bytes=own.non_model_bytes + (0,) * count,
    )


class UpdateOperators:
    """Pins the chunks of updates. Each context manager pins ``tensors`` for its block; those in ``dirty``
    count as written. ``on_host``: pin them on HOST for the CPU, otherwise on DEVICE. Raises as
    :meth:`Gate.pre_op`.

    ``thread``: the thread on which the CPU may update chunks that stay pinned after a block.
    """

    def __init__(self, gate: Gate, order: StepOrder) -> None:
        self._gate = gate
        self._order = order
        self.thread = UpdateThread()

    @contextmanager
    def inside(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """For an update inside the step: the block is a moment of the step."""
        self._gate.pre_op(tensors, on_host=on_host)
        try:
            yield
        finally:
            self._gate.post_ops(tensors, dirty)

    @contextmanager
    def late(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """For a pending update: the block belongs to the previous step, and waits for no other pending
        update."""
        self.pin_late(tensors, on_host=on_host)
        try:
            yield
        finally:
            self.unpin(tensors, dirty)

    def pin_late(self, tensors: TensorIds, *, on_host: bool) -> None:
        """Pin ``tensors`` as :meth:`late` does, until :meth:`unpin`."""
        traced = self._gate.next_late_moment(self._order, tensors, on_host=on_host)
        self._order.note_late(traced=traced)

    def unpin(self, tensors: TensorIds, dirty: TensorIds) -> None:
        """Unpin ``tensors``; those in ``dirty`` were written."""
        self._gate.post_ops(tensors, dirty)

    @contextmanager
    def beside(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """For an update of chunks of a choice, on DEVICE. The block is no moment, because the chunks that it
        needs are not known in advance."""
        assert not on_host
        self._gate.next_beside(tensors)
        try:
            yield
        finally:
            self._gate.post_ops(tensors, dirty)

    @contextmanager
    def aside(self, tensors: TensorIds) -> Iterator[None]:
        """For reading ``tensors`` as they are, on DEVICE. The block is no moment, and pending updates stay
        pending, except those that the CPU has begun."""
        self._gate.finish_begun()
        self._gate.settle()
        self._gate.chunks.acquire(tensors, traced=False)
        try:
            yield
        finally:
            self._gate.chunks.release(tensors, dirty=False)

    def can_use_host(self, tensors: TensorIds) -> bool:
        """Say whether the CPU could use ``tensors`` on HOST: HOST has room, they are not only on DISK, and no
        operator uses their chunks on DEVICE."""
        return self._gate.chunks.table.can_access_on_host(tensors)
