"""StepMeter: how long the last steps computed and how fast their links were, from one look at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from gemini.chunk import ChunkManager
from gemini.memstats import LinkSpeed
from gemini.placement.promise import Pace
from gemini.runtime.step.link_meter import ENOUGH_BYTES, LinkStats, Moved, moved_since

STEPS = 5  # that are remembered; the middle one counts
_ENOUGH_STEPS = 3


class _Look(NamedTuple):
    at: float
    stalled: float
    links: LinkStats


class _Step(NamedTuple):
    computing_seconds: float
    moved: dict[str, Moved]


class StepMeter:
    """Measures whole steps. A step costs two readings of a clock and of counters that are kept anyway; its
    operators cost nothing.

    What a step takes and does not wait for transfers counts as computing.
    """

    def __init__(self, chunks: ChunkManager, clock: Callable[[], float] = time.perf_counter) -> None:
        self._chunks = chunks
        self._clock = clock
        self._before: _Look | None = None  # None: no step is measured
        self._steps: tuple[_Step, ...] = ()  # replaced as a whole: other threads read it

    def begin(self) -> None:
        """Note that a step begins."""
        self._before = self._look()

    def drop(self) -> None:
        """Do not count the step that began last."""
        self._before = None

    def end(self) -> bool:
        """Count the step that began last; say whether one had begun."""
        before, self._before = self._before, None
        if before is None:
            return False
        now = self._look()
        computing = now.at - before.at - (now.stalled - before.stalled)
        step = _Step(max(0.0, computing), moved_since(before.links, now.links))
        self._steps = (*self._steps[1 - STEPS :], step)
        return True

    def forget(self) -> None:
        """Forget all steps."""
        self._before = None
        self._steps = ()

    def pace(self) -> Pace | None:
        """Return the middle of the last steps, of each quantity by itself; None before there were three.

        Only links that moved 64 MiB in these steps are in it, each as fast as it is alone.
        """
        steps = self._steps
        if len(steps) < _ENOUGH_STEPS:
            return None
        names = {name: None for step in steps for name in step.moved}
        speeds = [speed for name in names if (speed := _speed(steps, name)) is not None]
        seconds = median(step.computing_seconds for step in steps)
        return Pace(seconds, tuple(speeds), len(steps))

    def _look(self) -> _Look:
        return _Look(self._clock(), self._chunks.stall_seconds, self._chunks.link_stats())


def _speed(steps: Sequence[_Step], name: str) -> LinkSpeed | None:
    moved = [step.moved[name] for step in steps if name in step.moved]
    speeds = [one.nbytes / one.seconds_alone for one in moved if one.nbytes and one.seconds_alone > 0]
    if not speeds or sum(one.nbytes for one in moved) < ENOUGH_BYTES:
        return None
    return LinkSpeed(name, median(speeds), 0.0)
