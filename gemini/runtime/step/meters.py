"""How fast the links between a model's tiers are, from use where there was enough of it; and how long the
last steps computed, from one look at both ends of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gemini.chunk import ChunkManager
from gemini.memstats import LINKS, LinkSpeed
from gemini.placement.probe import probe_links
from gemini.placement.promise import Pace

# What a link must have moved in one iteration to be judged by it.
ENOUGH_BYTES = 64 * 2**20

LinkStats = Mapping[str, Mapping[str, float]]  # of ChunkManager.link_stats
STEPS = 5  # that are remembered; the middle one counts
_ENOUGH_STEPS = 3


class Moved(NamedTuple):
    """What a link did, and the seconds that it would have needed with the disk to itself."""

    nbytes: float
    seconds_alone: float


def moved_since(before: LinkStats, now: LinkStats) -> dict[str, Moved]:
    """Return what each link did between two readings.

    While both directions of a disk were busy, each counts as having had half of it, as the simulator gives
    it.
    """
    return {
        name: Moved(
            stats["bytes"] - before[name]["bytes"],
            stats["seconds"]
            - before[name]["seconds"]
            - (stats["shared_seconds"] - before[name]["shared_seconds"]) / 2,
        )
        for name, stats in now.items()
    }


class LinkMeter:
    """Judges links by what the engine did since :meth:`begin`, else by :func:`probe_links`."""

    def __init__(self, chunks: ChunkManager) -> None:
        self._chunks = chunks
        self._before = chunks.link_stats()

    def begin(self) -> None:
        """Begin an iteration."""
        self._before = self._chunks.link_stats()

    def speeds(self) -> tuple[LinkSpeed, ...]:
        """Return the speed of each link between tiers that exist.

        A speed from use contains the latency of transfers as large as those were, and is that of the link
        alone. Probes where a link was used little.
        """
        budgets = self._chunks.budgets
        disk_dir = budgets.disk_dir if budgets.disk_bytes else None
        found = {speed.name: speed for speed in self._used()}
        host = budgets.host_bytes > 0 and not {"h2d", "d2h"} <= found.keys()
        disk = disk_dir if not {"disk_read", "disk_write"} <= found.keys() else None
        device = self._chunks.device
        probed = {speed.name: speed for speed in probe_links(disk_dir=disk, host=host, device=device)}
        both = {**probed, **found}
        return tuple(both[name] for name in LINKS if name in both)

    def _used(self) -> list[LinkSpeed]:
        return [
            LinkSpeed(name, moved.nbytes / moved.seconds_alone, 0.0)
            for name, moved in moved_since(self._before, self._chunks.link_stats()).items()
            if moved.nbytes >= ENOUGH_BYTES and moved.seconds_alone > 0
        ]


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
