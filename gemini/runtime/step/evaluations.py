"""Evaluations: the orders of forward passes without gradients outside a step.

The first token of an answer needs much more non-model memory than the next ones, and an encoder uses other
weights than the decoder. So each entry of the model has several orders, one for each level of DEVICE memory
that its passes need. A pass of a new size is measured once; meanwhile it follows the plan of the entry's
other passes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.memstats import Trace
from gemini.runtime.step.order import Learned, PlacementContext
from gemini.runtime.step.recorder import Recorded
from gemini.runtime.step.schedule import Place, completed, reordered

logger = logging.getLogger(__name__)

_STEPS = 32  # levels of DEVICE memory that are distinguished
_ORDERS_KEPT = 8
_GROWTH = 1.25  # a pass larger than the largest measured one by this factor is measured too


_Key = tuple[Hashable, int]  # the entry, and the level of DEVICE memory that its passes need


@dataclass(frozen=True)
class Call:
    """A call of a model. ``entry`` identifies the module that is called; ``numel`` is the number of elements
    of its first tensor input."""

    entry: Hashable = None
    numel: int = 1


class EvalOrder(Learned):
    """The order of evaluation passes. Each pass (forward, without gradients, outside a step) is an iteration.

    It shares the chunk table with the order of steps: the table follows this order from :meth:`begin` until
    ``resume`` of the steps' order.
    """

    def __init__(self, chunks: ChunkManager, context: PlacementContext, memstats: Trace | None) -> None:
        """Start in warmup, or with the plan made from ``memstats`` if that is of an evaluation with this
        layout."""
        self._schedule: _C.Schedule | None = None
        super().__init__("eval", chunks, context, memstats)

    def begin(self, room_bytes: int) -> None:
        """Start to record a pass; ``room_bytes``: the DEVICE limit of model data while there is no trace."""
        table = self._chunks.table
        table.set_schedule(self._schedule)
        self.enforce()
        if self.trace is None:
            table.set_limit(max(0, room_bytes + self._context.other_device_bytes))
        table.begin_step()
        self.start_recording()

    def end(self) -> int | None:
        """End the pass; make or change the trace if it was the first or had a new order. Returns the peak of
        non-model bytes if it was measured, else None."""
        diverged = self._chunks.table.end_step()
        sampled = self.measures or (self.trace is None and self.plan.sample_non_model)
        if not (sampled or diverged or self.trace is None or not self.timed):
            self._recorder.stop()
            return None
        trace, recorded = self.trace, self._recorder.end()
        if trace is None:
            self.learn(recorded)
        elif diverged:
            self._reconsider(recorded, trace)
        elif not self.timed and not sampled:
            self.complete(completed(self.grown(trace), recorded))
        return max(recorded.non_model_bytes, default=0) if sampled else None

    def follow(self, trace: Trace, reserve_bytes: int) -> None:
        """Adopt the order of ``trace`` for passes that need ``reserve_bytes`` of non-model memory."""
        self._adopt(replace(trace, non_model_bytes=(reserve_bytes,) * trace.num_moments), timed=False)

    def replan(self, context: PlacementContext) -> None:
        """Plan for model data of another size; keep the order of passes."""
        trace, timed = self.trace, self.timed
        super().replan(context)
        if trace is not None and self.trace is None:
            self._adopt(self.grown(trace), timed=timed)

    def _adopt(self, trace: Trace, *, timed: bool) -> None:
        super()._adopt(trace, timed=timed)
        places = [Place(chunks, moment, moment) for moment, chunks in enumerate(trace.accesses)]
        self._schedule = self.schedule_of(trace, places, steady=True).schedule

    def _reconsider(self, recorded: Recorded, trace: Trace) -> None:
        """Handle a pass that left the trace: adopt the new order once it repeats."""
        if self.repeats(recorded.accesses):
            self._adopt(reordered(self.grown(trace), recorded, keep_reserve=False), timed=False)
        else:
            logger.info("an evaluation left the recorded order; it ran with least-recently-used eviction")


class PassNeeds:
    """The non-model bytes that passes of one entry need, by their size."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}  # by power of two: the largest pass, its bytes

    def note(self, numel: int, nbytes: int) -> None:
        """Record the peak non-model bytes of a pass."""
        largest, before = self._known.get(numel.bit_length(), (0, 0))
        self._known[numel.bit_length()] = max(largest, numel), max(before, nbytes)

    def is_new(self, numel: int) -> bool:
        """Say whether no pass of about this size was measured."""
        largest, _ = self._known.get(numel.bit_length(), (0, 0))
        return numel > _GROWTH * largest

    def guess(self, numel: int) -> int | None:
        """Estimate the non-model bytes of a pass: those of the next larger known pass, or else of the
        largest, scaled in proportion. None: nothing is known."""
        if not self._known:
            return None
        larger = [known for known in self._known.values() if known[0] >= numel]
        largest, nbytes = min(larger) if larger else max(self._known.values())
        return nbytes if larger else nbytes * numel // largest


