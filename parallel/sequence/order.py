"""Which tokens of a sequence each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemini.errors import ConfigError


@dataclass(frozen=True)
class Order:
    """A sequence cut over ``size`` ranks into equal parts.

    In order of the ranks or, with ``zigzag``, in twice as many stretches, of which a rank has one from the
    front and its mirror image from the back: under a causal mask all ranks then have as much to do.
    """

    size: int
    zigzag: bool = False

    @property
    def num_stretches(self) -> int:
        """In how many equal stretches the sequence is cut."""
        return 2 * self.size if self.zigzag else self.size

    def padded(self, length: int) -> int:
        """Return the next length, from ``length`` on, that can be cut."""
        return -(-length // self.num_stretches) * self.num_stretches

    def stretches(self, rank: int) -> tuple[int, ...]:
        """Return which stretches ``rank`` has."""
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)

    def part(self, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """Return what ``rank`` has of a tensor of the whole sequence.

        Raises:
            ConfigError: its length cannot be cut.
        """
        if whole.size(dim) % self.num_stretches:
            raise ConfigError(
                f"a sequence of {whole.size(dim)} is not divided by {self.num_stretches}; pad it to "
                f"{self.padded(whole.size(dim))} (SequenceParallel.cut does)"
            )
        pieces = whole.chunk(self.num_stretches, dim)
        found = [pieces[index] for index in self.stretches(rank)]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim)

    def whole(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the tensor of which the ranks, in order, have these ``parts``."""
        if not self.zigzag:
            return torch.cat(list(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)

    def positions(self, length: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
        """Return where in the sequence the ``length`` tokens of ``rank`` are, as int64."""
        stretch = length // (2 if self.zigzag else 1)
        starts = [index * stretch for index in self.stretches(rank)]
        return torch.cat([torch.arange(start, start + stretch, device=device) for start in starts])
