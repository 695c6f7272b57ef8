"""Launch: join the processes of a run, started by any launcher, or start them from a program (spawn)."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn as spawn_processes

from gemini.comm.heartbeats import end_gloo_gently
from gemini.comm.ranks import join_ranks
from gemini.errors import ConfigError
from gemini.parallel.launch.config import read_config
from gemini.parallel.launch.context import global_context
from gemini.system.device import cuda_available, select_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Process ``rank`` of ``world_size``, number ``local_rank`` on its machine. The first process listens at
    ``host`` and ``port``, which a single process does not need.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    host: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size or self.local_rank < 0:
            raise ConfigError(
                f"rank {self.rank} (local {self.local_rank}) of world_size {self.world_size} is impossible; "
                "ranks are 0 to world_size - 1"
            )
        if self.world_size > 1 and (self.host is None or self.port is None):
            raise ConfigError(
                f"{self.world_size} processes connect to host and port of rank 0, but host is {self.host!r} "
                f"and port {self.port!r}; pass both: launch(..., host='10.0.0.1', port=29500)"
            )
        if self.port is not None and not 0 < self.port < 2**16:
            raise ConfigError(f"port is {self.port}; ports are 1 to 65535")

    @property
    def address(self) -> str:
        """The address where the processes meet, in torch's format."""
        host = f"[{self.host}]" if self.host is not None and ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class Launcher:
    """The environment variables of a launcher; of several names the first one that is set counts."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]

    def place(
        self, host: str | None, port: int | str | None, environ: Mapping[str, str] = os.environ
    ) -> Place:
        """Return this process's place; that of a single process if the launcher has not started it.

        Raises:
            ConfigError: a variable is missing or no whole number.
        """
        rank, world_size = _read(environ, self.rank), _read(environ, self.world_size)
        if rank is None and world_size is None:
            return Place()
        if rank is None or world_size is None:
            missing = self.rank if rank is None else self.world_size
            raise ConfigError(
                f"{self.name} started this process, but {' or '.join(missing)} is not set; start it with "
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
    """Return a port as a number. Raises ConfigError if it is none."""
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


ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | None

_LOCAL = ("localhost", "127.0.0.1", "::1")


def launch(
    config: ConfigLike = None,
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | str | None = None,
    backend: str | None = None,
    local_rank: int | None = None,
    *,
    seed: int | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Join the processes of a run and create the groups for its configuration. Collective.

    It may be called again: joined processes stay, and the new configuration replaces the old one. One process
    without a launcher needs no arguments. Afterwards ``global_context`` has the groups, and layers of
    :mod:`gemini.parallel.tensor.nn` follow the mode in ``parallel``.

    Args:
        config: the path of a Python file, a dict or None; see :func:`read_config`.
        rank, world_size: the index of this process and the number of processes; None: from the environment,
            as set by torchrun.
        host, port: where the first process listens.
        backend: that of torch.distributed; None: torch's default for each device. ``"nccl"`` becomes
            ``"gloo"``, with a warning, if there is not a GPU for each process.
        local_rank: the index of this process on its machine, which selects its GPU; None: ``LOCAL_RANK``, or
            ``rank``.
        seed: the seed of torch's generators on all ranks, set in every call; None leaves them unchanged.
        timeout: how long a rank waits for the others.

    Raises:
        ConfigError: an argument or the configuration is invalid. Nothing was changed, except that the
            processes have joined if ``parallel`` does not fit their number.
    """
    if rank is None and world_size is None:
        place = None
        if host is not None or port is not None:
            place = TORCHRUN.place(host, port)
    elif rank is None or world_size is None:
        raise ConfigError(f"rank is {rank} and world_size is {world_size}; pass both or neither")
    else:
        local = int(os.environ.get("LOCAL_RANK", rank)) if local_rank is None else local_rank
        place = Place(rank, world_size, local, host, parse_port(port))
    _launch(config, place, backend, seed, timeout)


