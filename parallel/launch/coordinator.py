"""DistCoordinator: the identity of this process and its machine, and ordered execution among processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from gemini.errors import ConfigError, StateError

_Result = TypeVar("_Result")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # random id of the running kernel: machines differ


class DistCoordinator:
    """Information about the processes of a run; works with one process too.

    Creating it is collective: ranks exchange the identities of their machines. Groups are torch's; None means
    all ranks.
    """

    def __init__(self) -> None:
        self._hosts = _said(_BOOT_ID.read_text().strip())
        self.rank = dist.get_rank() if _is_group() else 0
        self.world_size = len(self._hosts)

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return len(set(self._hosts))

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        return self._hosts.count(self._hosts[self.rank])

    @property
    def local_rank(self) -> int:
        """The index of this process on its machine."""
        return self._hosts[: self.rank].count(self._hosts[self.rank])

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the first process of a group."""
        return not _is_group() or dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this is the first process on its machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Return whether this is the last process of a group."""
        return not _is_group() or dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, text: object, process_group: dist.ProcessGroup | None = None) -> None:
        """Write a line to standard output, on the first process of a group."""
        if self.is_master(process_group):
            write_line(text)

    def print_on_node_master(self, text: object) -> None:
        """Write a line to standard output, on the first process of each machine."""
        if self.is_node_master():
            write_line(text)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result | None]]:
        """Decorate a function to run only on the first process of a group; it returns None on the others."""

        def decorate(function: Callable[..., _Result]) -> Callable[..., _Result | None]:
            @wraps(function)
            def run(*args: Any, **kwargs: Any) -> _Result | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate

    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> AbstractContextManager[None]:
        """See :func:`priority_execution`."""
        return priority_execution(executor_rank, process_group)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until all ranks of a group have called this."""
        if _is_group():
            dist.barrier(process_group)


@contextmanager
def priority_execution(
    executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Run the block on one rank first, and on the others after it has finished: for example, it downloads
    files for the others. Collective over the group; ranks wait at most for the group's timeout.

    Raises:
        ConfigError: there is no such rank.
        StateError: on the others, if the first one has failed.
    """
    rank = dist.get_rank(process_group) if _is_group() else 0
    size = dist.get_world_size(process_group) if _is_group() else 1
    if not 0 <= executor_rank < size:
        raise ConfigError(f"executor_rank is {executor_rank}; the ranks are 0 to {size - 1}")
    if rank != executor_rank:
        failure = _said("", process_group)[executor_rank]
        if failure:
            raise StateError(f"rank {executor_rank}, which runs the block first, failed: {failure}")
        yield
        return
    try:
        yield
    except BaseException as error:
        _said(f"{type(error).__name__}: {error}", process_group)
        raise
    _said("", process_group)


def write_line(text: object) -> None:
    """Write a line to standard output, flushed, in one write."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def print_rank_0(text: object) -> None:
    """Write a line to standard output, on the first process only."""
    if not _is_group() or dist.get_rank() == 0:
        write_line(text)


def _is_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _said(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks. Collective."""
    if not _is_group():
        return [text]
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, text, group=group)
    return said
