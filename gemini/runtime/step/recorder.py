"""Recorder: runs the PreOps of an iteration, times its operators without waits for chunks, and records its
accesses. LinkMeter and StepMeter: measure the speed of links and the computing time of steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.chunk.chunk import TensorIds
from gemini.memstats import MemStatsCollector
from gemini.memstats.monitor import MemoryMonitor
from gemini.memstats.trace import LINKS, LinkSpeed
from gemini.placement.probe import probe_links
from gemini.placement.promise import Pace

# A step with more moments counts as one without an end (an evaluation with gradients enabled, or another
# optimizer).
_LONGEST_STEP = 2**20

# (phase, DEVICE bytes, HOST bytes, DISK bytes) right after a PreOp
Moment = tuple[str, int, int, int]

Accesses = tuple[tuple[int, ...], ...]


class MomentLog:
    """The moments of an iteration, in the order in which they ran. Stored in columns: there may be hundreds
    of thousands, and the garbage collector would visit every tuple."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.usages = array("q")  # DEVICE, HOST and DISK bytes of the first moment, of the second, ...

    def __len__(self) -> int:
        return len(self.phases)

    def __iter__(self) -> Iterator[Moment]:
        phases = self.phases.copy()  # another thread may append meanwhile
        usages = self.usages[: 3 * len(phases)]
        return zip(phases, usages[::3], usages[1::3], usages[2::3], strict=True)

    def append(self, phase: str, usages: Iterable[int]) -> None:
        """Append a moment."""
        self.usages.extend(usages)
        self.phases.append(phase)

    def without(self, moments: Container[int]) -> MomentLog:
        """Return a log without the moments with these numbers."""
        rest = MomentLog()
        for number, (phase, *usages) in enumerate(self):
            if number not in moments:
                rest.append(phase, usages)
        return rest


@dataclass(frozen=True)
class Recorded:
    """The record of an iteration, one entry per moment in the order in which they ran; fields as in
    :class:`gemini.memstats.Trace`.

    ``seconds`` and ``non_model_bytes`` are zeros if they were not measured.
    """

    accesses: Accesses
    modes: tuple[str, ...]
    frees: Accesses
    phases: tuple[str, ...]
    seconds: tuple[float, ...]
    non_model_bytes: tuple[int, ...]

    def moments(self, chosen: Sequence[int]) -> Recorded:
        """Return only the moments with these indices, in this order."""
        return Recorded(
            accesses=tuple(self.accesses[index] for index in chosen),
            modes=tuple(self.modes[index] for index in chosen),
            frees=tuple(self.frees[index] for index in chosen),
            phases=tuple(self.phases[index] for index in chosen),
            seconds=tuple(self.seconds[index] for index in chosen),
            non_model_bytes=tuple(self.non_model_bytes[index] for index in chosen),
        )