def launch_from_torch(
    config: ConfigLike = None,
    backend: str | None = None,
    *,
    seed: int | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Launch under torchrun, or as a single process; arguments and errors as :func:`launch`."""
    _launch(config, None, backend, seed, timeout)


def launch_from_slurm(
    config: ConfigLike = None,
    host: str | None = None,
    port: int | str | None = None,
    backend: str | None = None,
    *,
    seed: int | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Launch under ``srun``; arguments and errors as :func:`launch`."""
    _launch(config, SLURM.place(host, port), backend, seed, timeout)


def launch_from_openmpi(
    config: ConfigLike = None,
    host: str | None = None,
    port: int | str | None = None,
    backend: str | None = None,
    *,
    seed: int | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Launch under Open MPI's ``mpirun``; arguments and errors as :func:`launch`."""
    _launch(config, OPENMPI.place(host, port), backend, seed, timeout)


def shutdown() -> None:
    """Undo :func:`launch`: destroy its groups, and torch.distributed if it started it. Another launch may
    follow; with several processes it needs another port. Idempotent.
    """
    global_context.end(and_its_world=True)


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser of the arguments of :func:`launch`; a program may add its own. Missing arguments are
    None, and launch() then reads the environment.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="path of the configuration, a Python file")
    parser.add_argument("--host", help="name or address of the host of rank 0, where all processes connect")
    parser.add_argument("--port", type=int, help="TCP port on that host")
    parser.add_argument("--world_size", "--world-size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="rank of this process, from 0")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help="number of this process on its machine, from 0"
    )
    parser.add_argument(
        "--backend", default="nccl", help="backend of torch.distributed (default: nccl, gloo without GPUs)"
    )
    return parser


def _launch(
    config: ConfigLike, place: Place | None, backend: str | None, seed: int | None, timeout: timedelta | None
) -> None:
    """``place=None``: as torchrun says. torchrun restarts processes and keeps their store."""
    chosen = read_config(config)  # before joining: an error here keeps no rank waiting
    joins = not dist.is_initialized()
    if joins:
        global_context.end()  # of a group that the program has destroyed itself
        _join(place, backend, timeout)
    else:
        _check_same(place)
    if seed is not None:
        torch.manual_seed(seed)
    global_context.begin(chosen, owns_world=joins)


def _join(place: Place | None, backend: str | None, timeout: timedelta | None) -> None:
    """Create the group of all processes."""
    end_gloo_gently()
    if place is None:
        environ = os.environ
        found = _torchrun_place()
        select_device(found.local_rank)
        usable = _usable(backend, found)
        if "RANK" in environ:
            join_ranks(usable, timeout)
            return
        place = found
    else:
        select_device(place.local_rank)
        usable = _usable(backend, place)
    if place.host is None:
        dist.init_process_group(usable, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
        return
    dist.init_process_group(
        usable, init_method=place.address, rank=place.rank, world_size=place.world_size, timeout=timeout
    )


def _torchrun_place() -> Place:
    return TORCHRUN.place(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))


def _check_same(place: Place | None) -> None:
    """Raise ConfigError if the process is to have another rank or world size than it has."""
    have = (dist.get_rank(), dist.get_world_size())
    if place is not None and place != Place() and (place.rank, place.world_size) != have:
        raise ConfigError(
            f"this process is already rank {have[0]} of {have[1]}, and the call asks for rank {place.rank} "
            f"of {place.world_size}; call shutdown() first"
        )


def _usable(backend: str | None, place: Place) -> str | None:
    """Return ``backend``, or gloo instead of NCCL if processes of a machine would share a GPU."""
    if backend != "nccl":
        return backend
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    here = int(said) if said.isdigit() else place.world_size if place.host in _LOCAL else 1
    gpus = torch.accelerator.device_count() if cuda_available() else 0
    if gpus >= here:
        return backend
    logger.warning(
        "backend 'nccl' needs a GPU for each process, but there are %d GPUs for %d processes; using 'gloo'",
        gpus,
        here,
    )
    return "gloo"


def spawn(function: Callable[..., Any], nprocs: int = 1, **kwargs: Any) -> None:
    """Call ``function(rank, world_size=, port=, **kwargs)`` in ``nprocs`` processes, which can :func:`launch`
    over the free port. Returns when all have ended. ``function`` must be at the top level of a module.

    Raises:
        ConfigError: ``nprocs`` is no number of processes.
        ProcessRaisedException: one process has raised, with its traceback; the others are ended.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ConfigError(f"nprocs is {nprocs!r}; give a whole number of processes, 1 or more")
    spawn_processes(_call, (function, nprocs, free_port(), kwargs), nprocs=nprocs)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _call(rank: int, function: Callable[..., Any], nprocs: int, port: int, kwargs: dict[str, Any]) -> None:
    function(rank, world_size=nprocs, port=port, **kwargs)
