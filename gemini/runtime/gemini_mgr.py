"""GeminiManager: runs an iteration over the chunks; records it once, then follows the plan made from it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from gemini import _C
from gemini.chunk import ChunkManager, TensorIds
from gemini.errors import EvictedAccessError, StateError
from gemini.memstats import MemStatsCollector, ProcessMonitor, Trace
from gemini.placement import ModelDataSize, PlacementPlan, PlacementPolicy, TierCapacity
from gemini.runtime.backward import BackwardPins
from gemini.runtime.phases import FORWARD
from gemini.runtime.tensor_mgr import StatefulTensorMgr

if TYPE_CHECKING:
    from gemini.runtime.param import TensorRef

logger = logging.getLogger(__name__)

# Moments after which a step counts as one that nobody ends (an evaluation that records gradients, another
# optimizer).
_LONGEST_STEP = 2**20


# (phase, DEVICE bytes, HOST bytes, DISK bytes) right after a PreOp
Moment = tuple[str, int, int, int]


@dataclass(frozen=True)
class PlacementContext:
    """Everything a plan is made from, besides the trace."""

    policy: PlacementPolicy
    size: ModelDataSize
    capacity: TierCapacity
    chunk_signature: str


class GeminiManager:
    """The memory manager of one model: MemStatsCollector plus StatefulTensorMgr, in a step's order.

    ``pre_op`` / ``post_op`` bracket every operator that takes managed tensors. Not thread-safe.
    """

    _strays_reported: ClassVar[int] = 0  # of the process: one fault handler serves all models

    def __init__(
        self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None = None
    ) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when it belongs to this layout."""
        self.chunks = chunks
        self.tensors = StatefulTensorMgr(chunks)
        self.context = context
        self.step = 0
        self.phase = FORWARD
        self._plan = context.policy.warmup_plan(context.size, context.capacity)
        self._collector: MemStatsCollector | None = None
        self._monitor: ProcessMonitor | None = None
        self._trace: Trace | None = None
        self._rival: tuple[tuple[int, ...], ...] | None = None  # what the last diverging step did
        self._in_step = False
        self._tracing = False
        self._log: list[Moment] = []
        self._timeline: list[Moment] = []
        self._written: set[int] = set()
        self.backward_pins = BackwardPins(self)
        self._names: dict[int, str] = {}
        self._first_uses: dict[int, None] = {}
        self._first_address, self._end_address = chunks.address_range()
        # Gradients outside chunks, in bytes: now, and the most of them together with the table's DEVICE
        # bytes.
        self.loose_bytes = 0
        self.peak_device_bytes = 0
        self.num_gradients = 0  # that arrived since the model was wrapped
        # True while a loss scale is needed (fp16) and no scaled backward is under way.
        self.expects_scaled_loss = False
        # True once every chunk is on DEVICE for good: operators then need no PreOp.
        self.resident = False
        self._enforce(self._plan)
        if memstats is not None and memstats.chunk_signature == context.chunk_signature:
            self._adopt_trace(memstats)
        _live_managers.add(self)

    # -- operators -------------------------------------------------------------------------------

    def pre_op(self, tensors: TensorIds) -> None:
        """Pin ``tensors`` on DEVICE (they become COMPUTE), fetching what is missing.

        Raises:
            OutOfBudgetError, IoError: as :meth:`ChunkManager.acquire`; nothing is pinned.
            EvictedAccessError: memory of an evicted chunk was touched outside an operator before this one.
        """
        if _C.stray_count() != GeminiManager._strays_reported:
            self._raise_stray()
        if self.backward_pins.held is not None:
            self.backward_pins.settle()
        if not self._tracing:
            self.chunks.acquire(tensors, traced=False)
            return
        try:
            self._traced_pre_op(tensors)
        except BaseException:
            self._abandon_step()  # what it recorded no longer says what an iteration does
            raise
        self._log.append((self.phase, *self.chunks.table.usages()))
        if len(self._log) == _LONGEST_STEP:
            self._abandon_step()

    def post_op(self, tensors: TensorIds, dirty: bool) -> None:
        """Unpin ``tensors`` (they become HOLD); ``dirty`` when the operator wrote to them."""
        self.chunks.release(tensors, dirty=dirty)

    @contextmanager
    def operator(self, tensors: TensorIds, dirty: TensorIds = ()) -> Iterator[None]:
        """Pin ``tensors`` for the block; those in ``dirty`` count as written."""
        self.pre_op(tensors)
        try:
            yield
        finally:
            written = set(dirty)
            self.post_op([tensor for tensor in tensors if tensor in written], True)
            self.post_op([tensor for tensor in tensors if tensor not in written], False)

    def views(self, ref: TensorRef, address: int) -> bool:
        """Say whether ``address`` lies in the window that the tensor of ``ref`` lies in."""
        if not self._first_address <= address < self._end_address:
            return False
        return self.chunks.chunk_at(address) == self.chunks.table.chunk_of(ref.tensors[0])

    def note_written(self, tensors: TensorIds) -> None:
        """Remember that user code wrote to ``tensors``; see :meth:`take_written`."""
        self._written.update(tensors)

    def take_written(self, tensor: int) -> bool:
        """Say whether user code wrote to ``tensor`` since the last call for it."""
        if tensor in self._written:
            self._written.discard(tensor)
            return True
        return False

    def count_loose(self, nbytes: int) -> None:
        """Count ``nbytes`` more (or less) of gradients outside chunks."""
        self.loose_bytes += nbytes
        used = self.chunks.table.usage(_C.Tier.DEVICE) + self.loose_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, used)

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Say which tensor is which parameter, so that a trace can list them by first use."""
        self._names = dict(names)

    # -- steps -----------------------------------------------------------------------------------

    @property
    def is_warmup(self) -> bool:
        """Whether no iteration has been recorded yet."""
        return self._trace is None

    @property
    def plan(self) -> PlacementPlan:
        """The plan in force."""
        return self._plan

    @property
    def trace(self) -> Trace | None:
        """The recorded iteration that the plan was made from."""
        return self._trace

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """Run a forward pass of the whole model; one that trains belongs to a step, an evaluation does
        not."""
        outer = (self._tracing, self.phase)
        self.recover()
        if training and not self._in_step and not self.resident:
            self._begin_step()
        self._tracing = training and self._in_step
        self.phase = FORWARD
        try:
            yield
        finally:
            if not training:
                self._tracing, self.phase = outer

    def recover(self) -> None:
        """Unpin what operators that raised half-way left pinned, as written: they may have been. Inside a
        backward pass operators are still under way."""
        if torch._C._current_graph_task_id() == -1:
            held = self.backward_pins.held
            self.backward_pins.forget()
            if held is not None:
                self.chunks.release(held, dirty=False)
            self.chunks.recover()

    def end_step(self) -> None:
        """Close the iteration after the optimizer's update; learn from it when it was the first or a new
        one."""
        self.step += 1
        self.phase = FORWARD
        if self.backward_pins.held is not None:
            self.backward_pins.settle()
        if not self._in_step:
            return
        self._in_step = self._tracing = False
        diverged = self.chunks.table.end_step()
        if self._trace is None:
            self._adopt_trace(self._recorded_trace())
        elif diverged:
            self._reconsider()
        self._timeline, self._log = self._log, []
        self.chunks.end_step()
        self.resident = self._fits_for_good()

    def timeline(self) -> list[Moment]:
        """Return the fill of the tiers at each moment of the last complete step."""
        return self._timeline

    def close(self) -> None:
        """Give all memory back; any later use of a managed tensor raises StateError."""
        self.resident = False
        self._stop_collecting()
        self.pre_op = _closed  # type: ignore[method-assign]
        self.chunks.close()

    # -- inside ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._in_step = True
        self._log = []
        self.chunks.table.begin_step()
        if self._trace is None and self._plan.sample_non_model:
            self._stop_collecting()
            self._monitor = ProcessMonitor()
            self._collector = MemStatsCollector(self._monitor, _C.arena_process_bytes)
            self._collector.start()

    def _abandon_step(self) -> None:
        """Go on without recording: the next training pass begins a new step."""
        self._in_step = self._tracing = False
        self._log = []
        self._stop_collecting()
        self.chunks.table.begin_step()

    def _stop_collecting(self) -> None:
        self._collector = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _traced_pre_op(self, tensors: TensorIds) -> None:
        if self._trace is not None:
            self.chunks.acquire(tensors, traced=True)
            try:
                self.chunks.prefetch()
            except BaseException:  # of another chunk's transfer
                self.chunks.release(tensors, dirty=False)
                raise
            return
        # The warmup samples before the layout changes.
        if self._collector is not None:
            self._collector.sample(self.chunks.table.moment(), self.phase)
        self.chunks.acquire(tensors, traced=True)
        if self._collector is not None:
            self._collector.note_model_data()
        for tensor in tensors:
            self._first_uses.setdefault(tensor)

    def _fits_for_good(self) -> bool:
        """Say whether all model data is on DEVICE and nothing will ever make room there."""
        reserve = max(self._plan.reserve_bytes, default=0)
        limit = min(self._plan.device_limit_bytes, self.context.capacity.device_bytes - reserve)
        return self.context.size.total_bytes <= limit and self.chunks.all_on_device()

    def _recorded_trace(self) -> Trace:
        accesses = tuple(tuple(chunks) for chunks in self.chunks.table.record())
        non_model = self._collector.finish() if self._collector is not None else (0,) * len(accesses)
        self._stop_collecting()
        return Trace(
            accesses=accesses,
            non_model_bytes=non_model,
            phases=tuple(moment[0] for moment in self._log),
            param_order=tuple(self._names[t] for t in self._first_uses if t in self._names),
            chunk_signature=self.context.chunk_signature,
        )

    def _adopt_trace(self, trace: Trace) -> None:
        """Plan the iterations to come from ``trace``."""
        self._trace = trace
        self._rival = None
        context = self.context
        self._plan = context.policy.plan(context.size, context.capacity, trace)
        self._enforce(self._plan)
        reserve = list(self._plan.reserve_bytes)
        schedule = _C.Schedule([list(ids) for ids in trace.accesses], reserve, len(self.chunks.chunks))
        self.chunks.table.set_schedule(schedule)
        peak = max(reserve, default=0)
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

    def _enforce(self, plan: PlacementPlan) -> None:
        self.chunks.table.set_limit(plan.device_limit_bytes)
        peak = max(plan.reserve_bytes, default=0)
        self.chunks.park_limit_bytes = max(
            0, min(plan.device_limit_bytes, self.context.capacity.device_bytes - peak)
        )

    def _reconsider(self) -> None:
        """A step left the trace: keep the old plan for a passing change, adopt the new order once it
        repeats."""
        assert self._trace is not None
        accesses = tuple(tuple(chunks) for chunks in self.chunks.table.record())
        if accesses != self._rival:
            self._rival = accesses
            logger.info(
                "step %d left the recorded order; it ran with least-recently-used eviction", self.step
            )
            return
        peak = max(self._trace.non_model_bytes, default=0)
        self._adopt_trace(
            replace(
                self._trace,
                accesses=accesses,
                non_model_bytes=(peak,) * len(accesses),
                phases=tuple(moment[0] for moment in self._log),
            )
        )

    @staticmethod
    def settle_strays() -> int | None:
        """Count the stray accesses so far as reported; return the address of the first that was not."""
        GeminiManager._strays_reported = _C.stray_count()
        return _C.take_stray()

    def _raise_stray(self) -> None:
        """Report a stray access once, whichever model it hit: the next operator of any model may use its
        result."""
        address = self.settle_strays()
        chunks: set[int] = set()
        if address is not None:
            chunks = {manager.chunks.chunk_at(address) for manager in _live_managers} - {-1}
        for manager in _live_managers:
            manager.chunks.heal()
        raise EvictedAccessError(
            f"memory of evicted chunk {min(chunks, default='unknown')} was read or written outside an "
            f"operator (a numpy view, or a tensor "
            "made from a raw pointer); results since then may be NaN. Clone the value while it is in use, "
            "for example "
            "param.detach().clone()"
        )


_live_managers: weakref.WeakSet[GeminiManager] = weakref.WeakSet()


def _closed(tensors: TensorIds) -> None:
    GeminiManager.settle_strays()  # of a backward pass that ran on after close(): this error is the report
    raise StateError("the managed model was closed; its parameters hold no memory any more")


def _in_child(tensors: TensorIds) -> None:
    raise StateError(
        "managed parameters cannot be used in a forked process: their memory stays with the parent; "
        "pass copies, for example param.detach().clone(), or start the process with 'spawn'"
    )


def _after_fork_in_child() -> None:
    for manager in _live_managers:
        manager.resident = False
        manager.pre_op = _in_child  # type: ignore[method-assign]


os.register_at_fork(after_in_child=_after_fork_in_child)
