"""Peers: the protocol of the ranks that share a model, and the share of every chunk that each owns. Also the
ranks with the other parts of a model that was cut before wrapping. :mod:`gemini.comm.ranks` implements the
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from typing import Protocol, TypeVar

import torch
from torch import nn

from gemini.errors import ConfigError

# Chunks are divided into shards and state pieces at multiples of this many elements, so that parts fill 4 KiB
# pages for every dtype of at least two bytes.
CUT_NUMEL = 2048
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Share:
    """Part ``rank`` of ``size`` equal parts of each chunk, in copy ``replica`` of ``replicas`` copies of the
    model.
    """

    rank: int
    size: int
    replica: int = 0
    replicas: int = 1

    @property
    def world(self) -> int:
        """The number of ranks that train the model."""
        return self.size * self.replicas

    @property
    def place(self) -> int:
        """The index of this rank among them; the ranks of one copy are consecutive."""
        return self.replica * self.size + self.rank

    @property
    def members(self) -> range:
        """The places of the ranks with this copy."""
        return range(self.replica * self.size, (self.replica + 1) * self.size)

    def whole_numel(self, numel: int) -> int:
        """Return the size in elements of a chunk with room for ``numel`` that divides into equal parts."""
        unit = self.size * CUT_NUMEL
        return -(-numel // unit) * unit

    def range_of(self, whole_numel: int) -> tuple[int, int]:
        """Return this rank's elements ``[start, stop)`` of a chunk of :meth:`whole_numel` elements."""
        part = whole_numel // self.size
        return self.rank * part, (self.rank + 1) * part


class Topic(IntEnum):
    """The subject of a message between ranks."""

    ROUND = 1
    GRADIENTS = 2
    SETTINGS = 3
    AGREEMENT = 4

    @property
    def doing(self) -> str:
        """What a rank that sends this topic is doing."""
        return _DOING[self]


_DOING = {
    Topic.ROUND: "runs operators, or waits for those that do (zero_grad, step, clipping)",
    Topic.GRADIENTS: "exchanges the last gradients (step, clipping)",
    Topic.SETTINGS: "wraps a model",
    Topic.AGREEMENT: "saves or loads",
}


class Transfer(Protocol):
    """A running collective; its tensors must stay in place until :meth:`wait` has returned."""

    def wait(self) -> object: ...


class Peers(Protocol):
    """The ranks that train one model. The ranks of one copy of it divide every chunk into equal parts; there
    may be several copies (hybrid sharding).

    Every method is collective: all ranks call the same methods in the same order, with contiguous tensors of
    equal sizes on the computing device; :meth:`broadcast`, :meth:`sum` and :meth:`largest` also take tensors
    in CPU memory. Unless said otherwise, a method works among the ranks of one copy. Errors are
    torch.distributed's.
    """

    @property
    def share(self) -> Share: ...

    @property
    def ranks_on_this_host(self) -> int:
        """The number of ranks on this machine: torchrun's value, else all ranks."""
        ...

    def exchange(self, topic: Topic, mine: Sequence[int]) -> list[list[int]]:
        """Return the 64-bit integers of every rank of every copy, in order of their places. Raises
        StateError, on all ranks, if the topics differ.
        """
        ...

    def say(self, text: str) -> list[str]:
        """Return the text of every rank, in order of their places. Raises like :meth:`exchange`."""
        ...

    def say_aside(self) -> Callable[[str], Sequence[str]]:
        """Return a second channel like :meth:`say`, for use by another thread."""
        ...

    def together(self, action: Callable[[], _Result]) -> _Result:
        """Run the local ``action`` on every rank while wrapping a model; return its result on this rank.
        Raises ConfigError if it failed on another rank; an error on this rank is passed on.
        """
        ...

    def gather(self, shard: torch.Tensor, whole: torch.Tensor) -> Transfer:
        """Fill ``whole`` with the shards of all ranks in order."""
        ...

    def gather_to(self, rank: int, shard: torch.Tensor, whole: torch.Tensor | None) -> Transfer:
        """Fill ``whole`` on one rank only; the other ranks pass None."""
        ...

    def scatter_all(self, whole: torch.Tensor, parts: torch.Tensor) -> Transfer:
        """Send every other rank its part of ``whole``. ``parts``, of the same size, receives the parts for
        this rank in order of the senders; this rank's own place in it is undefined.
        """
        ...

    def swap_copies(self, messages: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Exchange tensors with the ranks that have this part of other copies. ``messages``: (copy, tensor to
        send, tensor to receive into). The sizes on both sides must match.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` with the values of the first rank of all copies."""
        ...

    def sum(self, values: torch.Tensor) -> None:
        """Replace ``values`` by their sum over the ranks of this copy."""
        ...

    def largest(self, values: torch.Tensor) -> None:
        """Replace ``values`` by their maximum over the ranks of this copy."""
        ...


def digest_of(text: str) -> int:
    """Return a 56-bit hash of ``text``."""
    return int.from_bytes(sha256(text.encode()).digest()[:7], "big")


def require_equal(peers: Peers, what: str) -> None:
    """Check that all ranks lay out equal chunks. Collective.

    Raises:
        ConfigError: ``what`` differs between ranks.
    """
    said = [values[0] for values in peers.exchange(Topic.SETTINGS, [digest_of(what)])]
    different = [rank for rank, value in enumerate(said) if value != said[0]]
    if different:
        raise ConfigError(
            f"ranks {different} have another chunk layout than rank 0: every rank must wrap the same "
            "model with the same options, and make the same changes to it"
        )


@dataclass(frozen=True)
class ModelRanks:
    """The ranks of tensor or pipeline parallelism, at one place of data parallelism.

    They wrap their parts together and with one DEVICE budget, compute one norm over all gradients, and skip a
    step together.

    Attributes:
        peers: these ranks.
        counts: ``counts(param)``: whether this rank counts the gradient of a parameter in the norm; several
            ranks may have the same parameter.
        alike: those of them that must have equal chunk layouts, as they run the same operators; None: all.
        filling: ``filling(param)``: the number of elements that pad this rank's part to the size of the
            others; their gradients are 0.
    """

    peers: Peers
    counts: Callable[[torch.Tensor], bool]
    alike: Sequence[Peers] | None = None
    filling: Callable[[torch.Tensor], int] = lambda _param: 0

    def bind(self, module: nn.Module) -> PartOfModel:
        """Return the record that the runtime keeps for ``module``, this rank's part."""
        names = [name for name, param in module.named_parameters() if not self.counts(param)]
        filling = {name: self.filling(param) for name, param in module.named_parameters()}
        return PartOfModel(self.peers, frozenset(names), filling)


@dataclass(frozen=True)
class OwnExperts:
    """One rank's experts, if the ranks of data parallelism have divided the experts among them.

    Attributes:
        part: the index of this rank's part of the experts.
        copies: the ranks with the same part, which divide its chunks; None: this rank only.
        has: ``has(param)``: whether a parameter belongs to the part.
        draws: ``draws(param)``: whether its module, built on ``meta``, initializes it with the values that it
            has in one process; all others must be loaded.
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
        """Return the names of those parameters that are on ``meta`` and must be loaded."""
        params = dict(module.named_parameters())
        return frozenset(
            name for name in self.names(module) if params[name].is_meta and not self.draws(params[name])
        )


@dataclass(frozen=True)
class PartOfModel:
    """``peers``: the ranks with the other parts. ``uncounted``: names of parameters with gradients that
    another rank counts. ``filling``: as in :class:`ModelRanks`, by name.
    """

    peers: Peers
    uncounted: frozenset[str]
    filling: Mapping[str, int]
