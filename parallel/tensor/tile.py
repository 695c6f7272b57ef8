"""Tiles: which part of a tensor a rank of a grid has, by the coordinates that cut each dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemini.errors import ConfigError


@dataclass(frozen=True)
class Places:
    """Ranks in a grid: ``sizes`` along the coordinates ``names``, the last one of which runs fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    def size(self, names: Sequence[str]) -> int:
        """Return how many places the coordinates ``names`` have together."""
        return math.prod(self.sizes[self.names.index(name)] for name in names)

    def index(self, rank: int, names: Sequence[str]) -> int:
        """Return the place of ``rank`` along the coordinates ``names`` together, the first one outermost."""
        found = 0
        for name in names:
            at = self.names.index(name)
            found = found * self.sizes[at] + rank // math.prod(self.sizes[at + 1 :]) % self.sizes[at]
        return found

    def others(self, rank: int, names: Sequence[str]) -> list[int]:
        """Return the ranks that differ from ``rank`` in the coordinates ``names`` alone, itself included."""
        fixed = [name for name in self.names if name not in names]
        own = self.index(rank, fixed)
        return [other for other in range(self.count) if self.index(other, fixed) == own]


@dataclass(frozen=True)
class Tile:
    """A tensor of ``shape`` of which the coordinates ``cuts[dim]`` cut each dimension, the first outermost.

    A dimension that is not divided is filled up with zeros, which are in no state dict; the parts of the
    first one are a multiple of ``unit`` long. ``transposed``: the parts of a matrix (out, in) lie as
    (in, out). Ranks that differ in other coordinates have the same part.
    """

    places: Places
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    unit: int = 1
    transposed: bool = False

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of a part, as it lies."""
        sizes = self._piece_sizes()
        return sizes[::-1] if self.transposed else sizes

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of a tensor that ``rank`` has, contiguous, in memory of its own.

        Raises:
            ConfigError: ``whole`` has another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ConfigError(f"a tensor of {self.shape} is cut here, and this one has {tuple(whole.shape)}")
        found = whole
        for dim, (size, names) in enumerate(zip(self._piece_sizes(), self.cuts, strict=True)):
            start = min(self.places.index(rank, names) * size, self.shape[dim])
            found = found.narrow(dim, start, min(size, self.shape[dim] - start))
        filled = whole.new_zeros(self._piece_sizes())
        filled[tuple(slice(0, size) for size in found.shape)] = found
        return filled.t().contiguous() if self.transposed else filled

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor of which all ranks, in order, have these ``parts``."""
        found = parts[0].new_empty(self.shape)
        for rank, part in enumerate(parts):
            at = []
            for dim, (size, names) in enumerate(zip(self._piece_sizes(), self.cuts, strict=True)):
                start = min(self.places.index(rank, names) * size, self.shape[dim])
                at.append(slice(start, min(start + size, self.shape[dim])))
            here = found[tuple(at)]
            lying = part.t() if self.transposed else part
            here.copy_(lying[tuple(slice(0, size) for size in here.shape)])
        return found

    def counts_on(self, rank: int) -> bool:
        """Say whether ``rank`` is the first of those that have the same part."""
        cutting = {name for names in self.cuts for name in names}
        return self.places.index(rank, [name for name in self.places.names if name not in cutting]) == 0

    def _piece_sizes(self) -> tuple[int, ...]:
        units = (self.unit, *(1,) * (len(self.shape) - 1))
        return tuple(
            -(-size // (self.places.size(names) * unit)) * unit
            for size, names, unit in zip(self.shape, self.cuts, units, strict=True)
        )
