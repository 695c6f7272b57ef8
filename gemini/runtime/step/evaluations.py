"""Evaluations: forward passes without gradients, outside a step. EvalOrder: passes that do the same.

The first token of an answer needs much more memory beside model data than the next ones, and an encoder uses
other weights than the decoder. So there is an order for each entry of the model, and for each step of DEVICE
memory that its passes need. A pass of a size that was not seen yet is measured once; nobody waits for a plan
meanwhile, since it follows what is known of the others.
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

_STEPS = 32  # of DEVICE, by which needs are told apart
_ORDERS_KEPT = 8
_GROWTH = 1.25  # a pass that is larger than the largest measured one by this factor is measured, too


_Key = tuple[Hashable, int]  # the entry, and the step of DEVICE that passes need


@dataclass(frozen=True)
class Call:
    """A call of a model: ``entry`` tells apart the modules that are called, ``numel`` is the size of the
    first tensor that is given."""

    entry: Hashable = None
    numel: int = 1


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
            table.set_limit(max(0, room_bytes + self._context.other_device_bytes))
        table.begin_step()
        self.start_recording()

    def end(self) -> int | None:
        """Close the pass; learn from it when it was the first or a new one. Return the most that it took
        beside model data, where that was measured."""
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
        """Follow the order of ``trace``, of passes that take so many bytes beside model data."""
        self._adopt(replace(trace, non_model_bytes=(reserve_bytes,) * trace.num_moments), timed=False)

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


class PassNeeds:
    """How many bytes beside model data the passes of one entry take, by their size."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}  # by power of two: the largest pass, its bytes

    def note(self, numel: int, nbytes: int) -> None:
        """Note what a pass took."""
        largest, before = self._known.get(numel.bit_length(), (0, 0))
        self._known[numel.bit_length()] = max(largest, numel), max(before, nbytes)

    def is_new(self, numel: int) -> bool:
        """Say whether no pass of about this size was measured."""
        largest, _ = self._known.get(numel.bit_length(), (0, 0))
        return numel > _GROWTH * largest

    def guess(self, numel: int) -> int | None:
        """Return what a pass may take: what the next larger one did that is known, or what the largest did,
        in proportion. None: nothing is known."""
        if not self._known:
            return None
        larger = [known for known in self._known.values() if known[0] >= numel]
        largest, nbytes = min(larger) if larger else max(self._known.values())
        return nbytes if larger else nbytes * numel // largest


class Evaluations:
    """The orders of all evaluation passes. One pass at a time: :meth:`choose` and begin an order, then
    :meth:`end` or :meth:`abandon`.

    ``current``: the order of the last pass; ``are_alike``: over ranks, which plan alike whatever each gets.
    """

    def __init__(
        self,
        chunks: ChunkManager,
        context: PlacementContext,
        memstats: Trace | None,
        names: Mapping[int, str],
    ) -> None:
        """Begin with the order of ``memstats`` where that is of evaluations with this layout. ``names``:
        which tensor is which parameter, so that a trace can list them by first use."""
        self.are_alike = False
        self._chunks, self._context, self._names = chunks, context, names
        self._withheld_bytes = 0
        self._needs: dict[Hashable, PassNeeds] = {}
        self._orders: OrderedDict[_Key, EvalOrder] = OrderedDict()  # used last comes last
        self._call = Call()
        self.current = EvalOrder(chunks, context, memstats)
        self.current.name_parameters(names)
        if self.current.has_order:
            self._file(None, self.current)

    def be_alike(self) -> None:
        """Plan alike whatever a pass is given, as ranks have to."""
        self.are_alike = True

    @property
    def trace(self) -> Trace | None:
        """What the last pass followed, or another one where it had no order."""
        traces = (order.trace for order in (self.current, *reversed(self._orders.values())))
        return next((trace for trace in traces if trace is not None), None)

    # -- a pass ----------------------------------------------------------------------------------

    def choose(self, call: Call) -> EvalOrder:
        """Return the order of a pass that begins."""
        self._call = call = Call() if self.are_alike else call
        needs = self._needs.setdefault(call.entry, PassNeeds())
        guess = needs.guess(call.numel) if self._samples else 0
        self.current = self._known(call.entry) if guess is None else self._of(call.entry, guess)
        self.current.measure(self._samples and guess is not None and needs.is_new(call.numel))
        return self.current

    def end(self) -> None:
        """Close the pass; learn from it when it was the first or a new one."""
        order, call = self.current, self._call
        measured = order.end()
        trace = order.trace
        if trace is None:
            return
        needs = self._needs[call.entry]
        if measured is None and needs.guess(call.numel) is None:
            measured = max(trace.non_model_bytes, default=0)  # as it was given
        if measured is not None:
            needs.note(call.numel, measured)
        if order not in self._orders.values():
            self._file(call.entry, order)

    def abandon(self) -> None:
        """Forget the pass: what it recorded does not say what one does."""
        self.current.abandon()

    # -- what changes for all of them ------------------------------------------------------------

    def replan(self, context: PlacementContext) -> None:
        """Plan for model data of another size; passes have the order that they had."""
        self._context = context
        for order in self._all():
            order.replan(context)

    def withhold(self, nbytes: int) -> None:
        """Plan again, with ``nbytes`` of DEVICE left free beyond what the policy says."""
        self._withheld_bytes = nbytes
        for order in self._all():
            order.withhold(nbytes)

    def close(self) -> None:
        """End what measures."""
        for order in self._all():
            order.close()

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _samples(self) -> bool:
        """Whether the policy has non-model memory measured at all."""
        context = self._context
        return context.policy.warmup_plan(context.size, context.capacity).sample_non_model

    def _all(self) -> list[EvalOrder]:
        return list(dict.fromkeys((self.current, *self._orders.values())))

    def _known(self, entry: Hashable) -> EvalOrder:
        """Return an order of the entry, or a new one."""
        for (of, _), order in reversed(self._orders.items()):
            if of == entry:
                return order
        return self._new()

    def _of(self, entry: Hashable, nbytes: int) -> EvalOrder:
        """Return the order of passes that take so many bytes beside model data: at first with the moments of
        the others of this entry."""
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
            return self.current  # of a pass that taught nothing
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
