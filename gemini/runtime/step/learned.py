"""Learned: the order of one kind of iteration: its trace, the plan made from it, and how both came about.
EvalOrder: that of evaluation passes, apart from training steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.memstats import Trace
from gemini.placement import ModelDataSize, PlacementPlan, PlacementPolicy, TierCapacity
from gemini.placement.problem import CPU_TRANSFERS_TAKE, Machine
from gemini.runtime.intercept.compiled import num_compilations
from gemini.runtime.step.meters import LinkMeter
from gemini.runtime.step.planned import Place, Planned, StepPlanner
from gemini.runtime.step.recorder import Accesses, MomentLog, Recorded, Recorder
from gemini.runtime.step.trace_order import completed, reordered, steady_modes, typical_seconds

TIMED_ITERATIONS = 3  # the middle one by its computing time counts
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacementContext:
    """Everything a plan is made from, besides the trace."""

    policy: PlacementPolicy
    size: ModelDataSize
    capacity: TierCapacity
    chunk_signature: str


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
        """DEVICE bytes that model data may take in every period."""
        reserve = max(self.plan.reserve_bytes, default=0)
        return min(self.plan.device_limit_bytes, self._context.capacity.device_bytes - reserve)

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Say which tensor is which parameter, so that a trace can list them by first use."""
        self._names = dict(names)

    def enforce(self) -> None:
        """Put the plan in force."""
        self._chunks.table.set_limit(self.plan.device_limit_bytes)
        # Once it is known what non-model memory takes, what is parked holds none of it away.
        self._chunks.park(max(0, self.room_bytes), always=self.trace is not None)

    def start_recording(self) -> None:
        """Begin an iteration, and measure what is not known yet."""
        warmup = self.trace is None
        self._num_compilations = num_compilations()
        if not self.timed and not self._candidates:
            self._links.begin()
        self._recorder.begin(
            warmup=warmup, timed=not self.timed, sampled=warmup and self.plan.sample_non_model
        )

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
            param_order=tuple(self._names[t] for t in self._recorder.first_uses if t in self._names),
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
        """Plan anew, with ``nbytes`` of DEVICE left free beyond what the policy says."""
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


class EvalOrder(Learned):
    """Records evaluation passes: forward, without gradients, outside a step; each pass is an iteration.

    It shares the chunk table with the steps and leaves nothing there: between :meth:`begin` and the
    ``resume`` of the steps' order the table follows this one.
    """

    def __init__(self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when that is of an evaluation with this
        layout."""
        self._schedule: _C.Schedule | None = None
        super().__init__("eval", chunks, context, memstats)

    def begin(self, room_bytes: int) -> None:
        """Start to record a pass; ``room_bytes`` is what model data may take while nothing is known of
        it."""
        table = self._chunks.table
        table.set_schedule(self._schedule)
        self.enforce()
        if self.trace is None:
            table.set_limit(max(0, room_bytes))
        table.begin_step()
        self.start_recording()

    def end(self) -> None:
        """Close the pass; learn from it when it was the first or a new one."""
        diverged = self._chunks.table.end_step()
        if self.trace is None:
            self.learn(self._recorder.end())
        elif diverged:
            self._reconsider(self._recorder.end(), self.trace)
        elif not self.timed:
            self.complete(completed(self.grown(self.trace), self._recorder.end()))
        self._recorder.stop()

    def replan(self, context: PlacementContext) -> None:
        """Plan for model data of another size; passes have the order that they had."""
        trace, timed = self.trace, self.timed
        super().replan(context)
        if trace is not None and self.trace is None:
            self._adopt(self.grown(trace), timed=timed)

    def _adopt(self, trace: Trace, *, timed: bool) -> None:
        super()._adopt(trace, timed=timed)
        places = [Place(chunks, moment, moment) for moment, chunks in enumerate(trace.accesses)]
        self._schedule = self.schedule_of(trace, places, steady=True).schedule

    def _reconsider(self, recorded: Recorded, trace: Trace) -> None:
        """A pass left the trace: adopt the new order once it repeats."""
        if self.repeats(recorded.accesses):
            self._adopt(reordered(self.grown(trace), recorded, keep_reserve=False), timed=False)
        else:
            logger.info("an evaluation left the recorded order; it ran with least-recently-used eviction")