class Recorder:
    """Acquires chunks moment by moment and records the moments. Not thread-safe; one iteration at a time over
    one chunk manager."""

    def __init__(self, chunks: ChunkManager) -> None:
        self.log = MomentLog()
        self.first_uses: dict[int, None] = {}  # tensors of the latest warmup, by first use
        self._chunks = chunks
        self._warmup = False
        self._timer: PeriodTimer | None = None
        self._collector: MemStatsCollector | None = None
        self._monitor: MemoryMonitor | None = None

    def forget(self) -> None:
        """Discard the log."""
        self.log = MomentLog()

    def begin(self, *, warmup: bool, timed: bool, sampled: bool) -> None:
        """Start an iteration. ``warmup``: its order is not known, so nothing is prefetched. ``timed``:
        measure the time of its periods. ``sampled``: measure its non-model memory."""
        self.stop()
        self.log = MomentLog()
        self._warmup = warmup
        if warmup:
            self.first_uses = {}
        if timed:
            self._timer = PeriodTimer(self._chunks)
        if sampled:
            device = self._chunks.device
            if not device.has_own_memory:
                _C.malloc_trim()  # free pages of the heap would hide what operators take of them
            self._monitor = device.monitor()
            self._collector = MemStatsCollector(self._monitor, device.model_data_bytes)
            self._collector.start()

    def pre_op(self, tensors: TensorIds, phase: str, *, on_host: bool = False) -> bool:
        """Acquire ``tensors`` as the next moment, on DEVICE or ``on_host``, and start prefetches. Returns
        True once the iteration has more moments than any real one."""
        chunks, timer = self._chunks, self._timer
        if timer is not None:
            timer.close_period()
        again = chunks.has_choices and chunks.table.continues(tensors)  # it continues the previous moment
        # No prefetch then: it would disturb the measurement.
        measured = self._warmup or self._collector is not None
        if measured:
            self._acquire_measured(tensors, phase, on_host, again)
        else:
            chunks.acquire(tensors, traced=True, on_host=on_host)
        if timer is not None:
            timer.open_period(again=again)
        if not measured:
            try:
                chunks.prefetch()
            except BaseException:  # the transfer of another chunk failed
                chunks.release(tensors, dirty=False)
                raise
        log = self.log
        if again:
            return False
        log.usages.extend(chunks.table.usages() if chunks.file_backed is None else chunks.usages())
        log.phases.append(phase)
        return len(log.phases) == _LONGEST_STEP

    def beside(self, tensors: TensorIds) -> None:
        """Acquire ``tensors`` on DEVICE within the current moment, without a new one."""
        collector = self._collector if self.log.phases else None  # no period is open before the first moment
        if self._timer is not None:
            self._timer.close_period()
        if collector is not None:
            collector.go_on()
        self._chunks.acquire(tensors, traced=False)
        if collector is not None:
            collector.note_model_data()
        if not self._warmup and self._collector is None:  # a prefetch would disturb the measurement
            self._chunks.prefetch()
        if self._timer is not None:
            self._timer.open_period(again=True)

    def end(self) -> Recorded:
        """Close the last period; return the record of the iteration."""
        table = self._chunks.table
        if self._timer is not None:
            self._timer.close_period()
        accesses = table.record()
        count = len(accesses)
        non_model = self._collector.finish() if self._collector is not None else (0,) * count
        if self._chunks.device.has_own_memory:
            # Torch's allocator returns nothing within a step.
            non_model = (max(non_model, default=0),) * count
        recorded = Recorded(
            accesses=accesses,
            modes=tuple(table.record_modes()),
            frees=table.record_frees(),
            phases=tuple(self.log.phases),
            seconds=tuple(self._timer.seconds) if self._timer is not None else (0.0,) * count,
            non_model_bytes=non_model,
        )
        self.stop()
        return recorded

    def stop(self) -> None:
        """Stop all measuring and discard the measurements."""
        self._warmup = False
        self._timer = None
        self._collector = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def _acquire_measured(self, tensors: TensorIds, phase: str, on_host: bool, again: bool) -> None:
        # Sample first: acquire() changes the memory of the process.
        if self._collector is not None and again:
            self._collector.go_on()
        elif self._collector is not None:
            self._collector.sample(self._chunks.table.moment(), phase)
        self._chunks.acquire(tensors, traced=True, on_host=on_host)
        if self._collector is not None:
            self._collector.note_model_data()
        for tensor in tensors:
            self.first_uses.setdefault(tensor)


class PeriodTimer:
    """Times each period from the return of its PreOp to the entry of the next one.

    Waits of other accesses for transfers in between (an evaluation between micro-batches) do not count.
    """

    def __init__(self, chunks: ChunkManager) -> None:
        self.seconds: list[float] = []  # of finished periods
        self._chunks = chunks
        self._runs_behind = chunks.device.has_own_memory  # operators run on after their calls returned
        self._since: float | None = None  # None: no period is open
        self._before = 0.0  # seconds of the open period before it was interrupted
        self._stalled = 0.0

    def close_period(self) -> None:
        """Close the open period: a PreOp begins, or the iteration ends."""
        if self._since is not None:
            if self._runs_behind:
                self._chunks.device.synchronize()
            waited = self._chunks.stall_seconds - self._stalled
            self.seconds.append(self._before + max(0.0, time.perf_counter() - self._since - waited))
            self._since, self._before = None, 0.0

    def open_period(self, *, again: bool = False) -> None:
        """Open a period after a PreOp has its chunks; ``again``: continue the previous period."""
        if again and self.seconds:
            self._before = self.seconds.pop()
        if self._runs_behind:
            self._chunks.device.synchronize()
        self._stalled = self._chunks.stall_seconds
        self._since = time.perf_counter()


