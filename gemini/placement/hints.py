"""Hints: what a plan tells the chunk table beyond the order of the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemini import _C
from gemini.placement.intervals import NO_RUN, Flags, Intervals, Ints
from gemini.placement.iteration import Iteration

# Flags of an interval, as csrc/chunk/schedule.h has them.
KEEP = 1
FLUSH = 2


@dataclass(frozen=True)
class Hints:
    """A plan as the core takes it.

    ``intervals``: a byte for each access of each moment, one after the other, with the flags of the interval
    that begins there: KEEP (it stays on DEVICE until its next use) and FLUSH (what was written is copied
    below at once). ``planned_bytes``: per moment, what operands, kept chunks and what is still being flushed
    have of DEVICE.
    """

    intervals: bytes
    planned_bytes: tuple[int, ...]


def make_hints(intervals: Intervals, keep: Flags, flushed_at: Ints) -> Hints:
    """Return the hints for the intervals in ``keep``.

    ``flushed_at``: per interval, the moment from which a flush that begins with it has ended.
    """
    gone = np.zeros(len(intervals.run_bytes), dtype=bool)
    in_run = intervals.run != NO_RUN
    gone[intervals.run[in_run & ~keep]] = True
    flush = np.zeros(len(intervals), dtype=bool)
    flush[in_run] = intervals.dirty[in_run] & gone[intervals.run[in_run]]
    flags = np.zeros(intervals.num_accesses, dtype=np.uint8)
    flags[intervals.access] = KEEP * keep + FLUSH * flush
    leaving = np.where(flush & ~keep, intervals.begin + 1, flushed_at)
    planned = intervals.kept_bytes(keep) + intervals.occupied(leaving, flushed_at)
    return Hints(flags.tobytes(), tuple(planned.tolist()))


def make_schedule(iteration: Iteration, hints: Hints | None) -> _C.Schedule:
    """Return what the chunk table follows in such a step."""
    order = _C.Schedule(iteration.accesses, iteration.reserve_bytes, len(iteration.chunk_bytes))
    return order if hints is None else with_hints(order, hints)


def with_hints(order: _C.Schedule, hints: Hints) -> _C.Schedule:
    """Return a schedule of the same order with a plan."""
    return order.with_plan(hints.intervals, hints.planned_bytes)
