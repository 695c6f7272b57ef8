"""Learned: the order of one kind of iteration, its trace and the plan made from it. StepOrder: what a step
does at which moment; recorded once, then planned for and followed. UpdateOperators: how updates pin what they
need.

A trace says what an iteration does in the order of the program: forward, backward, update. Where updates are
deferred, the schedule that the chunk table follows is made from it: the moments of forward and backward, and
before the first use of each chunk group the pending update of that group; or, where they run in backward,
behind the last gradient of each group its update (docs/notes/overlap.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from gemini.chunk import ChunkKind, ChunkManager, TensorIds
from gemini.memstats import Trace
from gemini.memstats.trace import BACKWARD, OPTIMIZER
from gemini.placement import ModelDataSize, PlacementPlan, PlacementPolicy, TierCapacity
from gemini.placement.problem import CPU_TRANSFERS_TAKE, Machine, update_groups
from gemini.placement.report import PlannedStep
from gemini.runtime.gate.gate import Gate
from gemini.runtime.gate.waiting import BEGUN_AT_ONCE, PendingUpdate, UpdateThread
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


TIMED_ITERATIONS = 3  # the middle one by its computing time counts


@dataclass(frozen=True)
class PlacementContext:
    """Everything a plan is made from, besides the trace.

    ``capacity``: of what plans know. Beside it there may be chunks of ``other_bytes`` that no plan knows,
    since they come and go: they have ``other_device_bytes`` of DEVICE to themselves.
    """

    policy: PlacementPolicy
    size: ModelDataSize
    capacity: TierCapacity
    chunk_signature: str
    other_bytes: int = 0
    other_device_bytes: int = 0

    @property
    def all_may_stay(self) -> bool:
        """Whether no chunk has to leave DEVICE for those that no plan knows."""
        return self.other_bytes <= self.other_device_bytes


class Learned:
    """What training steps and evaluation passes have in common.

    The first iteration is the warmup. Its record becomes the trace, and the plan is made. The times of a
    warmup are those of memory that is touched for the first time, so the first iterations that follow a new
    trace are timed; with typical times of these the trace is final and the plan is made once more.
    """

    def __init__(
        self, kind: str, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None
    ) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when that is of this ``kind`` and
        layout."""
        self.withheld_bytes = 0  # of DEVICE, since memory ran out
        self.measures = False  # the non-model memory of the next iteration, though its order is known
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
        self._rival: Accesses | None = None  # what the last diverging iteration did
        self._names: dict[int, str] = {}
        self._num_compilations = 0  # when the iteration began
        self._memstats = memstats  # until its chunks are there
        self._adopt_given()

    @property
    def has_order(self) -> bool:
        """Whether the order of iterations is known: recorded, or given with chunks that are still to come."""
        return self.trace is not None or self._memstats is not None

    @property
    def room_bytes(self) -> int:
        """DEVICE bytes that model data may take in every period, beside chunks that no plan knows."""
        reserve = max(self.plan.reserve_bytes, default=0)
        return min(self.plan.device_limit_bytes, self._context.capacity.device_bytes - reserve)

    def measure(self, wanted: bool) -> None:
        """Say whether the non-model memory of the next iteration is measured, though its order is known."""
        self.measures = wanted

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Say which tensor is which parameter, so that a trace can list them by first use."""
        self._names = dict(names)

    def enforce(self) -> None:
        """Put the plan in force."""
        others = self._context.other_device_bytes
        self._chunks.table.set_limit(self.plan.device_limit_bytes + others)
        # Once it is known what non-model memory takes, what is parked holds none of it away.
        self._chunks.park(max(0, self.room_bytes + others), always=self.trace is not None)

    def start_recording(self) -> None:
        """Begin an iteration, and measure what is not known yet."""
        warmup = self.trace is None
        self._num_compilations = num_compilations()
        if not self.timed and not self._candidates:
            self._links.begin()
        sampled = self.measures or (warmup and self.plan.sample_non_model)
        self._recorder.begin(warmup=warmup, timed=not self.timed, sampled=sampled)

    def abandon(self) -> None:
        """Forget the iteration: what it recorded does not say what one does."""
        self._recorder.stop()
        self._recorder.forget()

    def close(self) -> None:
        """End what measures."""
        self._recorder.stop()

    @property
    def log(self) -> MomentLog:
        """The moments of the iteration under way, so far."""
        return self._recorder.log

    def measured(self) -> Trace | None:
        """Return the trace once its times are final, with the speed of every link whether it is needed or
        not."""
        if self.trace is None or not self.timed:
            return None
        return replace(self.trace, links=self.trace.links or self._links.speeds())

    def machine(self, trace: Trace) -> Machine:
        """Return what iterations of ``trace`` have to work with under the plan in force. Raises ConfigError
        where it does not know a link."""
        return self.planner.machine(trace, self.plan)

    # -- learning --------------------------------------------------------------------------------

    def learn(self, recorded: Recorded) -> None:
        """Make the warmup's record the trace, unless something was compiled meanwhile: then the next one is
        the warmup."""
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
        """Take the trace with the times of this iteration, if it has any; plan once more when there are
        enough of them. Of the one in the middle all but the times of single periods is taken."""
        if trace is None or num_compilations() != self._num_compilations:
            return
        self._candidates.append(trace)
        if len(self._candidates) == TIMED_ITERATIONS:
            middle = sorted(self._candidates, key=lambda one: sum(one.seconds))[TIMED_ITERATIONS // 2]
            seconds = typical_seconds([one.seconds for one in self._candidates])
            self._adopt(self._with_links(self.grown(replace(middle, seconds=seconds))), timed=True)

    def grown(self, trace: Trace) -> Trace:
        """Return ``trace`` with the chunks that were made since it was recorded: those of activations."""
        specs = [chunk.spec for chunk in self._chunks.chunks]
        return replace(
            trace,
            chunk_bytes=tuple(spec.nbytes for spec in specs),
            chunk_kinds=tuple(spec.label for spec in specs),
        )

    def repeats(self, accesses: Accesses) -> bool:
        """Say whether the last iteration that left the trace did the same; remember what this one did."""
        repeated = accesses == self._rival
        self._rival = accesses
        return repeated

    def forget(self) -> None:
        """Go back to before the warmup."""
        self.plan = self._warmup_plan()
        self.planner.forget()
        self.trace, self.timed, self._rival = None, False, None
        self._candidates.clear()

    def schedule_of(
        self, trace: Trace, places: Sequence[Place], *, steady: bool, on_host: Sequence[int] = ()
    ) -> Planned:
        """Return what the table follows; planned if the order is ``steady``, to be repeated. ``on_host``: the
        places whose operators are the CPU's, on HOST."""
        final = steady and self.timed
        return self.planner.schedule(trace, places, self.plan, final=final, on_host=on_host)

    def replan(self, context: PlacementContext) -> None:
        """Forget the trace and go on with model data of another size, by the trace that was given at first
        where it is of the chunks that there are now."""
        self._context = context
        self.planner.take(context.capacity)
        self.forget()
        self._adopt_given()

    def withhold(self, nbytes: int) -> None:
        """Plan again, with ``nbytes`` of DEVICE left free beyond what the policy says."""
        self.withheld_bytes = nbytes
        if self.trace is None:
            self.plan = self._warmup_plan()
        else:
            self._adopt(self.trace, timed=self.timed)

    # -- inside ----------------------------------------------------------------------------------

    def _warmup_plan(self) -> PlacementPlan:
        context = self._context
        plan = context.policy.warmup_plan(context.size, context.capacity)
        return plan.withholding(self.withheld_bytes, context.capacity.device_bytes)

    def _adopt(self, trace: Trace, *, timed: bool) -> None:
        """Plan the iterations to come from ``trace``; ``timed``: its times are final."""
        context = self._context
        plan = context.policy.plan(context.size, context.capacity, trace)
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
        """Say how fast the links are, unless nothing is ever going to be transferred."""
        chunks = max(self._context.size.total_bytes, sum(trace.chunk_bytes))  # those of activations, too
        needed = chunks + max(trace.reserve_bytes(), default=0)
        fits = needed + (self._context.capacity.non_model_bytes or 0) <= self._context.capacity.device_bytes
        return trace if fits else replace(trace, links=self._links.speeds())


