"""Which ranks divide the experts of a mixture, and which parameters are expert parameters.

Consecutive ranks of data parallelism divide the experts (``ep``); ranks with the same experts form the other
axis (``moe_dp``). Of four ranks with ep = 2, {0, 1} and {2, 3} divide; {0, 2} and {1, 3} have the same
experts.
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
    """The groups of ranks for divided experts.

    Attributes:
        data: all ranks with the same dense weights.
        sharing: the ranks that divide the experts.
        copies: the ranks with the same experts; None if this rank is the only one.
    """

    data: Axis
    sharing: Axis
    copies: Axis | None

    @classmethod
    def of(
        cls, data: Axis | None, size: int, counts: Collection[int], *, apart: int = 1
    ) -> ExpertRanks | None:
        """Return the ranks that divide layers of ``counts`` experts; None if each rank has all experts.
        Collective over ``data``.

        Args:
            data: the ranks of data parallelism; None for one rank.
            size: the number of ranks to divide among; fewer are used if a layer has fewer experts.
            counts: the number of experts of each layer.
            apart: the number of consecutive ranks of ``data`` with parts of the same sequences.

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
        """The number of ranks that divide the experts."""
        return self.sharing.size

    def own(self, num_experts: int) -> range:
        """Return the indices of the experts that this rank has."""
        each = num_experts // self.size
        return range(self.sharing.rank * each, (self.sharing.rank + 1) * each)

    def cut_of(self, part: torch.Tensor) -> Cut:
        """Return the :class:`Cut` of a tensor with one row for each expert; ``part`` is this rank's part."""
        return Cut((len(part) * self.size, *part.shape[1:]), 0, self.size)


def checked_ep_size(ep_size: int) -> int:
    """Return ``ep_size``. Raises ConfigError if it is not a positive int."""
    if isinstance(ep_size, bool) or not isinstance(ep_size, int) or ep_size < 1:
        raise ConfigError(f"ep_size is {ep_size!r}; give a whole number of ranks, 1 or more")
    return ep_size


def fitting_size(size: int, counts: Collection[int], num_ranks: int) -> int:
    """Return how many of ``num_ranks`` ranks divide layers of ``counts`` experts if ``size`` are requested;
    fewer if a layer has fewer experts.

    Raises:
        ConfigError: so many ranks cannot divide them; the message says how many can.
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
    """The parameters of a model that hold only this rank's experts.

    Attributes:
        ranks: the ranks that divide them.
        params: the parameters.
        drawn: those with initial values that depend on the index of the expert, on whichever rank they are
            initialized.
    """

    ranks: ExpertRanks
    params: Sequence[nn.Parameter]
    drawn: Sequence[nn.Parameter] = ()

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(map(id, self.params))

    def has(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is one of these parameters."""
        return id(param) in self._ids

    @property
    def copies(self) -> dist.ProcessGroup | None:
        """The ranks with the same experts; None if this rank is the only one."""
        return None if self.ranks.copies is None else self.ranks.copies.group

    @property
    def own(self) -> OwnExperts:
        """The value for ``experts=`` of GeminiDDP."""
        drawn = frozenset(map(id, self.drawn))
        sharing, copies = self.ranks.sharing, self.ranks.copies
        return OwnExperts(sharing.rank, copies, self.has, lambda param: id(param) in drawn)

    @property
    def model_ranks(self) -> ModelRanks:
        """The ranks over which a norm counts each expert once and every other parameter once."""
        sharing = self.ranks.sharing
        return ModelRanks(sharing, lambda param: sharing.rank == 0 or self.has(param))
