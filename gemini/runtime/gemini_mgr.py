"""GeminiManager: runs an iteration over the chunks; records it once, then follows the plan made from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING

import torch

from gemini import _C
from gemini.chunk import ChunkManager, TensorIds
from gemini.errors import StateError
from gemini.memstats import Trace
from gemini.placement import PlanReport
from gemini.runtime import living, unusable
from gemini.runtime.addresses import ParametersByAddress
from gemini.runtime.backward import BackwardPins
from gemini.runtime.eval_order import EvalOrder
from gemini.runtime.learned import PlacementContext
from gemini.runtime.lock import TensorLock
from gemini.runtime.loose import LooseBytes
from gemini.runtime.observer import GradientWatcher, StepObserver
from gemini.runtime.one_thread import OneThread
from gemini.runtime.pending import PendingUpdates
from gemini.runtime.phases import FORWARD, OPTIMIZER
from gemini.runtime.raw_access import RawAccess
from gemini.runtime.shortage import Shortage
from gemini.runtime.snapshot import NO_SNAPSHOT, Snapshot
from gemini.runtime.step_order import StepOrder
from gemini.runtime.strays import Strays
from gemini.runtime.tensor_mgr import StatefulTensorMgr
from gemini.runtime.update_operators import UpdateOperators
from gemini.runtime.written import WrittenTensors

if TYPE_CHECKING:
    from gemini.runtime.activations import ActivationOffload
    from gemini.runtime.param import TensorRef
    from gemini.zero.model_ranks import PartOfModel
    from gemini.zero.sharding import Sharding


class GeminiManager:
    """The memory manager of one model: ``pre_op`` and ``post_op`` bracket its operators. For one thread at a
    time."""

    def __init__(
        self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None = None
    ) -> None:
        """Start in warmup, or with the plan made from ``memstats`` when it belongs to this layout."""
        self.chunks = chunks
        self.strays = Strays(chunks)
        self.raw = RawAccess(self)
        self.parameters = ParametersByAddress()
        self.tensors = StatefulTensorMgr(chunks)
        self.context = context
        self.step = 0
        self.phase = FORWARD
        self.order = StepOrder(chunks, context, memstats)
        self.evaluations = EvalOrder(chunks, context, memstats)
        self.in_step = False  # a step that trains has begun and not ended
        self._following: StepOrder | EvalOrder | None = None  # what the next PreOp is a moment of
        self.pending = PendingUpdates()
        self._due = self.pending.by_tensor  # one look per PreOp
        self.lock = TensorLock()
        self._locked = self.lock.tensors
        self.watcher: GradientWatcher | None = None
        self.written = WrittenTensors()
        self.backward_pins = BackwardPins(self)
        self.threads = OneThread(self.backward_pins)
        self.updates = UpdateOperators(self)
        self.activations: ActivationOffload | None = None
        self.sharding: Sharding | None = None  # over several ranks
        self.part: PartOfModel | None = None  # the model was cut before it was wrapped
        self._first_address, self._end_address = chunks.address_range()
        self.loose = LooseBytes(chunks.table)
        self.shortage = Shortage(self)
        self.num_gradients = 0  # that arrived since the model was wrapped
        self.mixes_types = False  # True: operators may get fp32 beside parameters in 16 bits
        self.expects_scaled_loss = False  # True: fp16, and no scaled backward is under way
        self.resident = False  # True: every chunk is on DEVICE for good, operators need no PreOp
        self.gradients_are_lent = False  # by a compiler, whose next graph takes their memory back
        self.observer: StepObserver | None = None
        self.snapshot: Snapshot = NO_SNAPSHOT
        living.remember(self)

    # -- operators -------------------------------------------------------------------------------

    def pre_op(self, tensors: TensorIds, *, on_host: bool = False) -> None:
        """Pin ``tensors`` on DEVICE (they become COMPUTE), fetching what is missing; or ``on_host``.

        Raises:
            OutOfBudgetError, IoError: as :meth:`ChunkManager.acquire`; StateError: locked, or another thread
                is in a call of this model; nothing is pinned.
            EvictedAccessError: memory of an evicted chunk was touched outside an operator before this one.
        """
        holder = self.threads.holder
        if holder and holder != get_ident():
            self.threads.refuse_other()
        if _C.stray_count() != self.strays.seen:
            self.strays.refuse()
        if self.raw.uses:
            self.raw.settle()
        if self.backward_pins.held is not None:
            self.backward_pins.settle()
        if self.activations is not None:
            self._settle_activations()
        if self._locked:
            self.lock.refuse(tensors)
        if self._due:
            self.run_due(tensors)
        if self.sharding is not None:
            self.sharding.gather(tensors)
        self.next_moment(tensors, on_host=on_host)

    def next_moment(self, tensors: TensorIds, *, on_host: bool = False) -> None:
        """Pin ``tensors`` as the next moment; nothing is left to be done before. Raises as :meth:`pre_op`."""
        following = self._following
        if following is None:
            self.chunks.acquire(tensors, traced=False, on_host=on_host)
            return
        try:
            too_long = following.pre_op(tensors, self.phase, on_host=on_host)
        except BaseException:
            self.abandon()
            raise
        if too_long:
            self.abandon()

    def post_op(self, tensors: TensorIds, dirty: bool) -> None:
        """Unpin ``tensors`` (they become HOLD); ``dirty`` when the operator wrote to them."""
        if dirty and self.sharding is not None:
            self.sharding.note_written(tensors)
        self.chunks.release(tensors, dirty=dirty)

    @contextmanager
    def operator(self, tensors: TensorIds, dirty: TensorIds = ()) -> Iterator[None]:
        """Pin ``tensors`` for the block; those in ``dirty`` count as written."""
        self.pre_op(tensors)
        try:
            yield
        finally:
            self.post_ops(tensors, dirty)

    def next_late_moment(self, tensors: TensorIds, *, on_host: bool) -> bool:
        """Pin ``tensors`` for a pending update, which counts to the step before; say whether that is part of
        the step's order. Raises as :meth:`pre_op`."""
        self.backward_pins.settle()
        self._settle_activations()
        if self._following is not self.order:
            self.chunks.acquire(tensors, traced=False, on_host=on_host)
            return False
        try:
            self.order.pre_op(tensors, OPTIMIZER, on_host=on_host)
        except BaseException:
            self.abandon()
            raise
        return True

    def post_ops(self, tensors: TensorIds, dirty: TensorIds) -> None:
        """Unpin ``tensors``, of which those in ``dirty`` were written."""
        written = set(dirty)
        self.post_op([tensor for tensor in tensors if tensor in written], True)
        self.post_op([tensor for tensor in tensors if tensor not in written], False)

    def views(self, ref: TensorRef, tensor: torch.Tensor) -> bool:
        """Say whether ``tensor`` begins in the window that the tensor of ``ref`` lies in."""
        address, chunks = tensor.data_ptr(), self.chunks
        return self.in_windows(address) and chunks.chunk_at(address) == chunks.table.chunk_of(ref.tensors[0])

    def in_windows(self, address: int) -> bool:
        """Say whether the model data's windows are at ``address``."""
        return self._first_address <= address < self._end_address

    def name_parameters(self, names: Mapping[int, str]) -> None:
        """Say which tensor is which parameter, so that a trace can list them by first use."""
        self.order.name_parameters(names)
        self.evaluations.name_parameters(names)

    # -- updates that wait -------------------------------------------------------------------------

    @property
    def may_put_off(self) -> bool:
        """Whether the updates of the step under way may run elsewhere than at its end.

        Not in warmup, nor outside a recorded step: nothing says when that is. Not where all model data fits:
        there is no transfer to hide. Not where an update has no room beside the non-model memory of forward.
        """
        return self._following is self.order and self.order.moves_updates

    def run_due(self, tensors: TensorIds) -> None:
        """Run the pending updates that have to come before any use of ``tensors``.

        Raises:
            OutOfBudgetError, IoError: a chunk could not be had. What is left of the update stays pending.
        """
        for update in self.pending.needed_by(tensors):
            if self.observer is None:
                update.run()
            else:
                self.observer.run_update(update)
            self.pending.remove(update)

    def run_pending(self) -> None:
        """Run every pending update now. Raises as :meth:`run_due`; StateError where tensors are locked."""
        self.threads.refuse_other("an update")
        self.lock.refuse_all()
        if not self.pending:
            return
        self.recover()  # an update that was interrupted may have left chunks pinned
        outside = not self.in_step
        if outside:
            self.order.expect(self.pending.all(), first=True)
            self._following = None if self.is_warmup else self.order
        try:
            self.run_due(list(self._due))
        finally:
            if outside:
                self._following = None
                self.order.expect(self.pending.all())

    # -- steps -----------------------------------------------------------------------------------

    @property
    def is_followed(self) -> bool:
        """Whether what runs now is part of the order of steps or of evaluations."""
        return self._following is not None

    @property
    def is_warmup(self) -> bool:
        """Whether no iteration has been recorded yet."""
        return self.order.trace is None

    def report(self) -> PlanReport:
        """Return the plans in force, and what steps take at the pace of the last ones."""
        recompute = self.activations.recompute if self.activations is not None else None
        of_blocks = recompute.report() if recompute is not None else None
        return PlanReport(self.order.plan, self.order.planned(), of_blocks)

    @property
    def trace(self) -> Trace | None:
        """The recorded step that the plan was made from."""
        return self.order.trace

    @property
    def eval_trace(self) -> Trace | None:
        """The recorded evaluation pass, or None before the first one outside a step has ended."""
        return self.evaluations.trace

    @contextmanager
    def forward_pass(self, training: bool) -> Iterator[None]:
        """Run a forward pass of the whole model; one that trains belongs to a step. Any other is an
        evaluation: outside a step it has an order of its own; between micro-batches it is part of none."""
        self.recover()
        if not training and not self.in_step:
            with self._evaluation():
                yield
            return
        outer = (self._following, self.phase)
        if training and not self.in_step and not self.resident:
            if self._following is not None:  # a step that begins inside an evaluation ends its order
                self.abandon()
            if self.observer is not None:
                self.observer.step_begins(self.step + 1)
            self.order.begin(self.pending.all())
            if self.sharding is not None:
                self.sharding.begin(training=True)
            self.in_step = True  # last: a step that Ctrl-C kept from beginning begins anew
        self._following = self.order if training and self.in_step else None
        self.phase = FORWARD
        try:
            yield
        finally:
            if not training:
                self._following, self.phase = outer

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Follow the order of evaluations for the block, and that of steps again afterwards."""
        self.run_pending()
        if self._following is not None:  # a pass inside another ends that one's order
            self.abandon()
        if self.resident:
            yield
            return
        evaluations = self.evaluations
        try:
            self._following, self.phase = evaluations, FORWARD
            evaluations.begin(self.order.room_bytes)
            with self.sharding.evaluation() if self.sharding is not None else nullcontext():
                yield
            if self._following is evaluations:
                evaluations.end()
        finally:
            if self._following is evaluations:
                self.abandon()

    def recover(self) -> None:
        """Unpin what operators that raised half-way left pinned, as written: they may have been. Inside a
        backward pass operators are still under way."""
        if torch._C._current_graph_task_id() == -1:
            self.raw.settle()
            held = self.backward_pins.held
            self.backward_pins.forget()
            if held is not None:
                self.chunks.release(held, dirty=False)
            self._settle_activations()
            if self.sharding is not None:
                self.sharding.settle_transfers()
            self.chunks.recover()
            if self.sharding is not None:
                self.sharding.repin()
            if self.activations is not None:
                self.activations.repin()

    def abandon(self) -> None:
        """Go on without recording: the next training pass begins a new step, the next evaluation anew."""
        following, self._following = self._following, None
        if following is self.evaluations:
            self.evaluations.abandon()
            self.order.resume(self.pending.all())
        else:
            self.in_step = False
            self.order.abandon()

    def end_step(self) -> None:
        """Close the iteration after the optimizer's update; learn from it when it was the first or new."""
        self.step += 1
        self.phase = FORWARD
        self.raw.settle()
        self.backward_pins.settle()
        self._settle_activations()
        if self.sharding is not None:
            self.sharding.end()
        if self.observer is not None:  # planning belongs to no step
            self.observer.step_ended()
        if self.in_step:
            self.in_step = False
            self._following = None
            on_trace = not self.is_warmup and not self.chunks.table.diverged()
            try:
                self.order.end(self.pending.all())
            finally:
                self.chunks.end_step()
                self._end_activations(on_trace=on_trace)
        if self.observer is not None:
            self.observer.step_settled()
        self.snapshot.step_ended()

    def observe(self, observer: StepObserver | None) -> None:
        """Tell ``observer`` what happens from now on, None: nobody. Meanwhile operators go through their
        PreOp also where the model is resident, so as to be seen. Raises StateError: somebody does already."""
        if observer is not None and self.observer is not None:
            raise StateError("this model is being recorded already; leave that recording first")
        self.observer = self.chunks.observer = observer
        if observer is not None:
            self.resident = self.snapshot.residence(False)

    def close(self, *, run_pending: bool = True) -> None:
        """Give all memory back; any later use of a managed tensor raises StateError.

        Raises:
            OutOfBudgetError, IoError: a pending update failed, or a transfer. Everything is given back.
            EvictedAccessError: as from a PreOp; everything is given back. Only with ``run_pending``.
        """
        with self.strays.reported_last(run_pending and self.pre_op is not unusable.closed):
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
            self.snapshot.close(finish=False)
            self.pending.clear()
            self.resident = self.in_step = False
            self._following = None
            self.order.close()
            self.evaluations.close()
            self.pre_op = unusable.closed  # type: ignore[method-assign]
            self.chunks.close()

    def _settle_activations(self) -> None:
        if self.activations is not None and self.activations.waiting:
            self.activations.settle()

    def _end_activations(self, *, on_trace: bool) -> None:
        activations = self.activations
        if activations is not None and activations.end_step(on_trace=on_trace):
            self.run_pending()
            self.order.record_again()
            return
        may_stay = (activations is None or activations.keeps_all) and self.observer is None
        self.resident = self.snapshot.residence(may_stay and not self.pending and self._fits_for_good())

    def _fits_for_good(self) -> bool:
        """Say whether all model data is on DEVICE and nothing will ever make room there."""
        fits = self.context.size.total_bytes <= self.order.room_bytes and not self.order.host_chunks
        return fits and self.sharding is None and self.chunks.all_on_device()
