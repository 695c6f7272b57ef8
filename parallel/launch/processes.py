"""Processes of a run started from one program, as its tests need them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import spawn as spawn_processes

from gemini.errors import ConfigError


def spawn(function: Callable[..., Any], nprocs: int = 1, **kwargs: Any) -> None:
    """Call ``function(rank, world_size=, port=, **kwargs)`` in so many processes, which can
    :func:`launch` over the free port; return when all have ended.

    ``function`` is at the top level of a module.

    Raises:
        ConfigError: ``nprocs`` is no number of processes. ProcessRaisedException: one has raised, with its
            traceback; the others are ended.
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise ConfigError(f"nprocs is {nprocs!r}; give a whole number of processes, 1 or more")
    spawn_processes(_call, (function, nprocs, free_port(), kwargs), nprocs=nprocs)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _call(rank: int, function: Callable[..., Any], nprocs: int, port: int, kwargs: dict[str, Any]) -> None:
    function(rank, world_size=nprocs, port=port, **kwargs)
