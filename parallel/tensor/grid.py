"""The grid of ranks of a tensor-parallel mode: its coordinates, the parts of tensors and activations on each
rank, and the collectives along coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.tensor.products import Cube, Square
from gemini.parallel.tensor.region import Region, share_generators


@dataclass(frozen=True)
class Places:
    """Ranks in a grid: ``sizes`` along the coordinates ``names``. The last coordinate varies fastest."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def size(self, names: Sequence[str]) -> int:
        """Return the number of places along the coordinates ``names`` together."""
        return math.prod(self.sizes[self.names.index(name)] for name in names)

    def index(self, rank: int, names: Sequence[str]) -> int:
        """Return the place of ``rank`` along the coordinates ``names`` together, the first one outermost."""
        found = 0
        for name in names:
            at = self.names.index(name)
            found = found * self.sizes[at] + rank // math.prod(self.sizes[at + 1 :]) % self.sizes[at]
        return found

    def others(self, rank: int, names: Sequence[str]) -> list[int]:
        """Return the ranks that differ from ``rank`` only in the coordinates ``names``, and ``rank``."""
        fixed = [name for name in self.names if name not in names]
        own = self.index(rank, fixed)
        return [other for other in range(self.count) if self.index(other, fixed) == own]


@dataclass(frozen=True)
class Tile:
    """A tensor of ``shape`` with each dimension cut by the coordinates ``cuts[dim]``, the first outermost.

    A dimension that they do not divide is padded with zeros, which are in no state dict. The parts of the
    first dimension have a multiple of ``unit`` elements. ``transposed``: parts of a matrix (out, in) are
    stored as (in, out). Ranks that differ only in other coordinates have the same part.
    """

    places: Places
    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    unit: int = 1
    transposed: bool = False

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of a part as it is stored."""
        sizes = self._piece_sizes()
        return sizes[::-1] if self.transposed else sizes

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a contiguous copy of the part of ``whole`` that ``rank`` has.

        Raises:
            ConfigError: ``whole`` has another shape.
        """
        if tuple(whole.shape) != self.shape:
            raise ConfigError(f"this tile cuts a tensor of {self.shape}, but got one of {tuple(whole.shape)}")
        found = whole
        for dim, (size, names) in enumerate(zip(self._piece_sizes(), self.cuts, strict=True)):
            start = min(self.places.index(rank, names) * size, self.shape[dim])
            found = found.narrow(dim, start, min(size, self.shape[dim] - start))
        filled = whole.new_zeros(self._piece_sizes())
        filled[tuple(slice(0, size) for size in found.shape)] = found
        return filled.t().contiguous() if self.transposed else filled

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor from the ``parts`` of all ranks, in rank order."""
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
        """Return whether ``rank`` is the first of the ranks with the same part."""
        cutting = {name for names in self.cuts for name in names}
        return self.places.index(rank, [name for name in self.places.names if name not in cutting]) == 0

    def _piece_sizes(self) -> tuple[int, ...]:
        units = (self.unit, *(1,) * (len(self.shape) - 1))
        return tuple(
            -(-size // (self.places.size(names) * unit)) * unit
            for size, names, unit in zip(self.shape, self.cuts, units, strict=True)
        )


@dataclass(frozen=True)
class Spread:
    """How an activation (batch, ..., features) is distributed: ``rows`` are the coordinates that cut its
    batch, ``columns`` those that cut its features.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All coordinates that cut it."""
        return self.rows + self.columns


# By mode: the distribution outside a pair of layers, and inside, between the two layers.
_SPREADS: dict[str, tuple[Spread, Spread]] = {
    "1d": (Spread(), Spread(columns=("tp",))),
    "2d": (Spread(("col",), ("row",)),) * 2,
    "2.5d": (Spread(("dep", "col"), ("row",)),) * 2,
    "3d": (Spread(("weight", "input"), ("output",)), Spread(("weight", "output"), ("input",))),
}


def places_of(layout: Layout) -> Places:
    """Return the grid of the ranks that share the layers."""
    if layout.mode == "2d":
        q = math.isqrt(layout.tp)
        found = Places(("col", "row"), (q, q))
    elif layout.mode == "2.5d":
        depth = layout.depth or 1
        q = math.isqrt(layout.tp // depth)
        found = Places(("dep", "col", "row"), (depth, q, q))
    elif layout.mode == "3d":
        q = round(layout.tp ** (1 / 3))
        found = Places(("weight", "input", "output"), (q, q, q))
    else:
        found = Places(("tp",), (layout.tp,))
    if found.count != layout.tp:
        raise ConfigError(f"{layout}: mode {layout.mode!r} does not work over {layout.tp} processes")
    return found


class Grid:
    """The ranks of the axis ``tp`` of a mesh, in the grid of its mode: 1d, 2d, 2.5d or 3d.

    A coordinate has the name of the groups along it: ``col``, ``row`` and ``dep``; ``input``, ``weight`` and
    ``output``; ``tp``.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        """Collective: all ranks call it. ``mesh``: None for one process."""
        layout = Layout() if mesh is None else mesh.layout
        self.places = places_of(layout)
        self.mode = layout.mode if layout.mode in ("2d", "2.5d", "3d") else "1d"
        self.every = None if mesh is None else mesh.axis("tp")
        self.region = None if self.every is None else Region(self.every)
        self._axes: dict[tuple[str, ...], Axis | None] = {}

    @property
    def rank(self) -> int:
        """The index of this process."""
        return 0 if self.every is None else self.every.rank

    def spread(self, *, inside: bool = False) -> Spread:
        """Return the distribution of activations outside a pair of layers, or inside."""
        return _SPREADS[self.mode][inside]

    def index(self, *names: str) -> int:
        """Return this rank's place along coordinates, the first one outermost."""
        return self.places.index(self.rank, self._known(names))

    def axis(self, *names: str) -> Axis | None:
        """Return the ranks that differ from this one only in these coordinates; None if there are no others.
        All ranks call it in the same order.
        """
        if names not in self._axes:
            self._axes[names] = self._make_axis(self._known(names))
        return self._axes[names]

    @property
    def square(self) -> Square:
        """The ranks of a matrix product in mode 2d or 2.5d."""
        return Square(self.axis("row"), self.axis("col"), self.axis("dep") if self.mode == "2.5d" else None)

    def cube(self, *, inside: bool) -> Cube:
        """Return the ranks of a matrix product in mode 3d; ``inside``: of the second layer of a pair."""
        inputs, outputs = ("output", "input") if inside else ("input", "output")
        return Cube(self.axis(inputs), self.axis("weight"), self.axis(outputs))

    def own_part(self, x: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
        """Return this rank's part of an activation (batch, ..., features) that all ranks have.

        Raises:
            ConfigError: the ranks do not divide its batch or its features.
        """
        spread = self.spread(inside=inside)
        return self._cut(x, (spread.rows, *((),) * (x.dim() - 2), spread.columns))

    def own_batch(self, x: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
        """Return this rank's part of a batch without features (ids, images, labels) that all ranks have.

        Raises:
            ConfigError: the ranks do not divide it.
        """
        return self._cut(x, (self.spread(inside=inside).rows, *((),) * (x.dim() - 1)))

    @torch.no_grad()
    def whole(self, part: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
        """Return the whole activation from the ranks' parts, without a graph. Collective."""
        if self.every is None:
            return part.detach()
        spread = self.spread(inside=inside)
        shape = list(part.shape)
        shape[0] *= self.places.size(spread.rows)
        shape[-1] *= self.places.size(spread.columns)
        cuts = (spread.rows, *((),) * (part.dim() - 2), spread.columns)
        return Tile(self.places, tuple(shape), cuts).whole(self.every.all_gather(part.detach()))

    def share_generator(self, device: torch.device) -> None:
        """Set torch's generators to the states of the first rank, so that all ranks draw the same numbers
        next. Collective.
        """
        if self.every is not None:
            share_generators(self.every, device)

    def _make_axis(self, names: Sequence[str]) -> Axis | None:
        if self.every is None or self.places.size(names) == 1:
            return None
        ranks = self.places.others(self.rank, names)
        return self.every if len(ranks) == self.places.count else self.every.among(ranks, "+".join(names))

    def _cut(self, x: torch.Tensor, cuts: tuple[tuple[str, ...], ...]) -> torch.Tensor:
        for dim, names in enumerate(cuts):
            count = self.places.size(names)
            if x.size(dim) % count:
                raise ConfigError(
                    f"dimension {dim} of {tuple(x.shape)} is not divisible by the {count} ranks along "
                    f"{' and '.join(names)}; use a multiple"
                )
        return Tile(self.places, tuple(x.shape), cuts).part(x, self.rank)

    def _known(self, names: Sequence[str]) -> Sequence[str]:
        for name in names:
            if name not in self.places.names:
                raise ConfigError(
                    f"mode {self.mode!r} has no groups {name!r}; it has {', '.join(self.places.names)}"
                )
        return names

    def __deepcopy__(self, _memo: dict[int, Any]) -> Grid:
        return self  # ranks cannot be copied; a copy of a layer has a part of the same tensor
