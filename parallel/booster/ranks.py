"""The processes that train together: the identity of this one, and agreement of all on a failure."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import distributed as dist

from gemini.comm.ranks import Rank, join_ranks
from gemini.errors import CheckpointError, GeminiError
from gemini.system.device import select_device

_Result = TypeVar("_Result")
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_launched_group() -> None:
    """Join the process group that a launcher (torchrun) described in the environment.

    Does nothing if a group exists already, or there is no launcher, or only one process. With GPUs, each
    process takes the GPU of its local rank.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    if any(name not in os.environ for name in _LAUNCHED) or int(os.environ["WORLD_SIZE"]) < 2:
        return
    select_device(int(os.environ.get("LOCAL_RANK", "0")))
    join_ranks()


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group; None means the default group if there is one, else this process only."""

    group: dist.ProcessGroup | None = None

    @property
    def is_group(self) -> bool:
        """Whether there is a process group, even of one process."""
        return dist.is_available() and dist.is_initialized()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group) if self.is_group else 1

    @property
    def number(self) -> int:
        """The index of this process."""
        return dist.get_rank(self.group) if self.size > 1 else 0

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files."""
        return self.number == 0

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank if any rank has an ``error``: its own error there, a CheckpointError on the
        others.

        Collective.
        """

        def fail_here() -> None:
            if error is not None:
                raise error

        self.together(fail_here)

    def together(
        self, action: Callable[[], _Result], failure: type[GeminiError] = CheckpointError
    ) -> _Result:
        """Run ``action`` on every rank; return its result here, once all have succeeded. If it fails on one
        rank, the error is raised there, and ``failure`` on the others. Collective.
        """
        return Rank(self.number, self.size, self._say, failure=failure).together(action)

    def collect(self, action: Callable[[], str]) -> list[str]:
        """Run ``action`` on every rank; return the results of all ranks, once all have succeeded. Raises as
        :meth:`agree`. Collective.
        """
        return Rank(self.number, self.size, self._say).collect(action)

    def _say(self, text: str) -> list[str]:
        """Return the texts of all ranks. Collective."""
        if self.size == 1:
            return [text]
        said = [""] * self.size
        dist.all_gather_object(said, text, group=self.group)
        return said
