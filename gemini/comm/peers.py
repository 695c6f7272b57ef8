"""What the runtime asks of the ranks that share a model. Carried out by :mod:`gemini.comm.collectives`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from hashlib import sha256
from typing import Protocol, TypeVar

import torch

from gemini.comm.share import Share
from gemini.errors import ConfigError

_Result = TypeVar("_Result")


class Topic(IntEnum):
    """What a message of ranks to each other is about."""

    ROUND = 1
    GRADIENTS = 2
    SETTINGS = 3
    AGREEMENT = 4

    @property
    def doing(self) -> str:
        """What a rank does that says this."""
        return _DOING[self]


_DOING = {
    Topic.ROUND: "runs operators, or waits for those that do (zero_grad, step, clipping)",
    Topic.GRADIENTS: "exchanges the last gradients (step, clipping)",
    Topic.SETTINGS: "wraps a model",
    Topic.AGREEMENT: "saves or loads",
}


class Transfer(Protocol):
    """A collective under way; its tensors stay where they are until :meth:`wait` has returned."""

    def wait(self) -> object: ...


class Peers(Protocol):
    """The ranks that train one model. Those that hold one copy of it cut every chunk into equal parts; there
    may be several copies (hybrid sharding).

    Every method is collective: all ranks call the same ones in the same order, with tensors of equal sizes,
    contiguous, on the computing device; :meth:`broadcast`, :meth:`sum` and :meth:`largest` also take those in
    CPU memory. Where nothing else is said, those of one copy do it among themselves. Errors are
    torch.distributed's.
    """

    @property
    def share(self) -> Share: ...

    @property
    def ranks_on_this_host(self) -> int:
        """How many ranks share this machine's memory: as torchrun says, else all."""
        ...

    def exchange(self, topic: Topic, mine: Sequence[int]) -> list[list[int]]:
        """Return what every rank of every copy, in order of their places, has given here: 64-bit integers.
        Raises StateError, on all ranks, where they speak of different things."""
        ...

    def say(self, text: str) -> list[str]:
        """Return what every rank, in order of their places, has said here. Raises as :meth:`exchange`."""
        ...

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Run ``action``, which is for this rank alone, on every rank while they wrap a model; return what it
        returned here. Raises ConfigError where it failed on another; what it raises here is let through."""
        ...

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
        """Fill ``whole`` with the shards of all ranks in order."""
        ...

    def gather_to(self, rank: int, shard: torch.Tensor, whole: torch.Tensor | None) -> Transfer:
        """Fill ``whole`` of one rank alone; the others give None."""
        ...

    def scatter_all(self, whole: torch.Tensor, parts: torch.Tensor) -> Transfer:
        """Send every other rank its part of ``whole``; ``parts``, of the same size, receives what the others
        have for this one, in order of their ranks. This rank's own place in ``parts`` is left undefined."""
        ...

    def swap_copies(self, messages: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Send to and receive from the ranks with this part of other copies: for each (copy, what it gets,
        where what it sends goes). What one sends has the size of what the other receives."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Give ``tensor`` the values of the first rank of all copies."""
        ...

    def sum(self, values: torch.Tensor) -> None:
        """Replace ``values`` by their sum over the ranks of this copy."""
        ...

    def largest(self, values: torch.Tensor) -> None:
        """Replace ``values`` by the largest of the ranks of this copy."""
        ...


def digest_of(text: str) -> int:
    """Return an integer that another text does not have."""
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


def require_equal(peers: Peers, what: str) -> None:
    """Refuse ranks that would cut other chunks.

    Raises:
        ConfigError: ``what`` is not the same on all ranks.
    """
    said = [values[0] for values in peers.exchange(Topic.SETTINGS, [digest_of(what)])]
    different = [rank for rank, value in enumerate(said) if value != said[0]]
    if different:
        raise ConfigError(
            f"ranks {different} lay their parameters out in other chunks than rank 0: every rank must wrap "
            "the same model with the same options"
        )
