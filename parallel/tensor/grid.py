"""The ranks of tensor parallelism as a grid of a mode, and how activations are spread over it."""

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
from gemini.parallel.tensor.tile import Places, Tile


@dataclass(frozen=True)
class Spread:
    """How an activation (batch, ..., features) lies: ``rows`` cut its batch, ``columns`` its features."""

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All coordinates that cut it."""
        return self.rows + self.columns


# By mode: what lies outside of a pair of layers, and inside, between the two.
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
        raise ConfigError(f"{layout}: mode {layout.mode!r} does not go over {layout.tp} processes")
    return found


class Grid:
    """The ranks of the axis ``tp`` of a mesh, in the grid of its mode: 1d, 2d, 2.5d or 3d.

    Coordinates are named by the groups that they are places in: ``col``, ``row`` and ``dep``; ``input``,
    ``weight`` and ``output``; ``tp``.
    """

    def __init__(self, mesh: Mesh | None) -> None:
        """All ranks call this. ``mesh``: None is one process alone."""
        layout = Layout() if mesh is None else mesh.layout
        self.places = places_of(layout)
        self.mode = layout.mode if layout.mode in ("2d", "2.5d", "3d") else "1d"
        self.every = None if mesh is None else mesh.axis("tp")
        self.region = None if self.every is None else Region(self.every)
        self._axes: dict[tuple[str, ...], Axis | None] = {}

    @property
    def rank(self) -> int:
        """Which of the ranks this process is."""
        return 0 if self.every is None else self.every.rank

    def spread(self, *, inside: bool = False) -> Spread:
        """Return how activations lie outside of a pair of layers, or inside."""
        return _SPREADS[self.mode][inside]

    def index(self, *names: str) -> int:
        """Return this rank's place along coordinates, the first one outermost."""
        return self.places.index(self.rank, self._known(names))

    def axis(self, *names: str) -> Axis | None:
        """Return the ranks that differ from this one in these coordinates alone; None: there are no others.
        All ranks call it in the same order."""
        if names not in self._axes:
            self._axes[names] = self._make_axis(self._known(names))
        return self._axes[names]

    @property
    def square(self) -> Square:
        """The ranks of a product in mode 2d or 2.5d."""
        return Square(self.axis("row"), self.axis("col"), self.axis("dep") if self.mode == "2.5d" else None)

    def cube(self, *, inside: bool) -> Cube:
        """Return the ranks of a product in mode 3d; ``inside``: of the second layer of a pair."""
        inputs, outputs = ("output", "input") if inside else ("input", "output")
        return Cube(self.axis(inputs), self.axis("weight"), self.axis(outputs))

    def own_part(self, x: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
        """Return this rank's part of an activation (batch, ..., features) that all ranks have.

        Raises:
            ConfigError: its batch or its features are not divided by the ranks.
        """
        spread = self.spread(inside=inside)
        return self._cut(x, (spread.rows, *((),) * (x.dim() - 2), spread.columns))

    def own_batch(self, x: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
        """Return this rank's part of a batch without features (ids, images, labels) that all ranks have.

        Raises:
            ConfigError: it is not divided by the ranks.
        """
        return self._cut(x, (self.spread(inside=inside).rows, *((),) * (x.dim() - 1)))

    @torch.no_grad()
    def whole(self, part: torch.Tensor, *, inside: bool = False) -> torch.Tensor:
        """Return the activation of which this rank has ``part``, without a graph. All ranks call this."""
        if self.every is None:
            return part.detach()
        spread = self.spread(inside=inside)
        shape = list(part.shape)
        shape[0] *= self.places.size(spread.rows)
        shape[-1] *= self.places.size(spread.columns)
        cuts = (spread.rows, *((),) * (part.dim() - 2), spread.columns)
        return Tile(self.places, tuple(shape), cuts).whole(self.every.all_gather(part.detach()))

    def share_generator(self, device: torch.device) -> None:
        """Give torch's generators here the states of the first rank's: what is drawn next is the same on all
        ranks, which call this together."""
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
                    f"dimension {dim} of {tuple(x.shape)} is not divided by the {count} ranks along "
                    f"{' and '.join(names)}; give a multiple"
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
        return self  # ranks cannot be copied; a copy of a layer has its part of the same tensor
