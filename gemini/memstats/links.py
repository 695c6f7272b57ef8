"""LinkSpeed: how fast bytes go from one tier to another on some machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gemini.errors import ConfigError

LINKS = ("h2d", "d2h", "disk_read", "disk_write")


@dataclass(frozen=True)
class LinkSpeed:
    """One link: a transfer of n bytes takes ``latency_seconds + n / bytes_per_second``.

    ``name``: one of ``LINKS``. Raises ConfigError for what no link can be.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if self.name not in LINKS:
            raise ConfigError(f"there is no link {self.name!r}; the links are {', '.join(LINKS)}")
        if not (self.bytes_per_second > 0 and math.isfinite(self.bytes_per_second)):
            raise ConfigError(f"{self.name} moves {self.bytes_per_second} bytes per second; it must be > 0")
        if not (self.latency_seconds >= 0 and math.isfinite(self.latency_seconds)):
            raise ConfigError(f"{self.name} has a latency of {self.latency_seconds} s; it must be >= 0")

    def seconds(self, nbytes: int) -> float:
        """Return how long a transfer of ``nbytes`` takes when the link is free."""
        return self.latency_seconds + nbytes / self.bytes_per_second
