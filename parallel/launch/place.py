"""Which of the processes of a run this one is, as a launcher says in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from gemini.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Process ``rank`` of ``world_size``, the ``local_rank``-th of its machine; the first one listens at
    ``host`` and ``port``, which one process alone needs not."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size or self.local_rank < 0:
            raise ConfigError(
                f"rank {self.rank} (local {self.local_rank}) of world_size {self.world_size}: ranks are 0 to "
                "world_size - 1"
            )
        if self.world_size > 1 and (self.host is None or self.port is None):
            raise ConfigError(
                f"{self.world_size} processes meet at host and port of the first one, here {self.host!r} and "
                f"{self.port!r}; pass both: launch(..., host='10.0.0.1', port=29500)"
            )
        if self.port is not None and not 0 < self.port < 2**16:
            raise ConfigError(f"port is {self.port}; ports are 1 to 65535")

    @property
    def address(self) -> str:
        """Where the processes meet, as torch takes it."""
        host = f"[{self.host}]" if self.host is not None and ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher; of several names the first one that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]

    def place(
        self, host: str | None, port: int | str | None, environ: Mapping[str, str] = os.environ
    ) -> Place:
        """Return this process's place; that of one alone where the launcher has not started it.

        Raises:
            ConfigError: it says only half of it, or no whole numbers.
        """
        rank, world_size = _read(environ, self.rank), _read(environ, self.world_size)
        if rank is None and world_size is None:
            return Place()
        if rank is None or world_size is None:
            missing = self.rank if rank is None else self.world_size
            raise ConfigError(
                f"{self.name} has started this process but {' or '.join(missing)} is not set; start it with "
                f"{self.name}, or call launch(rank=..., world_size=..., host=..., port=...)"
            )
        return Place(rank, world_size, _read(environ, self.local_rank) or 0, host, parse_port(port))


SLURM = Launcher("srun", ("SLURM_PROCID",), ("SLURM_NPROCS", "SLURM_NTASKS"), ("SLURM_LOCALID",))
OPENMPI = Launcher(
    "mpirun",
    ("OMPI_COMM_WORLD_RANK", "MPI_COMM_WORLD_RANK"),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
)
TORCHRUN = Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",))


def parse_port(port: int | str | None) -> int | None:
    """Return a port as a number. Raises ConfigError where it is none."""
    if port is None or (isinstance(port, int) and not isinstance(port, bool)):
        return port
    if isinstance(port, str) and port.isdigit():
        return int(port)
    raise ConfigError(f"port is {port!r}; give a number, such as 29500")


def _read(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text and not text.isdigit():
            raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number")
        if text:
            return int(text)
    return None
