"""The ranks that share a model, over torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.device import default_budget_bytes
from gemini.errors import ConfigError
from gemini.runtime.config import GeminiConfig
from gemini.zero.peers import Peers, Transfer
from gemini.zero.share import Share


@dataclass
class Traffic:
    """Bytes that this rank has sent to others, by what for."""

    gathered: int = 0
    reduced: int = 0
    rounds: int = 0


class ProcessGroupPeers(Peers):
    """Carries out what the runtime asks for on a process group of two or more ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.traffic = Traffic()
        self._share = Share(dist.get_rank(group), dist.get_world_size(group))
        # Rounds overtake what is being transferred; on a GPU they need not wait for its stream either.
        ranks = dist.get_process_group_ranks(group)
        self._messages = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)

    @property
    def share(self) -> Share:
        return self._share

    def exchange(self, mine: Sequence[int]) -> list[list[int]]:
        message = torch.tensor(mine, dtype=torch.int64)
        said = torch.empty(len(mine) * self._share.size, dtype=torch.int64)
        all_gather(said, message, group=self._messages)
        self.traffic.rounds += 1
        return said.view(self._share.size, -1).tolist()

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
        self.traffic.gathered += (self._share.size - 1) * shard.nbytes
        if shard.device.type != "cpu":
            return _started(all_gather(whole, shard, group=self.group, async_op=True))
        # gloo gathers through buffers of its own; messages go from and to where the bytes are.
        own, parts = self._share.rank, whole.view(self._share.size, -1)
        works = [self._send(shard, rank) for rank in self._others()]
        works += [self._receive(parts[rank], rank) for rank in self._others()]
        parts[own].copy_(shard)
        return _Works(works)

    def gather_to(self, rank: int, shard: torch.Tensor, whole: torch.Tensor | None) -> Transfer:
        if whole is None:
            self.traffic.gathered += shard.nbytes
            return self._send(shard, rank)
        parts = whole.view(self._share.size, -1)
        parts[rank].copy_(shard)
        return _Works([self._receive(parts[other], other) for other in self._others()])

    def _others(self) -> list[int]:
        """Return the other ranks, each rank beginning behind itself: no one is everybody's first."""
        size, rank = self._share.size, self._share.rank
        return [(rank + distance) % size for distance in range(1, size)]

    def _send(self, tensor: torch.Tensor, rank: int) -> Transfer:
        return _started(dist.isend(tensor, group=self.group, group_dst=rank))

    def _receive(self, tensor: torch.Tensor, rank: int) -> Transfer:
        return _started(dist.irecv(tensor, group=self.group, group_src=rank))

    def scatter_all(self, whole: torch.Tensor, parts: torch.Tensor) -> Transfer:
        size = self._share.size
        self.traffic.reduced += whole.nbytes // size * (size - 1)
        if whole.device.type != "cpu":
            return _started(dist.all_to_all_single(parts, whole, group=self.group, async_op=True))
        # As in gather(); nor is this rank's own part copied.
        mine, theirs = whole.view(size, -1), parts.view(size, -1)
        works = [self._send(mine[rank], rank) for rank in self._others()]
        works += [self._receive(theirs[rank], rank) for rank in self._others()]
        return _Works(works)

    def say(self, text: str) -> list[str]:
        """Return what every rank, in order, has said here."""
        said: list[Any] = [None] * self._share.size
        dist.all_gather_object(said, text, group=self._messages)
        return said

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, group=self.group, group_src=0)

    def sum(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, group=self.group)

    def largest(self, values: torch.Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)


class _Works(Transfer):
    """Several transfers as one."""

    def __init__(self, works: Sequence[Transfer]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


# Torch 2.13 has given ``all_gather_into_tensor`` another name, and deprecates the old one.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _started(work: Any) -> Transfer:
    assert work is not None, "this rank is no member of the process group"
    started: Transfer = work
    return started


def make_peers(process_group: object | None) -> ProcessGroupPeers | None:
    """Return the ranks of ``process_group`` (a ProcessGroup, a one-dimensional DeviceMesh, or None: all
    ranks, where torch.distributed was initialized); None where that is one rank alone.

    Raises:
        ConfigError: it is something else.
    """
    if process_group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    elif isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ConfigError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions; pass the one that "
                "shards, for example mesh['dp']"
            )
        group = process_group.get_group()
    elif isinstance(process_group, dist.ProcessGroup):
        group = process_group
    else:
        raise ConfigError(
            f"process_group is a {type(process_group).__name__}; pass a torch.distributed.ProcessGroup, a "
            "DeviceMesh, or None for all ranks"
        )
    if group is None or dist.get_world_size(group) == 1:
        return None
    return ProcessGroupPeers(group)


def join_ranks(backend: str | None = None) -> bool:
    """Initialize torch.distributed among the processes that torchrun has started; say whether there are any.
    ``backend`` as ``init_process_group`` takes it.

    Does nothing where that was done already, or without torchrun. Unlike a plain ``init_process_group`` it is
    safe after a restart: torchrun keeps its store, in which the addresses of dead ranks would be found.
    """
    if dist.is_initialized():
        return True
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return False
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not hosted
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=world)
    return True


def agreed(config: GeminiConfig, peers: ProcessGroupPeers) -> GeminiConfig:
    """Return ``config`` with the DEVICE budget of the rank that has least: chunks are cut alike everywhere.

    Without one each rank takes its part of what is free on its host.
    """
    device_bytes = config.device_bytes
    if device_bytes is None:
        device_bytes = default_budget_bytes() // _ranks_on_this_host(peers.share.size)
    least = min(said[0] for said in peers.exchange([device_bytes]))
    return replace(config, device_bytes=least)


def _ranks_on_this_host(world: int) -> int:
    """Return how many ranks share this machine's memory: as torchrun says, else all."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) > 0 else world
