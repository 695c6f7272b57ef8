"""TierBudgets: how many bytes the chunks of one model may have on each tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierBudgets:
    """Hard byte budgets; 0 means that the tier is absent. ``disk_dir`` is where DISK keeps its unlinked file,
    ``spare_disk_bytes`` its places for chunks that come later: they take no space before they are used, nor
    does any without ``reserve_disk``."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: str | None = None
    spare_disk_bytes: int = 0
    reserve_disk: bool = True
