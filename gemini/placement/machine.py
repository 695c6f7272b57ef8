"""Machine: what a plan has to work with."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.errors import ConfigError
from gemini.memstats.trace import LINKS, LinkSpeed

# Where the processor is DEVICE. Measured with GPT-2 124M and a virtual disk on two processors: 0.18 to 0.24.
CPU_TRANSFERS_TAKE = 0.2


@dataclass(frozen=True)
class Machine:
    """Hard byte budgets of the tiers (0: absent) and the speeds of the links between them.

    ``disk_shared``: reads and writes of the disk share one channel, so their times add up.
    ``transfers_take``: the seconds by which a second of a busy link slows computing down; plans are compared
    with it, the times of steps leave it out. Raises ConfigError where a tier has no link to DEVICE.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    links: tuple[LinkSpeed, ...]
    disk_shared: bool = True
    transfers_take: float = 0.0

    def __post_init__(self) -> None:
        known = {link.name for link in self.links}
        for tier, nbytes, names in (
            ("HOST", self.host_bytes, LINKS[:2]),
            ("DISK", self.disk_bytes, LINKS[2:]),
        ):
            missing = [name for name in names if name not in known]
            if nbytes and missing:
                raise ConfigError(f"{tier} has {nbytes} bytes but the speed of {missing[0]} is unknown")

    @property
    def budgets(self) -> tuple[int, int, int]:
        """The bytes of DEVICE, HOST and DISK."""
        return self.device_bytes, self.host_bytes, self.disk_bytes

    def speed(self, name: str) -> tuple[float, float]:
        """Return bytes per second and latency in seconds of a link; zeros for one that is not there."""
        found = next((link for link in self.links if link.name == name), None)
        return (found.bytes_per_second, found.latency_seconds) if found is not None else (0.0, 0.0)

    def below(self, total_bytes: int) -> tuple[float, float]:
        """Return seconds per byte from and to the tiers below DEVICE, for ``total_bytes`` of model data.

        What DEVICE has no room for is on HOST as far as that goes, the rest on DISK.
        """
        outside = max(1, total_bytes - self.device_bytes)
        on_host = min(1.0, self.host_bytes / outside) if self.disk_bytes else float(self.host_bytes > 0)
        shares = ((on_host, "h2d", "d2h"), (1.0 - on_host, "disk_read", "disk_write"))
        in_use = [
            (share, self.speed(read)[0], self.speed(write)[0]) for share, read, write in shares if share
        ]
        return (
            sum(share / read for share, read, _ in in_use if read),
            sum(share / write for share, _, write in in_use if write),
        )