# A link that moved fewer bytes in one iteration is probed instead.
ENOUGH_BYTES = 64 * 2**20

LinkStats = Mapping[str, Mapping[str, float]]  # as returned by ChunkManager.link_stats
STEPS = 5  # steps that are remembered; their median counts
_ENOUGH_STEPS = 3


class Moved(NamedTuple):
    """The bytes that a link moved, and the seconds that it would have needed with the disk to itself."""

    nbytes: float
    seconds_alone: float


def moved_since(before: LinkStats, now: LinkStats) -> dict[str, Moved]:
    """Return the traffic of each link between two readings.

    While both directions of a disk were busy, each counts as having had half of its bandwidth, as in the
    simulator.
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
    """Measures links by their traffic since :meth:`begin`, or by :func:`probe_links` if there was too
    little."""

    def __init__(self, chunks: ChunkManager) -> None:
        self._chunks = chunks
        self._before = chunks.link_stats()

    def begin(self) -> None:
        """Begin an iteration."""
        self._before = self._chunks.link_stats()

    def speeds(self) -> tuple[LinkSpeed, ...]:
        """Return the speed of each link between tiers that exist.

        A speed measured by use includes the latency of transfers of that size, and is the speed of the link
        alone. Links with little traffic are probed.
        """
        budgets = self._chunks.budgets
        disk_dir = budgets.disk_dir if budgets.disk_bytes else None
        found = {speed.name: speed for speed in self._used()}
        host = budgets.host_bytes > 0 and not {"h2d", "d2h"} <= found.keys()
        disk = disk_dir if not {"disk_read", "disk_write"} <= found.keys() else None
        device = self._chunks.device
        probed = {speed.name: speed for speed in probe_links(disk_dir=disk, host=host, device=device)}
        both = {**probed, **found}
        if budgets.reads_files and "disk_read" in both:  # files of the user are never written
            both.setdefault("disk_write", replace(both["disk_read"], name="disk_write"))
        return tuple(both[name] for name in LINKS if name in both)

    def _used(self) -> list[LinkSpeed]:
        least = 1 if self._chunks.budgets.reads_files else ENOUGH_BYTES  # files of the user cannot be probed
        return [
            LinkSpeed(name, moved.nbytes / moved.seconds_alone, 0.0)
            for name, moved in moved_since(self._before, self._chunks.link_stats()).items()
            if moved.nbytes >= least and moved.seconds_alone > 0
        ]


class _Look(NamedTuple):
    at: float
    stalled: float
    links: LinkStats


class _Step(NamedTuple):
    computing_seconds: float
    moved: dict[str, Moved]


class StepMeter:
    """Measures whole steps. A step costs two readings of the clock and of existing counters; its operators
    cost nothing.

    Time in which a step does not wait for transfers counts as computing.
    """

    def __init__(self, chunks: ChunkManager, clock: Callable[[], float] = time.perf_counter) -> None:
        self._chunks = chunks
        self._clock = clock
        self._before: _Look | None = None  # None: no step is being measured
        self._steps: tuple[_Step, ...] = ()  # replaced as a whole, because other threads read it

    def begin(self) -> None:
        """Begin to measure a step."""
        self._before = self._look()

    def drop(self) -> None:
        """Discard the current step."""
        self._before = None

    def end(self) -> bool:
        """Count the current step; say whether one had begun."""
        before, self._before = self._before, None
        if before is None:
            return False
        now = self._look()
        computing = now.at - before.at - (now.stalled - before.stalled)
        step = _Step(max(0.0, computing), moved_since(before.links, now.links))
        self._steps = (*self._steps[1 - STEPS :], step)
        return True

    def forget(self) -> None:
        """Discard all steps."""
        self._before = None
        self._steps = ()

    def pace(self) -> Pace | None:
        """Return the median of each quantity over the last steps; None before there were three steps.

        It has only links that moved at least 64 MiB in these steps, each with its speed alone.
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
