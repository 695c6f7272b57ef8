"""How fast the links between tiers are: tried for a moment, once per process and drive."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from gemini import _C
from gemini.chunk import CPU, ComputeDevice
from gemini.errors import ConfigError, IoError, OutOfBudgetError
from gemini.memstats import LinkSpeed
from gemini.offload.async_file import AsyncFile, chosen_backend
from gemini.placement.device_probe import time_links

logger = logging.getLogger(__name__)

SMALL_BYTES, LARGE_BYTES = 256 * 1024, 8 * 2**20
_LINK_SECONDS = 0.15  # at most, and at least one transfer of each size
_ROUNDS = 7

_known: dict[object, tuple[LinkSpeed, ...]] = {}

# Starts a transfer of that many bytes.
_Start = Callable[[int], int]


def probe_links(*, disk_dir: str | None, host: bool, device: ComputeDevice = CPU) -> tuple[LinkSpeed, ...]:
    """Return the speeds of a device's links to DISK in ``disk_dir``, if given, and to HOST, if ``host``.

    Each link is tried by the transfer engine for 0.15 s with transfers of two sizes, or with one of each
    where that takes longer. That needs 16 MiB of memory and 8 MiB of disk; the file is private and has no
    name. The result is kept per drive for the life of the process. Links to a directory that cannot take the
    file are left out, as are those for which there is no memory.
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
    return speeds


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
            # Zeros cost some drives nothing. Not torch's generator: training goes on with that.
            memoryview(window)[:] = random.Random(0).randbytes(LARGE_BYTES)
        starts: dict[str, _Start] = {
            "h2d": lambda nbytes: engine.copy(here.address, there.address, nbytes, _C.Link.H2D),
            "d2h": lambda nbytes: engine.copy(there.address, here.address, nbytes, _C.Link.D2H),
            "disk_read": lambda nbytes: engine.read(here.address, nbytes, 0),
            "disk_write": lambda nbytes: engine.write(here.address, nbytes, 0),
        }
        stack.callback(engine.drain)  # before anything that a transfer uses goes
        return tuple(_measure(name, engine, starts[name]) for name in links)


def _measure(name: str, engine: _C.TransferEngine, start: _Start) -> LinkSpeed:
    deadline = time.perf_counter() + _LINK_SECONDS
    small: list[float] = []
    large = [_timed(engine, start, LARGE_BYTES)]
    if time.perf_counter() < deadline:
        large.clear()  # the first use of memory and disk is slower
    else:
        small.append(_timed(engine, start, SMALL_BYTES))
    while not small or (len(small) < _ROUNDS and time.perf_counter() < deadline):
        small.append(_timed(engine, start, SMALL_BYTES))
        large.append(_timed(engine, start, LARGE_BYTES))
    return fitted(name, (SMALL_BYTES, median(small)), (LARGE_BYTES, median(large)))


def fitted(name: str, small: tuple[int, float], large: tuple[int, float]) -> LinkSpeed:
    """Return the link on which transfers of two sizes take that long, each (bytes, seconds).

    Where the larger one took no longer per byte, noise was all there was of latency: it counts as 0.
    """
    (small_bytes, small_seconds), (large_bytes, large_seconds) = small, large
    if small_seconds * large_bytes <= large_seconds * small_bytes:
        return LinkSpeed(name, large_bytes / large_seconds, 0.0)
    if large_seconds <= small_seconds:
        return LinkSpeed(name, large_bytes / large_seconds, 0.0)
    rate = (large_bytes - small_bytes) / (large_seconds - small_seconds)
    return LinkSpeed(name, rate, small_seconds - small_bytes / rate)


def _timed(engine: _C.TransferEngine, start: _Start, nbytes: int) -> float:
    """Return the seconds of one transfer. Raises IoError where it failed."""
    began = time.perf_counter()
    start(nbytes)
    while not engine.wait_any(1.0):  # wakes now and then so that Ctrl-C is seen
        pass
    seconds = time.perf_counter() - began
    for result in engine.poll():
        if not result.ok:
            raise IoError(result.errno, result.message, result.path, result.offset)
    return seconds
