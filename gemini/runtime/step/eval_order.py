"""EvalOrder: what an evaluation pass does at which moment, learned and followed apart from training steps."""

from __future__ import annotations

import logging

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.memstats import Trace
from gemini.runtime.step.learned import Learned, PlacementContext
from gemini.runtime.step.planned import Place
from gemini.runtime.step.recorder import Recorded
from gemini.runtime.step.trace_order import completed, reordered

logger = logging.getLogger(__name__)


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
