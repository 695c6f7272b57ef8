"""GeminiManager: runs an iteration over the chunks; records it once, then follows the plan made from it.

Shortage: what follows where the computing device runs out of memory within all budgets, because non-model
data needs more than was measured, or somebody else has the memory. See docs/notes/out-of-memory.md.
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
from gemini.runtime.gate.waiting import StepObserver
from gemini.runtime.intercept.backward import BackwardPins
from gemini.runtime.intercept.raw_access import RawAccess
from gemini.runtime.intercept.tensors import ManagedParameter
from gemini.runtime.step.evaluations import Call, Evaluations
from gemini.runtime.step.order import PlacementContext, StepOrder, UpdateOperators
from gemini.runtime.storage.host_choice import HostUpdates
from gemini.sharding.sharding import Sharding
from gemini.system.device import asked_bytes, ran_out_of_memory
from gemini.system.process import shown_as

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Tensors of a step that is recorded though all of them stay: each takes 50 us, and the timeline shows them.
_MOST_RECORDED = 2**14
_Result = TypeVar("_Result")


class Taker(Protocol):
    """Model data, as far as it takes memory that others lack."""

    chunks: ChunkManager
    resident: bool

    @property
    def is_sharded(self) -> bool: ...

    @property
    def size(self) -> ModelDataSize: ...

    @property
    def room_bytes(self) -> int:
        """What model data may take of DEVICE beside the non-model data that was measured."""
        ...

    def abandon(self) -> None:
        """Go on without recording: what ran so far does not say what an iteration does."""

    def end_residence(self) -> None:
        """Let chunks leave DEVICE again."""

    def withhold(self, nbytes: int) -> None:
        """Have plans leave ``nbytes`` of DEVICE free beyond their reserves."""


class Shortage:
    """Takes from model data what other data lacks on DEVICE, until :meth:`forget`. Not thread-safe.

    Over several ranks it does nothing: their plans have to be alike.
    """

    def __init__(self, taker: Taker) -> None:
        self.count = 0  # how often memory ran out
        self.withheld_bytes = 0
        self.modules: WeakSet[nn.Module] = WeakSet()  # whose parameters graphs may have saved
        self._taker = taker

    @property
    def share_bytes(self) -> int:
        """What model data takes of DEVICE at most, except for what an operator holds."""
        taker = self._taker
        needed = max(taker.size.total_bytes, taker.chunks.table.usage(_C.Tier.DEVICE))
        return max(0, min(taker.room_bytes, needed))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Where memory runs out in the block, lower what model data may take; within blocks of this kind
        once."""
        count = self.count
        try:
            yield
        except Exception as error:
            if self.count == count and ran_out_of_memory(error):
                self._note(error)
            raise

    def twice(self, run: Callable[[], T]) -> T:
        """Call ``run``; where memory runs out, make room and call it once more. For what goes on where it
        stopped, or only reads."""
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
        """Give back what torch keeps for later and what model data takes beyond its share.

        Raises:
            OutOfBudgetError, IoError: as :meth:`gemini.chunk.ChunkManager.acquire`.
        """
        gc.collect()
        self._taker.chunks.device.release_cache()
        self._taker.chunks.make_room()

    def _note(self, error: Exception) -> None:
        """Halve the share of model data, or lower it by what was asked for if that is more; to nothing where
        it is less than a chunk. So no more than a few shortages lower it before there is nothing to give."""
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
            "the computing device ran out of memory: from now on model data takes %d bytes of it, not %d, "
            "beside what operators hold; a smaller batch or torch.utils.checkpoint needs less (%s)",
            after,
            before,
            str(error).partition("\n")[0],
        )

    def forget(self) -> None:
        """Let model data take again what it took before the first shortage: what ran then will not run
        again."""
        if self.withheld_bytes:
            self.withheld_bytes = 0
            self._taker.withhold(0)

    def end_residence(self) -> None:
        """Let chunks leave DEVICE again. Graphs that were made while none could know nothing of that: their
        backward pass is refused."""
        if not self._taker.resident:
            return
        self._taker.end_residence()
        params = [param for module in self.modules for param in module.parameters()]
        with torch._C.DisableTorchFunctionSubclass():
            increment_version([param for param in params if isinstance(param, ManagedParameter)])


