"""The ranks that share a model: which part of every chunk each owns, what the runtime asks of them, and which
hold the other parts of a model that was cut before it was wrapped. :mod:`gemini.comm.ranks` carries it
out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Protocol, TypeVar

import torch
from torch import nn

from gemini.errors import ConfigError

# Whole chunks stay for a step if they are so many times smaller than the largest: gathering them again would
# take the time of a message, keeping them takes next to nothing.
_SMALL_PART = 16

# Chunks are cut, into shards and state pieces, at multiples of this many elements: then parts of every dtype
# of two bytes and more fill 4 KiB pages.
CUT_NUMEL = 2048
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Share:
    """The ``rank``-th of ``size`` equal parts, in the ``replica``-th of ``replicas`` copies of the model."""

    rank: int
    size: int
    replica: int = 0
    replicas: int = 1

    @property
    def world(self) -> int:
        """How many ranks train the model."""
        return self.size * self.replicas

    @property
    def place(self) -> int:
        """Which of them this is: those of one copy follow each other."""
        return self.replica * self.size + self.rank

    @property
    def members(self) -> range:
        """The places of the ranks that hold this copy."""
        return range(self.replica * self.size, (self.replica + 1) * self.size)

    def whole_numel(self, numel: int) -> int:
        """Return the elements of a chunk with room for ``numel`` that is cut into equal parts."""
        unit = self.size * CUT_NUMEL
        return -(-numel // unit) * unit

    def range_of(self, whole_numel: int) -> tuple[int, int]:
        """Return the elements ``[start, stop)`` of a chunk of :meth:`whole_numel` elements."""
        part = whole_numel // self.size
        return self.rank * part, (self.rank + 1) * part


def stays_whole(nbytes: int, largest: int) -> bool:
    """Say whether a whole chunk is small enough, beside the ``largest``, to stay once it is gathered."""
    return nbytes * _SMALL_PART <= largest


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

    def say_aside(self) -> Callable[[str], Sequence[str]]:
        """Return a second channel like :meth:`say`, for use by another thread."""
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
            "the same model with the same options, and change it alike"
        )


@dataclass(frozen=True)
class ModelRanks:
    """The ranks of tensor or pipeline parallelism, at one place of data parallelism.

    They wrap their parts together and with one DEVICE budget, take one norm of all gradients, and skip a step
    together. ``counts(param)`` says whether this rank is the one whose gradient of a parameter counts in the
    norm: several may have the same parameter. ``alike`` are those among them whose chunks must be laid out
    as here, because they run the same operators; None: all. ``filling(param)``: how many elements of this
    rank's part only fill it up to the size of the others; their gradients are 0.
    """

    peers: Peers
    counts: Callable[[torch.Tensor], bool]
    alike: Sequence[Peers] | None = None
    filling: Callable[[torch.Tensor], int] = lambda _param: 0

    def bind(self, module: nn.Module) -> PartOfModel:
        """Return what the runtime keeps of this for ``module``, which is this rank's part."""
        names = [name for name, param in module.named_parameters() if not self.counts(param)]
        filling = {name: self.filling(param) for name, param in module.named_parameters()}
        return PartOfModel(self.peers, frozenset(names), filling)


@dataclass(frozen=True)
class OwnExperts:
    """Experts that ranks of data parallelism have divided among them, on one of these ranks.

    ``part``: which part of the experts this rank has. ``copies``: the ranks with the same part, which cut its
    chunks among them; None: this rank alone. ``has(param)`` says whether a parameter belongs to the part.
    ``draws(param)``: whether its module, built on ``meta``, gives it the values that it has in one process;
    others have to be loaded.
    """

    part: int
    copies: Peers | None
    has: Callable[[torch.Tensor], bool]
    draws: Callable[[torch.Tensor], bool] = lambda _param: False

    @property
    def share(self) -> Share:
        """This rank's share of each chunk of the part."""
        return Share(0, 1) if self.copies is None else self.copies.share

    def names(self, module: nn.Module) -> frozenset[str]:
        """Return the names of the parameters of ``module`` that belong to the part."""
        return frozenset(name for name, param in module.named_parameters() if self.has(param))

    def awaited(self, module: nn.Module) -> frozenset[str]:
        """Return the names of those that have to be loaded: they are on ``meta``."""
        params = dict(module.named_parameters())
        return frozenset(
            name for name in self.names(module) if params[name].is_meta and not self.draws(params[name])
        )


@dataclass(frozen=True)
class PartOfModel:
    """``peers`` hold the other parts; ``uncounted`` names parameters whose gradients another one counts;
    ``filling`` is as of :class:`ModelRanks`, by name."""

    peers: Peers
    uncounted: frozenset[str]
    filling: Mapping[str, int]
