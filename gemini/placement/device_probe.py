"""How fast the links of a device with memory of its own are, by its own clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from gemini.chunk import ComputeDevice, TierBudgets
from gemini.chunk.memory import AnyMemory
from gemini.errors import IoError
from gemini.offload.async_file import AsyncFile

_WAIT_SECONDS = 1.0  # wakes a waiter now and then so that Ctrl-C is seen

# Of one link: (bytes, seconds) of the smaller and of the larger transfer.
Timed = tuple[tuple[int, float], tuple[int, float]]


def time_links(
    device: ComputeDevice, disk_dir: str | None, sizes: tuple[int, int], rounds: int
) -> dict[str, Timed]:
    """Move the smaller and the larger of ``sizes``, in bytes, ``rounds`` times over the links to DISK in
    ``disk_dir``, if given, else over those to HOST; return the medians by link.

    Takes twice the larger size of memory, and as much disk once.

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
    """Start a transfer and wait for it; return how long the link was busy with it."""
    before = memory.link_stats()[link]
    ticket = start()
    while memory.num_in_flight:
        memory.wait_any(_WAIT_SECONDS)
        for done in memory.poll():
            if done.ticket == ticket and not done.ok:
                raise IoError(done.errno, done.message, done.path, done.offset)
    # It may have been reported before it ended.
    while (now := memory.link_stats()[link])["transfers"] == before["transfers"]:
        pass
    return now["seconds"] - before["seconds"]
