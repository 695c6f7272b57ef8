"""LinkMeter: how fast the links between a model's tiers are, from use where there was enough of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gemini.chunk import ChunkManager
from gemini.memstats import LINKS, LinkSpeed
from gemini.placement.probe import probe_links

# What a link must have moved in one iteration to be judged by it.
ENOUGH_BYTES = 64 * 2**20

LinkStats = Mapping[str, Mapping[str, float]]  # of ChunkManager.link_stats


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
