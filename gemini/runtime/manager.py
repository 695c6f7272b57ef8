"""GeminiManager: records one iteration of a model, then follows the plan made from the record.

Shortage: lowers the DEVICE share of model data if the computing device runs out of memory within all budgets.
This happens if non-model data needs more than was measured, or if another program uses the memory. See
docs/notes/out-of-memory.md.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.comm.peers import PartOfModel
from gemini.errors import StateError
from gemini.memstats import Trace
from gemini.memstats.trace import FORWARD
from gemini.placement import ModelDataSize, PlanReport
from gemini.runtime.activation.activations import ActivationOffload
from gemini.runtime.gate import guards
from gemini.runtime.gate.gate import Gate, remember
from gemini.runtime.gate.pending_work import StepObserver
from gemini.runtime.intercept.backward import BackwardPins
from gemini.runtime.intercept.raw_access import RawAccess
from gemini.runtime.intercept.tensors import ManagedParameter
from gemini.runtime.step.evaluations import Call, Evaluations
from gemini.runtime.step.order import PlacementContext, StepOrder, UpdateOperators
from gemini.runtime.storage.host_choice import HostUpdates
from gemini.sharding.sharding import Sharding
from gemini.system.config import format_bytes
from gemini.system.device import asked_bytes, ran_out_of_memory
from gemini.system.process import shown_as

logger = logging.getLogger(__name__)
T = TypeVar("T")
# A first step is recorded even if all model data stays on DEVICE, because the timeline shows it. Each tensor
# costs 50 us, so a model with more tensors than this is not recorded.
_MOST_RECORDED = 2**14
_Result = TypeVar("_Result")


class Taker(Protocol):
    """The owner of model data, which can be told to take less of DEVICE."""

    chunks: ChunkManager
    resident: bool

    @property
    def is_sharded(self) -> bool: ...

    @property
    def size(self) -> ModelDataSize: ...

    @property
    def room_bytes(self) -> int:
        """The DEVICE bytes that model data may take beside the measured non-model data."""
        ...

    def abandon(self) -> None:
        """Stop recording the current iteration: the part that ran is not typical."""

    def end_residence(self) -> None:
        """Allow chunks to leave DEVICE again."""

    def withhold(self, nbytes: int) -> None:
        """Make plans leave ``nbytes`` of DEVICE free in addition to their reserves."""


class Shortage:
    """Lowers the DEVICE share of model data after an out-of-memory error, until :meth:`forget`. Not
    thread-safe.

    No effect over several ranks: their plans must be alike.
    """

    def __init__(self, taker: Taker) -> None:
        self.count = 0  # how often memory ran out
        self.withheld_bytes = 0
        self.modules: WeakSet[nn.Module] = WeakSet()  # modules with parameters that graphs may have saved
        self._taker = taker

    @property
    def share_bytes(self) -> int:
        """The most DEVICE bytes that model data takes, except for chunks that an operator holds."""
        taker = self._taker
        needed = max(taker.size.total_bytes, taker.chunks.table.usage(_C.Tier.DEVICE))
        return max(0, min(taker.room_bytes, needed))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Lower the share of model data if memory runs out in the block. Nested blocks lower it once."""
        count = self.count
        try:
            yield
        except Exception as error:
            if self.count == count and ran_out_of_memory(error):
                self._note(error)
            raise

    def retry(self, run: Callable[[], T]) -> T:
        """Call ``run``; if memory runs out, make room and call it again. ``run`` must resume where it
        stopped, or only read."""
        if self._taker.is_sharded:
            return run()
        try:
            with self.watched():
                return run()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            drop_locals(error)
        self.make_room()
        with self.watched():
            return run()

    def make_room(self) -> None:
        """Release torch's cached memory, and evict model data beyond its share.

        Raises:
            OutOfBudgetError, IoError: as :meth:`gemini.chunk.ChunkManager.acquire`.
        """
        gc.collect()
        self._taker.chunks.device.release_cache()
        self._taker.chunks.make_room()

    def _note(self, error: Exception) -> None:
        """Halve the share of model data, or lower it by the failed allocation if that is more. A share below
        the largest chunk becomes 0. So the share reaches 0 after a few shortages."""
        taker = self._taker
        self.count += 1
        if taker.is_sharded:
            return
        taker.abandon()
        self.end_residence()
        before = self.share_bytes
        after = max(0, min(before // 2, before - asked_bytes(error)))
        if after < taker.size.largest_chunk_bytes:
            after = 0
        if before == 0:
            return
        self.withheld_bytes += taker.room_bytes - after
        taker.withhold(self.withheld_bytes)
        logger.warning(
            "the computing device ran out of memory: from now on model data takes %s of it, not %s, "
            "beside chunks of running operators; a smaller batch or torch.utils.checkpoint needs less (%s)",
            format_bytes(after),
            format_bytes(before),
            str(error).partition("\n")[0],
        )

    def forget(self) -> None:
        """Restore the share of model data from before the first shortage: the program that ran then will not
        run again."""
        if self.withheld_bytes:
            self.withheld_bytes = 0
            self._taker.withhold(0)

    def end_residence(self) -> None:
        """Allow chunks to leave DEVICE again. Graphs that were built while the model was resident have no
        hooks that pin chunks, so their parameters get a new version and their backward pass is refused."""
        if not self._taker.resident:
            return
        self._taker.end_residence()
        params = [param for module in self.modules for param in module.parameters()]
        with torch._C.DisableTorchFunctionSubclass():
            increment_version([param for param in params if isinstance(param, ManagedParameter)])


def drop_locals(error: BaseException) -> None:
    """Clear the local variables of the frames in the tracebacks of ``error`` and its causes: they keep all
    activations alive."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        left += [one.__cause__, one.__context__]


class StepClock:
    """Measures the wall-clock time of steps, from the first training pass to the end of the update.

    ``seconds``: the time of the last whole step; None before the first one. On a GPU a step ends when its
    last operator has been launched.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._begun: float | None = None

    def begin(self) -> None:
        """Begin a step, unless one is under way."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def end(self) -> None:
        """End the step."""
        if self._begun is not None:
            self.seconds = time.perf_counter() - self._begun
        self._begun = None

    def abandon(self) -> None:
        """Forget the step under way."""
        self._begun = None


class GeminiManager(Gate):
    """The memory manager of one model: the gate of its operators, and the order of its steps and
    evaluations."""

    def __init__(
        self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None = None
    ) -> None:
        """Start in warmup, or with the plan made from ``memstats`` if that was recorded with this layout."""
        super().__init__(chunks)
        self.raw = RawAccess(self)
        self.backward_pins = BackwardPins(self)
        self.context = context
        self.order = StepOrder(chunks, context, memstats)
        self._memstats = memstats
        self._names: Mapping[int, str] = {}
        self.updates = UpdateOperators(self, self.order)
        self.shortage = Shortage(self)
        self.activations: ActivationOffload | None = None
        self.sharding: Sharding | None = None  # over several ranks
        self.part: PartOfModel | None = None  # the model was cut before it was wrapped
        self.in_step = False  # a step that trains has begun and not ended
        self.clock = StepClock()
        self.kv_pool: object = None  # see keep_kv_pool()
        remember(self)

    def keep_kv_pool(self, pool: object) -> None:
        """Keep the object that successive rooms for keys and values pass to each other."""
        self.kv_pool = pool

    def shard(self, sharding: Sharding) -> None:
        """Let ``sharding`` gather the chunks that operators use."""
        self.sharding = sharding
        self.gather_before(sharding.gather, sharding.note_written)

    @cached_property
    def evaluations(self) -> Evaluations:
        """The orders of evaluation passes, created at the first evaluation."""
        made = Evaluations(self.chunks, self.context, self._memstats, self._names)
        if self.is_sharded:
            made.use_one_order()
        if self.shortage.withheld_bytes:
            made.withhold(self.shortage.withheld_bytes)
        return made

    @property
    def _evaluations(self) -> Evaluations | None:
        """:attr:`evaluations`, or None before the first evaluation."""
        return self.__dict__.get("evaluations")

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Return the result of ``action``. Over several ranks all ranks raise if it fails on one."""
        return action() if self.sharding is None else self.sharding.peers.together(action)

    def set_part(self, part: PartOfModel) -> None:
        """Note that the model is one part of a larger model, described by ``part``."""
        self.part = part

    def offload_activations(self, activations: ActivationOffload) -> None:
        """Let ``activations`` choose, at the end of each step, which activations the next step keeps."""
        self.activations = activations

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Set the parameter name of each tensor, so that a trace can list parameters by first use."""
        self.order.name_parameters(names)
        self._names = names

    # -- updates that wait -------------------------------------------------------------------------

    @property
    def can_defer_updates(self) -> bool:
        """Whether this step's updates may run after ``step()`` returns.

        They may not in warmup or outside a recorded step, because the time of the next use is unknown; if all
        model data fits on DEVICE, because there is no transfer to hide; or if an update does not fit beside
        the non-model memory of forward.
        """
        return self._following is self.order and self.order.moves_updates

    def run_pending(self, *, parts: bool = True) -> None:
        """Run every pending update now; without ``parts`` leave those of chunks of a choice (experts)
        pending, which are no moments of a step. Raises as :meth:`run_due`; StateError if tensors are
        locked."""
        self.threads.refuse_other("an update")
        self.lock.refuse_all()
        if not self._due:
            return
        self.recover()  # an update that was interrupted may have left chunks pinned
        outside = not self.in_step
        if outside:
            self.order.expect(self.pending.moments(), first=True)
            self._following = None if self.is_warmup else self.order
        try:
            due = list(self._due)
            self.run_due(due if parts else [tensor for tensor in due if self._due[tensor].has_moments])
        finally:
            if outside:
                self._following = None
                self.order.expect(self.pending.moments())

    # -- steps -----------------------------------------------------------------------------------

    @property
    def is_warmup(self) -> bool:
        """Whether no step has been recorded yet."""
        return self.order.trace is None

    def report(self) -> PlanReport:
        """Return the plans in force, and the expected time of a step at the pace of the last ones."""
        recompute = self.activations.recompute if self.activations is not None else None
        of_blocks = recompute.report() if recompute is not None else None
        file_backed = self.chunks.file_backed
        stowed_bytes = 0 if file_backed is None else file_backed.bytes
        return PlanReport(self.order.plan, self.order.planned(), of_blocks, stowed_bytes)

    @property
    def trace(self) -> Trace | None:
        """The recorded step that the plan was made from."""
        return self.order.trace

    @property
    def eval_trace(self) -> Trace | None:
        """The recorded evaluation pass, or None before the first one outside a step has ended."""
        return self.evaluations.trace

    @contextmanager
    def forward_pass(self, training: bool, call: Call) -> Iterator[None]:
        """Context of a forward pass of the whole model. A pass that trains belongs to a step. Any other is an
        evaluation: outside a step it has an order of its own; between micro-batches it belongs to no
        order."""
        self.recover()
        if not training and not self.in_step:
            with self._evaluation(call):
                yield
            return
        outer = (self._following, self.phase)
        if training:
            self.clock.begin()
        if training and not self.in_step and not self.resident and self._needs_no_order():
            self.resident = self.snapshot.residence(True)
        if training and not self.in_step and not self.resident:
            if self._following is not None:  # a step inside an evaluation ends the evaluation's order
                self.abandon()
            if self.observer is not None:
                self.observer.step_begins(self.step + 1)
            self.order.begin(self.pending.moments())
            if self.sharding is not None:
                self.sharding.begin(training=True)
            self.in_step = True  # last: after Ctrl-C above, the next pass begins the step again
        self._following = self.order if training and self.in_step else None
        self.phase = FORWARD
        try:
            yield
        finally:
            if not training:
                self._following, self.phase = outer

    @contextmanager
    def _evaluation(self, call: Call) -> Iterator[None]:
        """Follow the order of evaluations in the block, and that of steps again afterwards."""
        self.run_pending()
        if self._following is not None:  # a nested pass ends the order of the outer one
            self.abandon()
        if self.resident:
            yield
            return
        evaluations = self.evaluations
        order = evaluations.choose(call)
        try:
            self._following, self.phase = order, FORWARD
            order.begin(self.order.room_bytes)
            with self.sharding.evaluation() if self.sharding is not None else nullcontext():
                yield
            if self._following is order:
                evaluations.end()
        finally:
            if self._following is order:
                self.abandon()

    def recover(self) -> None:
        """Unpin the chunks that operators left pinned when they raised. They count as written, because they
        may have been. Inside a backward pass operators are still under way, so nothing happens."""
        if torch._C._current_graph_task_id() == -1:
            if self.raw_uses:
                self.raw.settle()
            held = self.backward_pins.held
            if held is not None:  # these chunks are pinned again by nodes inside this one
                self.backward_pins.forget()
                self.chunks.release(held, dirty=False)
            self.settle()
            if self.sharding is not None:
                self.sharding.settle_transfers()
            if self._due:
                for update in self.pending.begun():
                    update.settle()
            self.chunks.recover()
            if self.sharding is not None:
                self.sharding.repin()
            for repin in self.repins:
                repin()

    def abandon(self) -> None:
        """Stop recording: the next training pass begins a new step, and the next evaluation a new pass."""
        following, self._following = self._following, None
        evaluations = self._evaluations
        if evaluations is not None and following is evaluations.current:
            evaluations.abandon()
            self.order.resume(self.pending.moments())
        else:
            self.in_step = False
            self.clock.abandon()
            self.order.abandon()

    @shown_as("plan")
    def end_step(self) -> None:
        """End the step after the optimizer's update; make or change the trace if the step was the first or
        had a new order."""
        self.step += 1
        self.clock.end()
        self.phase = FORWARD
        if self.raw_uses:
            self.raw.settle()
        self.settle()
        if self.sharding is not None:
            self.sharding.end()
        if self.observer is not None:  # before planning, which belongs to no step
            self.observer.step_ended()
        if self.in_step:
            self.in_step = False
            self._following = None
            on_trace = not self.is_warmup and not self.chunks.table.diverged()
            try:
                self.order.end(self.pending.moments())
            finally:
                self.chunks.end_step()
                self._end_activations(on_trace=on_trace)
        if self.observer is not None:
            self.observer.step_settled()
        self.snapshot.step_ended()

    def replan(self, context: PlacementContext) -> None:
        """Plan for the model data in ``context``; no update may be pending. The next step is a warmup, unless
        its trace was given. A step under way is not recorded."""
        self.abandon()
        self.shortage.end_residence()
        self.context = context
        self.order.replan(context)
        if self._evaluations is not None:
            self._evaluations.replan(context)
        self.order.resume(())

    def observe(self, observer: StepObserver | None) -> None:
        """Report all events to ``observer`` from now on; None: to nobody. Meanwhile operators of a resident
        model run their PreOp too, so that they are seen.

        Raises:
            StateError: another observer is active.
        """
        if observer is not None and self.observer is not None:
            raise StateError("this model is already being recorded; end that recording first")
        self.observer = self.chunks.observer = observer
        if observer is not None:
            self.end_residence()

    # -- changes by a shortage of memory, and by the CPU beside a GPU ------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether chunks are cut among several ranks."""
        return self.sharding is not None

    @property
    def size(self) -> ModelDataSize:
        """The bytes of the model's data."""
        return self.context.size

    @property
    def room_bytes(self) -> int:
        """The DEVICE bytes that model data may take beside the measured non-model data."""
        return self.order.room_bytes

    def end_residence(self) -> None:
        """Allow chunks to leave DEVICE again: operators run their PreOp."""
        self.resident = self.snapshot.residence(False)
        self.note_residence_end()

    def withhold(self, nbytes: int) -> None:
        """Make plans leave ``nbytes`` of DEVICE free in addition to their reserves."""
        if self._evaluations is not None:
            self._evaluations.withhold(nbytes)
        self.order.withhold(nbytes)
        self.order.resume(self.pending.moments())

    def update_on_host(self, updates: HostUpdates | None) -> None:
        """Let ``updates`` choose the states that the CPU updates on HOST from now on. A step under way is not
        recorded."""
        if updates == self.order.host_updates:
            return
        self.run_pending()
        self.abandon()
        self.end_residence()  # states that are updated on HOST leave DEVICE
        self.order.host_updates = updates

    # -- the end --------------------------------------------------------------------------------------------

    def refuse_closed(self) -> None:
        """Raise StateError if the model is closed."""
        if self.is_closed:
            self.pre_op(())

    def close(self, *, run_pending: bool = True) -> None:
        """Return all memory; any later use of a managed tensor raises StateError.

        Raises:
            OutOfBudgetError, IoError: a pending update or a transfer failed. Everything is returned.
            EvictedAccessError: as from a PreOp; everything is returned. Only with ``run_pending``.
        """
        with self.strays.reported_last(run_pending and not self.is_closed):
            self._close(run_pending)

    def _close(self, run_pending: bool) -> None:
        self.lock.open()
        try:
            if self.sharding is not None:
                self.sharding.abandon_transfers()
            if run_pending:
                self.run_pending()
                self.snapshot.close(finish=True)
        finally:
            self.updates.thread.close()
            self.snapshot.close(finish=False)
            self.pending.clear()
            self.gradient_scale.forget()
            self.in_step = False
            self._following = None
            self.order.close()
            if self._evaluations is not None:
                self._evaluations.close()
            self.refuse_use(guards.closed)
            self.chunks.close()

    def _end_activations(self, *, on_trace: bool) -> None:
        activations = self.activations
        if activations is not None and activations.end_step(on_trace=on_trace):
            self.run_pending()
            self.order.record_again(activations.kept_bytes)
            return
        self.resident = self.snapshot.residence(self._stays_for_good())

    def _needs_no_order(self) -> bool:
        """Say whether the first step need not be recorded: it has so many tensors that recording takes
        seconds, and all model data would stay on DEVICE in any case."""
        if self.order.has_order or self.order.measures or self.order.plan.sample_non_model:
            return False
        return self.chunks.table.num_tensors() > _MOST_RECORDED and self._stays_for_good()

    def _stays_for_good(self) -> bool:
        kept = self.activations is None or self.activations.keeps_all
        return kept and self.observer is None and not self.pending and self._fits_for_good()

    def _fits_for_good(self) -> bool:
        """Say whether all model data is on DEVICE and no later event evicts it."""
        fits = self.context.size.total_bytes <= self.order.room_bytes and self.context.all_may_stay
        fits = fits and not self.order.host_chunks
        return fits and self.sharding is None and self.chunks.all_on_device()
