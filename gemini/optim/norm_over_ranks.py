"""The norm of a vector of which several ranks have parts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

import torch

from gemini.errors import ConfigError
from gemini.optim.exact_norm import empty_squares, exact_squares, norm_of


class Summing(Protocol):
    """A group of ranks that add numbers up; see :class:`gemini.comm.peers.Peers`."""

    def sum(self, values: torch.Tensor) -> None: ...

    def largest(self, values: torch.Tensor) -> None: ...


def sum_over_ranks(number: int, groups: Iterable[Summing]) -> int:
    """Return the sum of ``number`` over all ranks: those of this rank's group, then of the next group of
    groups, and so on. All ranks call it."""
    total = torch.tensor([number], dtype=torch.float64, device="cpu")  # exact up to 2**53
    for ranks in groups:
        ranks.sum(total)
    return int(total)


class NormOverRanks:
    """Takes this rank's parts, one by one, then the norm over all ranks: the same bits on each.

    The 2-norm and the largest element do not depend, to the bit, on how the vector is cut; other norms do in
    their last digits. Raises ConfigError for a ``norm_type`` that is not above 0.
    """

    def __init__(self, norm_type: float) -> None:
        if not norm_type > 0:
            raise ConfigError(
                f"norm_type is {norm_type}; over several ranks give a positive number or infinity"
            )
        self._norm_type = norm_type
        self._squares, self._found = empty_squares(), torch.zeros(1, dtype=torch.float64, device="cpu")

    def add(self, values: torch.Tensor) -> None:
        """Count a part, fp32."""
        if values.numel() == 0:
            return
        if self._norm_type == 2.0:
            self._squares.add_(exact_squares(values.reshape(-1)))
        elif self._norm_type == math.inf:
            torch.maximum(self._found, values.abs().max().double().cpu(), out=self._found)
        else:
            norm = torch.linalg.vector_norm(values, self._norm_type, dtype=torch.float64)
            self._found.add_(float(norm) ** self._norm_type)

    def over(self, groups: Iterable[Summing]) -> torch.Tensor:
        """Return the norm, an fp32 scalar in CPU memory, of the parts of all ranks: those of this rank's
        group, then of the next group of groups, and so on. All ranks call it, once."""
        if self._norm_type == 2.0:
            for ranks in groups:
                ranks.sum(self._squares)
            return norm_of(self._squares)
        found = self._found
        if self._norm_type == math.inf:
            # A NaN need not be the largest of anything: it is counted beside.
            said = torch.cat([found.nan_to_num(nan=0.0, posinf=math.inf), found.isnan().double()])
            for ranks in groups:
                ranks.largest(said)
            return torch.tensor(math.nan if said[1] else said[0].item(), dtype=torch.float32, device="cpu")
        for ranks in groups:
            ranks.sum(found)
        return (found[0] ** (1.0 / self._norm_type)).float()