def drop_locals(error: BaseException) -> None:
    """Forget what the frames held that ``error`` went through: it keeps all activations alive."""
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
    """Measures steps by wall clock, each from its first training pass to the end of its update.

    ``seconds``: those of the last whole step; None before the first one. On a GPU a step is over when its
    last operator is on its way.
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
    """The memory manager of one model: the gate of its operators, and what its steps and evaluations do."""

    def __init__(
        self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None = None
    ) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when it belongs to this layout."""
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
        self.kv_estate: object = None  # of rooms for keys and values, if there were any
        remember(self)

    def keep_estate(self, estate: object) -> None:
        """Keep what rooms for keys and values leave to each other."""
        self.kv_estate = estate

    def shard(self, sharding: Sharding) -> None:
        """Have ``sharding`` see to it that what operators use is whole."""
        self.sharding = sharding
        self.gather_before(sharding.gather, sharding.note_written)

    @cached_property
    def evaluations(self) -> Evaluations:
        """The orders of evaluation passes; a model that only trains has none."""
        made = Evaluations(self.chunks, self.context, self._memstats, self._names)
        if self.is_sharded:
            made.be_alike()
        if self.shortage.withheld_bytes:
            made.withhold(self.shortage.withheld_bytes)
        return made

    @property
    def _evaluations(self) -> Evaluations | None:
        """The same, None before the first evaluation."""
        return self.__dict__.get("evaluations")

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Return what ``action`` does; over several ranks raise on all of them where it fails on one."""
        return action() if self.sharding is None else self.sharding.peers.together(action)

    def take_part(self, part: PartOfModel) -> None:
        """The model is one part of several, as ``part`` says."""
        self.part = part

    def offload_activations(self, activations: ActivationOffload) -> None:
        """Have ``activations`` say, at the end of each step, what the next one keeps."""
        self.activations = activations

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Say which tensor is which parameter, so that a trace can list them by first use."""
        self.order.name_parameters(names)
        self._names = names

    # -- updates that wait -------------------------------------------------------------------------

    @property
    def can_defer_updates(self) -> bool:
        """Whether this step's updates may run after ``step()`` returns.

        Not in warmup, nor outside a recorded step: nothing says when that is. Not where all model data fits:
        there is no transfer to hide. Not where an update has no room beside the non-model memory of forward.
        """
        return self._following is self.order and self.order.moves_updates

    def run_pending(self, *, parts: bool = True) -> None:
        """Run every pending update now, but those of parts that move by themselves if not ``parts``. Raises
        as :meth:`run_due`; StateError where tensors are locked."""
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
        """Whether no iteration has been recorded yet."""
        return self.order.trace is None

    def report(self) -> PlanReport:
        """Return the plans in force, and what steps take at the pace of the last ones."""
        recompute = self.activations.recompute if self.activations is not None else None
        of_blocks = recompute.report() if recompute is not None else None
        stow = self.chunks.stow
        stowed_bytes = 0 if stow is None else stow.bytes
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
        """Run a forward pass of the whole model; one that trains belongs to a step. Any other is an
        evaluation: outside a step it has an order of its own; between micro-batches it is part of none."""
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
            if self._following is not None:  # a step that begins inside an evaluation ends its order
                self.abandon()
            if self.observer is not None:
                self.observer.step_begins(self.step + 1)
            self.order.begin(self.pending.moments())
            if self.sharding is not None:
                self.sharding.begin(training=True)
            self.in_step = True  # last: a step that Ctrl-C kept from beginning begins again
        self._following = self.order if training and self.in_step else None
        self.phase = FORWARD
        try:
            yield
        finally:
            if not training:
                self._following, self.phase = outer

    @contextmanager
    def _evaluation(self, call: Call) -> Iterator[None]:
        """Follow the order of evaluations for the block, and that of steps again afterwards."""
        self.run_pending()
        if self._following is not None:  # a pass inside another ends that one's order
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
        """Unpin what operators that raised half-way left pinned, as written: they may have been. Inside a
        backward pass operators are still under way."""
        if torch._C._current_graph_task_id() == -1:
            if self.raw_uses:
                self.raw.settle()
            held = self.backward_pins.held
            if held is not None:  # so is what the nodes within that one hold
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
        """Go on without recording: the next training pass begins a new step, the next evaluation, too."""
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
        """Close the iteration after the optimizer's update; learn from it when it was the first or new."""
        self.step += 1
        self.clock.end()
        self.phase = FORWARD
        if self.raw_uses:
            self.raw.settle()
        self.settle()
        if self.sharding is not None:
            self.sharding.end()
        if self.observer is not None:  # planning belongs to no step
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
        """Go on with what ``context`` says of model data, of which nothing is pending: the next step is a
        warmup, unless its trace was given. A step under way is not recorded."""
        self.abandon()
        self.shortage.end_residence()
        self.context = context
        self.order.replan(context)
        if self._evaluations is not None:
            self._evaluations.replan(context)
        self.order.resume(())

    def observe(self, observer: StepObserver | None) -> None:
        """Tell ``observer`` what happens from now on, None: nobody. Meanwhile operators go through their
        PreOp also where the model is resident, so as to be seen. Raises StateError: somebody does already."""
        if observer is not None and self.observer is not None:
            raise StateError("this model is being recorded already; leave that recording first")
        self.observer = self.chunks.observer = observer
        if observer is not None:
            self.end_residence()

    # -- what a shortage of memory, and the CPU beside a GPU, change -------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether chunks are cut among several ranks."""
        return self.sharding is not None

    @property
    def size(self) -> ModelDataSize:
        """How large the model's data is."""
        return self.context.size

    @property
    def room_bytes(self) -> int:
        """What model data may take of DEVICE beside the non-model data that was measured."""
        return self.order.room_bytes

    def end_residence(self) -> None:
        """Let chunks leave DEVICE again: operators go through their PreOp."""
        self.resident = self.snapshot.residence(False)
        self.tell_of_residence()

    def withhold(self, nbytes: int) -> None:
        """Have plans leave ``nbytes`` of DEVICE free beyond their reserves."""
        if self._evaluations is not None:
            self._evaluations.withhold(nbytes)
        self.order.withhold(nbytes)
        self.order.resume(self.pending.moments())

    def update_on_host(self, updates: HostUpdates | None) -> None:
        """Have ``updates`` say which states the CPU updates on HOST from now on. A step under way is not
        recorded."""
        if updates == self.order.host_updates:
            return
        self.run_pending()
        self.abandon()
        self.end_residence()  # what is updated on HOST leaves DEVICE
        self.order.host_updates = updates

    # -- the end --------------------------------------------------------------------------------------------

    def refuse_closed(self) -> None:
        """Raise StateError where the memory was given back."""
        if self.is_closed:
            self.pre_op(())

    def close(self, *, run_pending: bool = True) -> None:
        """Give all memory back; any later use of a managed tensor raises StateError.

        Raises:
            OutOfBudgetError, IoError: a pending update failed, or a transfer. Everything is given back.
            EvictedAccessError: as from a PreOp; everything is given back. Only with ``run_pending``.
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
            self.order.record_again()
            return
        self.resident = self.snapshot.residence(self._stays_for_good())

    def _needs_no_order(self) -> bool:
        """Say whether the first step is run as the later ones, not recorded: it has so many tensors that
        recording takes seconds, and whatever was recorded, they would stay."""
        if self.order.has_order or self.order.measures or self.order.plan.sample_non_model:
            return False
        return self.chunks.table.num_tensors() > _MOST_RECORDED and self._stays_for_good()

    def _stays_for_good(self) -> bool:
        kept = self.activations is None or self.activations.keeps_all
        return kept and self.observer is None and not self.pending and self._fits_for_good()

    def _fits_for_good(self) -> bool:
        """Say whether all model data is on DEVICE and nothing will ever make room there."""
        fits = self.context.size.total_bytes <= self.order.room_bytes and self.context.all_may_stay
        fits = fits and not self.order.host_chunks
        return fits and self.sharding is None and self.chunks.all_on_device()
