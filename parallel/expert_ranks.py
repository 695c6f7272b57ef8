"""Over which ranks the experts of a mixture are divided, and which parameters are then this rank's own.

Ranks of data parallelism in a row divide the experts among them (``ep``); the ranks with the same experts are
as far apart (``moe_dp``). Four ranks in twos: {0, 1} and {2, 3} divide, {0, 2} and {1, 3} have the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import distributed as dist
from torch import nn

from gemini.comm.peers import ModelRanks, OwnExperts
from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.partition import Cut


@dataclass(frozen=True)
class ExpertRanks:
    """``data``: all ranks with the same dense weights; ``sharing``: those that divide the experts;
    ``copies``: those that have the same ones, None for this rank alone."""

    data: Axis
    sharing: Axis
    copies: Axis | None

    @classmethod
    def of(
        cls, data: Axis | None, size: int, counts: Collection[int], *, apart: int = 1
    ) -> ExpertRanks | None:
        """Return the ranks that divide layers of ``counts`` experts where ``size`` are asked to; None where
        each rank has all experts. All ranks of ``data`` call it. ``apart``: how many of them in a row have
        parts of the same sequences.

        Raises:
            ConfigError: so many ranks cannot divide them; the message says how many can.
        """
        size = fitting_size(size, counts, 1 if data is None else data.size // apart)
        if data is None or size == 1:
            return None
        sharing, copies = data.experts(size, apart)
        assert sharing is not None
        return cls(data, sharing, copies)

    @property
    def size(self) -> int:
        """How many ranks divide the experts."""
        return self.sharing.size

    def own(self, num_experts: int) -> range:
        """Return the numbers of the experts that this rank has."""
        each = num_experts // self.size
        return range(self.sharing.rank * each, (self.sharing.rank + 1) * each)

    def cut_of(self, part: torch.Tensor) -> Cut:
        """Return how a tensor with a row for each expert was cut, ``part`` of which is here."""
        return Cut((len(part) * self.size, *part.shape[1:]), 0, self.size)


def checked_ep_size(ep_size: int) -> int:
    """Return ``ep_size``. Raises ConfigError where it is no number of ranks."""
    if isinstance(ep_size, bool) or not isinstance(ep_size, int) or ep_size < 1:
        raise ConfigError(f"ep_size is {ep_size!r}; give a whole number of ranks, 1 or more")
    return ep_size


def fitting_size(size: int, counts: Collection[int], num_ranks: int) -> int:
    """Return how many of ``num_ranks`` ranks divide layers of ``counts`` experts where ``size`` are asked to:
    fewer where a layer has fewer experts.

    Raises:
        ConfigError: so many cannot; the message says how many can.
    """
    found = _fitting(size, counts, num_ranks)
    if found is None:
        fit = [n for n in range(1, num_ranks + 1) if _fitting(n, counts, num_ranks) is not None]
        layers = ", ".join(map(str, sorted(set(counts))))
        raise ConfigError(
            f"experts cannot be divided among {size} of {num_ranks} ranks of data parallelism: each rank has "
            f"equally many of the {layers} experts of a layer; choose {' or '.join(map(str, fit))}"
        )
    return found


def _fitting(size: int, counts: Collection[int], num_ranks: int) -> int | None:
    found = min(size, *counts)
    fits = size % found == 0 and not any(count % found for count in counts)
    return found if fits and num_ranks % size == 0 else None


@dataclass(frozen=True)
class DividedExperts:
    """The parameters of a model that hold this rank's experts alone. ``drawn``: those with values that depend
    on the number of an expert, wherever it is initialized."""

    ranks: ExpertRanks
    params: Sequence[nn.Parameter]
    drawn: Sequence[nn.Parameter] = ()

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.params))

    def has(self, param: torch.Tensor) -> bool:
        """Say whether ``param`` is one of them."""
        return id(param) in self._ids

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks that have the same experts; None for this rank alone."""
        return None if self.ranks.copies is None else self.ranks.copies.group

    @property
    def own(self) -> OwnExperts:
        """What GeminiDDP takes as ``experts=``."""
        drawn = frozenset(map(id, self.drawn))
        sharing, copies = self.ranks.sharing, self.ranks.copies
        return OwnExperts(sharing.rank, copies, self.has, lambda param: id(param) in drawn)

    @property
    def model_ranks(self) -> ModelRanks:
        """The ranks over which a norm counts each expert once, and other parameters once."""
        sharing = self.ranks.sharing
        return ModelRanks(sharing, lambda param: sharing.rank == 0 or self.has(param))
