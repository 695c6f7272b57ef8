"""Owners: the ranks that have shards of a chunk.

For most chunks these are all ranks of a copy of the model; for experts that ranks have divided, the ranks
with the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from gemini.comm.peers import OwnExperts, Peers, Share, Topic, Transfer
from gemini.errors import ConfigError
from gemini.runtime.storage.model_storage import ChunkGroup

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Owners:
    """The owners of a chunk: ``peers`` exchange shards; ``places`` are their positions among all ranks."""

    peers: Peers
    places: Sequence[int]

    @property
    def is_alone(self) -> bool:
        """Whether this rank is the only owner."""
        return self.peers.share.size == 1


class OwnersOfGroups:
    """The owners of each chunk group of a model. The constructor is collective."""

    def __init__(self, peers: Peers, experts: OwnExperts | None) -> None:
        """``peers``: all ranks. Raises ConfigError, on all of them, if ``experts`` cannot be divided."""
        self._all = Owners(peers, peers.share.members)
        self._experts: Owners | None = None
        if experts is None:
            return
        if peers.share.replicas > 1:
            raise ConfigError(
                "experts are divided among ranks (ep_size) that also hold copies of the model (hybrid "
                "sharding, process_group= of two dimensions); give a process group of one dimension, or "
                "leave out ep_size"
            )
        said = [values[0] for values in peers.exchange(Topic.SETTINGS, [experts.part])]
        places = [place for place, part in enumerate(said) if part == experts.part]
        self._experts = Owners(experts.copies or _NoPeers(), places)

    @property
    def divide_experts(self) -> bool:
        """Whether ranks have different experts."""
        return self._experts is not None

    def of(self, group: ChunkGroup) -> Owners:
        """Return the owners of a chunk group."""
        if not group.plan.is_own:
            return self._all
        assert self._experts is not None
        return self._experts


class _DoneTransfer(Transfer):
    def wait(self) -> None:
        """Do nothing: the transfer has ended."""


class _NoPeers(Peers):
    """A single rank: its shard is the whole chunk."""

    @property
    def share(self) -> Share:
        return Share(0, 1)

    @property
    def ranks_on_this_host(self) -> int:
        return 1

    def exchange(self, topic: Topic, mine: Sequence[int]) -> list[list[int]]:
        return [list(mine)]

    def say(self, text: str) -> list[str]:
        return [text]

    def say_aside(self) -> Callable[[str], Sequence[str]]:
        return self.say

    def together(self, action: Callable[[], _Result]) -> _Result:
        return action()

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
        whole.copy_(shard)
        return _DoneTransfer()

    def gather_to(self, rank: int, shard: torch.Tensor, whole: torch.Tensor | None) -> Transfer:
        assert whole is not None, "no other rank asks"
        return self.gather(shard, whole)

    def scatter_all(self, whole: torch.Tensor, parts: torch.Tensor) -> Transfer:
        return _DoneTransfer()

    def swap_copies(self, messages: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        assert not messages, "there are no copies"

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Do nothing: ``tensor`` has its value already."""

    def sum(self, values: torch.Tensor) -> None:
        """Do nothing: ``values`` are the sum already."""

    def largest(self, values: torch.Tensor) -> None:
        """Do nothing: ``values`` are the maximum already."""