class Evaluations:
    """The orders of all evaluation passes of a model. One pass at a time: :meth:`choose` an order and begin
    it, then :meth:`end` or :meth:`abandon`.

    ``current``: the order of the last pass. ``uses_one_order``: all passes use one order, because ranks with
    different inputs must plan alike.
    """

    def __init__(
        self,
        chunks: ChunkManager,
        context: PlacementContext,
        memstats: Trace | None,
        names: Mapping[int, str],
    ) -> None:
        """Start with the order of ``memstats`` if that is of evaluations with this layout. ``names``: the
        parameter name of each tensor, so that a trace can list parameters by first use."""
        self.uses_one_order = False
        self._chunks, self._context, self._names = chunks, context, names
        self._withheld_bytes = 0
        self._needs: dict[Hashable, PassNeeds] = {}
        self._orders: OrderedDict[_Key, EvalOrder] = OrderedDict()  # least recently used first
        self._call = Call()
        self.current = EvalOrder(chunks, context, memstats)
        self.current.name_parameters(names)
        if self.current.has_order:
            self._file(None, self.current)

    def use_one_order(self) -> None:
        """Plan independently of a pass's inputs, as ranks must."""
        self.uses_one_order = True

    @property
    def trace(self) -> Trace | None:
        """The trace of the last pass or, if it has none, of the most recently used order."""
        traces = (order.trace for order in (self.current, *reversed(self._orders.values())))
        return next((trace for trace in traces if trace is not None), None)

    # -- a pass ----------------------------------------------------------------------------------

    def choose(self, call: Call) -> EvalOrder:
        """Return the order for a pass that is about to begin."""
        self._call = call = Call() if self.uses_one_order else call
        needs = self._needs.setdefault(call.entry, PassNeeds())
        guess = needs.guess(call.numel) if self._samples else 0
        self.current = self._known(call.entry) if guess is None else self._of(call.entry, guess)
        self.current.measure(self._samples and guess is not None and needs.is_new(call.numel))
        return self.current

    def end(self) -> None:
        """End the pass; make or change its trace if it was the first or had a new order."""
        order, call = self.current, self._call
        measured = order.end()
        trace = order.trace
        if trace is None:
            return
        needs = self._needs[call.entry]
        if measured is None and needs.guess(call.numel) is None:
            measured = max(trace.non_model_bytes, default=0)  # from the given trace
        if measured is not None:
            needs.note(call.numel, measured)
        if order not in self._orders.values():
            self._file(call.entry, order)

    def abandon(self) -> None:
        """Discard the record of this pass: it is not typical."""
        self.current.abandon()

    # -- changes for all orders ------------------------------------------------------------------

    def replan(self, context: PlacementContext) -> None:
        """Plan for model data of another size; keep the orders of passes."""
        self._context = context
        for order in self._all():
            order.replan(context)

    def withhold(self, nbytes: int) -> None:
        """Plan again, with ``nbytes`` of DEVICE left free in addition to the policy's reserve."""
        self._withheld_bytes = nbytes
        for order in self._all():
            order.withhold(nbytes)

    def close(self) -> None:
        """Stop all measuring."""
        for order in self._all():
            order.close()

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _samples(self) -> bool:
        """Whether the policy wants non-model memory measured."""
        context = self._context
        return context.policy.warmup_plan(context.size, context.capacity).sample_non_model

    def _all(self) -> list[EvalOrder]:
        return list(dict.fromkeys((self.current, *self._orders.values())))

    def _known(self, entry: Hashable) -> EvalOrder:
        """Return the entry's most recently used order, or a new one."""
        for (of, _), order in reversed(self._orders.items()):
            if of == entry:
                return order
        return self._new()

    def _of(self, entry: Hashable, nbytes: int) -> EvalOrder:
        """Return the order for passes that need ``nbytes`` of non-model memory. A new order starts with the
        trace of the entry's other passes."""
        key = entry, self._step(nbytes)
        found = self._orders.get(key)
        if found is None:
            found, like = self._new(), self._known(entry)
            if like.trace is not None:
                found.follow(like.trace, key[1] * self._step_bytes)
                self._file(entry, found)
        else:
            self._orders.move_to_end(key)
        return found

    def _new(self) -> EvalOrder:
        if not self.current.has_order and self.current not in self._orders.values():
            return self.current  # still without a trace
        order = EvalOrder(self._chunks, self._context, None)
        order.name_parameters(self._names)
        if self._withheld_bytes:
            order.withhold(self._withheld_bytes)
        return order

    def _file(self, entry: Hashable, order: EvalOrder) -> None:
        trace = order.trace
        nbytes = max(trace.non_model_bytes, default=0) if trace is not None and self._samples else 0
        self._orders[entry, self._step(nbytes)] = order
        while len(self._orders) > _ORDERS_KEPT:
            _, oldest = self._orders.popitem(last=False)
            oldest.close()

    @property
    def _step_bytes(self) -> int:
        return max(1, self._context.capacity.device_bytes // _STEPS)

    def _step(self, nbytes: int) -> int:
        return -(-nbytes // self._step_bytes)
