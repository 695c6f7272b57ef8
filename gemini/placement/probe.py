"""Probes the speed of the links between tiers: a short measurement, once per process and drive. Links of a
device with memory of its own are timed by its clock."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from gemini import _C
from gemini.chunk import TierBudgets
from gemini.chunk.cpu_memory import CPU
from gemini.chunk.memory import AnyMemory, ComputeDevice
from gemini.errors import ConfigError, IoError, OutOfBudgetError
from gemini.memstats.trace import LinkSpeed
from gemini.offload.async_file import AsyncFile, chosen_backend

logger = logging.getLogger(__name__)


_WAIT_SECONDS = 1.0  # wakes waiters so that Ctrl-C is seen

# (bytes, seconds) of a link's smaller and larger transfer.
Timed = tuple[tuple[int, float], tuple[int, float]]


def time_links(
    device: ComputeDevice, disk_dir: str | None, sizes: tuple[int, int], rounds: int
) -> dict[str, Timed]:
    """Time transfers of both ``sizes``, in bytes, ``rounds`` times: over the links to DISK in ``disk_dir``,
    if given, otherwise over those to HOST. Returns the medians by link.

    Needs twice the larger size of memory, and once the larger size of disk.

    Raises:
        IoError: the directory cannot take the file, or a transfer failed.
    """
    largest = max(sizes)
    with ExitStack() as stack:
        file = stack.enter_context(AsyncFile(disk_dir, largest)) if disk_dir is not None else None
        budgets = TierBudgets(largest, 0 if file else largest, largest if file else 0, disk_dir)
        memory = device.open([largest], budgets, file)
        window, place = pair = memory.windows(largest)
        stack.callback(memory.close, [pair], [])
        names = ("h2d", "d2h") if file is None else ("disk_read", "disk_write")
        seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for name in names for size in sizes}
        memory.map(window, zero=True)
        for _ in range(rounds):
            for size in sizes:
                seconds[names[1], size].append(_timed(memory, names[1], partial(_leave, memory, pair, size)))
                memory.unmap(window, park=True)
                seconds[names[0], size].append(_timed(memory, names[0], partial(_return, memory, pair, size)))
                if place is not None:
                    memory.unmap_host(place)
        small, large = sizes
        return {
            name: ((small, median(seconds[name, small])), (large, median(seconds[name, large])))
            for name in names
        }


def _leave(memory: AnyMemory, pair: tuple[Any, Any], nbytes: int) -> int:
    window, place = pair
    return memory.spill(window, nbytes, 0) if place is None else memory.evict(place, window, nbytes)


def _return(memory: AnyMemory, pair: tuple[Any, Any], nbytes: int) -> int:
    window, place = pair
    return memory.load(window, nbytes, 0) if place is None else memory.fetch(window, place, nbytes)


def _timed(memory: AnyMemory, link: str, start: Callable[[], int]) -> float:
    """Start a transfer and wait for it; return how long the link was busy."""
    before = memory.link_stats()[link]
    ticket = start()
    while memory.num_in_flight:
        memory.wait_any(_WAIT_SECONDS)
        for done in memory.poll():
            if done.ticket == ticket and not done.ok:
                raise IoError(done.errno, done.message, done.path, done.offset)
    # A transfer may be reported before it ends.
    while (now := memory.link_stats()[link])["transfers"] == before["transfers"]:
        pass
    return now["seconds"] - before["seconds"]


SMALL_BYTES, LARGE_BYTES = 256 * 1024, 8 * 2**20
_LINK_SECONDS = 0.15  # the most seconds per link, but at least one transfer of each size
_ROUNDS = 7

_known: dict[object, tuple[LinkSpeed, ...]] = {}

# starts a transfer of that many bytes
_Start = Callable[[int], int]


def probe_links(
    *, disk_dir: str | None, host: bool, device: ComputeDevice = CPU, ranks: int = 1
) -> tuple[LinkSpeed, ...]:
    """Return the speeds of a device's links to DISK in ``disk_dir``, if given, and to HOST, if ``host``. If
    several ``ranks`` on this machine use them at the same time, each gets its share.

    The transfer engine tries each link for 0.15 s with transfers of two sizes, or with one of each if that
    takes longer. This needs 16 MiB of memory and 8 MiB of disk; the file is private and has no name. The
    result is kept per drive for the life of the process. Links to a directory that cannot take the file are
    left out, and so are those without enough memory.
    """
    speeds: tuple[LinkSpeed, ...] = ()
    if host:
        try:
            speeds += _remembered(device.name, lambda: _probe(device, None, ("h2d", "d2h")))
        except OutOfBudgetError as error:
            logger.info("the links to HOST were not measured: %s", error)
    if disk_dir is not None:
        try:
            key = (device.name, Path(disk_dir).stat().st_dev, chosen_backend(None))
            speeds += _remembered(key, lambda: _probe(device, disk_dir, ("disk_write", "disk_read")))
        except (OSError, ConfigError, OutOfBudgetError) as error:  # IoError is an OSError
            logger.info("the links to %s were not measured: %s", disk_dir, error)
    return tuple(replace(each, bytes_per_second=each.bytes_per_second / ranks) for each in speeds)


def _remembered(key: object, measure: Callable[[], tuple[LinkSpeed, ...]]) -> tuple[LinkSpeed, ...]:
    if key not in _known:
        _known[key] = measure()
    return _known[key]


def _probe(device: ComputeDevice, disk_dir: str | None, links: tuple[str, ...]) -> tuple[LinkSpeed, ...]:
    if device.has_own_memory:
        timed = time_links(device, disk_dir, (SMALL_BYTES, LARGE_BYTES), _ROUNDS)
        return tuple(fitted(name, *timed[name]) for name in links)
    with ExitStack() as stack:
        file = stack.enter_context(AsyncFile(disk_dir, LARGE_BYTES)) if disk_dir is not None else None
        engine = _C.TransferEngine(file.native if file is not None else None)
        stack.callback(engine.close)
        space, arena = _C.WindowSpace(2 * LARGE_BYTES), _C.Arena(2 * LARGE_BYTES)
        here, there = space.create(LARGE_BYTES), space.create(LARGE_BYTES)
        for window in (here, there):
            arena.map(window)
            stack.callback(arena.unmap, window, park=False)
            # Some drives write zeros for free. Not torch's generator: training continues with its state.
            memoryview(window)[:] = random.Random(0).randbytes(LARGE_BYTES)
        starts: dict[str, _Start] = {
            "h2d": lambda nbytes: engine.copy(here.address, there.address, nbytes, _C.Link.H2D),
            "d2h": lambda nbytes: engine.copy(there.address, here.address, nbytes, _C.Link.D2H),
            "disk_read": lambda nbytes: engine.read(here.address, nbytes, 0),
            "disk_write": lambda nbytes: engine.write(here.address, nbytes, 0),
        }
        stack.callback(engine.drain)  # first: a transfer must not outlive its memory
        return tuple(_measure(name, engine, starts[name]) for name in links)


def _measure(name: str, engine: _C.TransferEngine, start: _Start) -> LinkSpeed:
    deadline = time.perf_counter() + _LINK_SECONDS
    small: list[float] = []
    large = [_timed_copy(engine, start, LARGE_BYTES)]
    if time.perf_counter() < deadline:
        large.clear()  # drop the first: memory and disk are slower at first use
    else:
        small.append(_timed_copy(engine, start, SMALL_BYTES))
    while not small or (len(small) < _ROUNDS and time.perf_counter() < deadline):
        small.append(_timed_copy(engine, start, SMALL_BYTES))
        large.append(_timed_copy(engine, start, LARGE_BYTES))
    return fitted(name, (SMALL_BYTES, median(small)), (LARGE_BYTES, median(large)))


def fitted(name: str, small: tuple[int, float], large: tuple[int, float]) -> LinkSpeed:
    """Return the LinkSpeed for two measured transfers, each (bytes, seconds).

    If the larger one took no longer per byte, the latency is lost in noise and counts as 0.
    """
    (small_bytes, small_seconds), (large_bytes, large_seconds) = small, large
    if small_seconds * large_bytes <= large_seconds * small_bytes:
        return LinkSpeed(name, large_bytes / large_seconds, 0.0)
    if large_seconds <= small_seconds:
        return LinkSpeed(name, large_bytes / large_seconds, 0.0)
    rate = (large_bytes - small_bytes) / (large_seconds - small_seconds)
    return LinkSpeed(name, rate, small_seconds - small_bytes / rate)


def _timed_copy(engine: _C.TransferEngine, start: _Start, nbytes: int) -> float:
    """Return the seconds of one transfer. Raises IoError if it failed."""
    began = time.perf_counter()
    start(nbytes)
    while not engine.wait_any(1.0):  # wakes so that Ctrl-C is seen
        pass
    seconds = time.perf_counter() - began
    for result in engine.poll():
        if not result.ok:
            raise IoError(result.errno, result.message, result.path, result.offset)
    return seconds