# Schedules kept: one in steady state, another after an evaluation, a few where updates ran one by one.
_SCHEDULES_KEPT = 8


class EarlyUpdate(NamedTuple):
    """The moments of an update, and the moment of backward behind which they may run."""

    behind: int
    moments: tuple[int, ...]


class StepOrder(Learned):
    """Records steps, keeps the trace and the plan made from it, and tells the chunk table what comes next."""

    def __init__(self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when that is of a step with this
        layout."""
        self._warned = False  # that activations and one update do not fit
        self.updates_in_backward = False  # as far as they may be moved at all
        self.timeline = MomentLog()  # of the last complete step; pending updates append to it
        self.host_chunks: frozenset[int] = frozenset()  # of states that are updated on HOST
        self._host_updates: HostUpdates | None = None  # what chooses them
        self._early: dict[int, EarlyUpdate] = {}  # in the trace, by the chunk of their gradients
        self._inside: set[int] = set()  # chunks of gradients whose updates do not run early
        self._late: set[int] = set()  # moments of the log that belong to the step before
        self._updates_inside = True  # whether steps end with their own update
        self._schedules: dict[object, Planned] = {}
        self._planned: PlannedStep | None = None  # the steady step that was planned and followed last
        self._expected: PlannedStep | None = None  # the plan that the table follows now
        self._promised = PromisedStep(StepMeter(chunks))
        super().__init__("train", chunks, context, memstats)
        self.enforce()
        self.expect(())

    @property
    def moves_updates(self) -> bool:
        """Whether updates need not run at the end of their step: its order is known, there are transfers to
        hide, and the largest update has room beside the non-model memory of the worst period."""
        size = self._context.size
        transfers = self.room_bytes < size.total_bytes or bool(self.host_chunks)
        return self.trace is not None and transfers and size.working_set_bytes <= self.room_bytes

    def update_in_backward(self, wanted: bool) -> None:
        """Say whether updates run within backward, as far as they may be moved at all."""
        self.updates_in_backward = wanted

    @property
    def host_updates(self) -> HostUpdates | None:
        """What chooses the states that are updated on HOST; None: none are."""
        return self._host_updates

    @host_updates.setter
    def host_updates(self, updates: HostUpdates | None) -> None:
        self._host_updates = updates
        self._choose_host_chunks()
        self._forget_plans()
        self.resume(())

    def is_on_host(self, chunks: Sequence[int]) -> bool:
        """Whether the update that needs ``chunks`` at once belongs on HOST."""
        return not self.host_chunks.isdisjoint(chunks)

    @property
    def overlaps(self) -> bool:
        """Whether the last step left its update to the next one."""
        return not self._updates_inside

    def is_early(self, gradient: int) -> bool:
        """Whether the update that uses up chunk ``gradient`` may run in backward, behind its last moment."""
        return self.updates_in_backward and self.moves_updates and gradient in self._early

    def keep_inside(self, gradient: int) -> None:
        """Expect the update that uses up chunk ``gradient`` at the end of its step from the next one on."""
        self._inside.add(gradient)
        self._early.pop(gradient, None)

    # -- one step --------------------------------------------------------------------------------

    def begin(self, pending: Sequence[PendingUpdate]) -> None:
        """Start to record a step during which ``pending`` will run."""
        self._late.clear()
        self.resume(pending)
        self.start_recording()
        # On a device of its own operators run on after their calls returned: nothing says when a step ends.
        self._promised.begin(None if self._chunks.device.has_own_memory else self._expected)

    def expect(self, pending: Sequence[PendingUpdate], *, first: bool = False) -> None:
        """Tell the table what comes next: a step, its ``pending`` updates before their groups or all
        ``first``."""
        found = self._schedule(self.trace, pending, first) if self.trace is not None else None
        self._expected = found.step if found is not None else None
        self._chunks.table.set_schedule(found.schedule if found is not None else None)
        self._chunks.table.begin_step()

    def resume(self, pending: Sequence[PendingUpdate]) -> None:
        """Put the plan in force and tell the table what comes next; an evaluation may have changed both."""
        self.enforce()
        self.expect(pending)

    def note_late(self, *, traced: bool) -> None:
        """Count the moment that :meth:`pre_op` has just logged, if ``traced``, or this untraced access to
        the step before, which left its update pending."""
        log = self._recorder.log
        if traced:
            self._late.add(len(log) - 1)
        self.timeline.append(OPTIMIZER, log.usages[-3:] if traced else self._chunks.usages())

    @paused_collector()  # a trace is made of as many objects as there are moments
    def end(self, pending: Sequence[PendingUpdate]) -> None:
        """Close the step, which leaves ``pending``; learn from it when it was the first or a new one."""
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
        finally:  # a policy may raise
            self._recorder.stop()
            self.timeline = own
            self._recorder.forget()
            self._late.clear()
            if pending or num_updates:  # else a skipped step: the next one may be like the one before
                self._updates_inside = not pending
            self.resume(pending)

    def record_again(self) -> None:
        """Forget the trace: the next step is a warmup. Nothing may be pending."""
        self._forget_plans()
        self.forget()
        self.resume(())

    def replan(self, context: PlacementContext) -> None:
        """Plan again for another ``context``. Nothing may be pending."""
        self._forget_plans()
        super().replan(context)
        self._choose_host_chunks()

    def abandon(self) -> None:
        """Forget the step: what it recorded does not say what an iteration does."""
        super().abandon()
        self._promised.end(followed=False)
        self._late.clear()
        self._chunks.table.begin_step()

    def planned(self) -> PlannedStep | None:
        """Return the steady step that was planned and followed last, with what it takes at the pace of the
        last steps. Simulates it if that has changed."""
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
        """A step left the trace: keep the old plan for a passing change, adopt the new order once it
        repeats. ``own`` are the moments that belong to the step itself."""
        recorded = _with_pending(own.moments(_program_order(own, trace)), pending, trace)
        if recorded.accesses == trace.accesses:
            return  # only the updates came at another time
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
    """Return the moments of a step.

    A pending update comes before the first moment that uses a chunk of its group, all of them at the
    beginning where ``first``; behind each come those that the CPU begins then. ``inside``: the step ends with
    the update that the trace ends with, except for those parts that run ``early``. Before the first moment of
    the trace lies its last period: the iteration repeats.
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
    """Return the updates that may run in backward, by the chunk of their gradients: those of groups whose
    parameters nothing uses behind the last moment that uses their gradients."""
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
    """Return the moments of a step, those of its updates at the end and as ``trace`` has them."""
    places = {
        chunks: index for index, chunks in enumerate(trace.accesses) if trace.phases[index] == OPTIMIZER
    }
    updates = [index for index, phase in enumerate(own.phases) if phase == OPTIMIZER]
    updates.sort(key=lambda index: places.get(own.accesses[index], len(trace.phases)))
    return [index for index, phase in enumerate(own.phases) if phase != OPTIMIZER] + updates


def _core(accesses: Accesses, phases: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the moments that are no updates."""
    return [chunks for chunks, phase in zip(accesses, phases, strict=True) if phase != OPTIMIZER]


def _with_pending(own: Recorded, pending: Sequence[PendingUpdate], trace: Trace) -> Recorded:
    """Return ``own`` with the updates at its end that have not run yet, as the like of them did in
    ``trace``."""
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
    """Each pins ``tensors`` for a block; those in ``dirty`` count as written. ``on_host``: where they lie on
    HOST, for the CPU, else on DEVICE. Raises as :meth:`Gate.pre_op`.

    ``thread``: on which the CPU may update what stays pinned beyond a block.
    """

    def __init__(self, gate: Gate, order: StepOrder) -> None:
        self._gate = gate
        self._order = order
        self.thread = UpdateThread()

    @contextmanager
    def inside(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """Of an update inside the step: a moment of it."""
        self._gate.pre_op(tensors, on_host=on_host)
        try:
            yield
        finally:
            self._gate.post_ops(tensors, dirty)

    @contextmanager
    def late(self, tensors: TensorIds, dirty: TensorIds, *, on_host: bool = False) -> Iterator[None]:
        """Of a pending update: it waits for none, and counts to the step before."""
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
        """Of an update of chunks of a choice, on DEVICE. It is no moment: nobody knows before which chunks it
        needs."""
        assert not on_host
        self._gate.next_beside(tensors)
        try:
            yield
        finally:
            self._gate.post_ops(tensors, dirty)

    @contextmanager
    def aside(self, tensors: TensorIds) -> Iterator[None]:
        """Pin ``tensors`` on DEVICE, to read them as they are: no moment of anything, and what is pending of
        their update stays pending, except for what the CPU has begun."""
        self._gate.finish_begun()
        self._gate.settle()
        self._gate.chunks.acquire(tensors, traced=False)
        try:
            yield
        finally:
            self._gate.chunks.release(tensors, dirty=False)

    def can_use_host(self, tensors: TensorIds) -> bool:
        """Say whether an operator of the CPU could use ``tensors`` on HOST: it has room, they are not on DISK
        alone, and nothing uses their chunks on DEVICE."""
        return self._gate.chunks.table.can_access_on_host(tensors)
