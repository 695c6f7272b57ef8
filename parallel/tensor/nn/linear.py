"""Linear over a grid: a column or row of ranks in mode 1d, SUMMA in 2d and 2.5d, a cube in 3d."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.grid import Tile
from gemini.parallel.tensor.nn.grid_layer import GridLayer, divided, embedding_cuts
from gemini.parallel.tensor.products import multiply_on_cube, multiply_on_square
from gemini.parallel.tensor.region import copy, reduce


class Linear(GridLayer):
    """``x W^T + b`` as nn.Linear, in every mode.

    Linear layers come in pairs. The input of the first is outside and its output inside the pair: there each
    rank has a part of the features in mode 1d, and coordinates are swapped in 3d. The output of the second is
    outside again. ``inside`` tells whether the input is inside; None: layers alternate in the order in which
    they are built. In modes other than 1d the weight is stored as (in, out).
    """

    side: ClassVar[bool | None] = None  # where the input is, for a class with a fixed side

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        inside: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        _weight: nn.Parameter | None = None,
    ) -> None:
        """Raises ConfigError if the ranks do not divide the features."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._place(self.side if inside is None else inside)
        divided(self.grid, "in_features", in_features, self.input_spread.columns)
        weight, of_bias = self._tiles()
        self._refuse_filling(weight)
        if _weight is None:
            self.add_parameter("weight", weight, device, dtype)
        else:
            self._refuse_other(_weight)
            self.weight = _weight
        self.add_parameter("bias", of_bias if bias else None, device, dtype)
        self.reset_parameters()
        self.building.go_on(inside=not self.inside)

    def _place(self, inside: bool | None) -> None:
        self.inside = self.building.place(inside)
        self.input_spread = self.grid.spread(inside=self.inside)
        self.output_spread = self.grid.spread(inside=not self.inside)

    def _tiles(self) -> tuple[Tile, Tile]:
        """Return the tiles of weight and bias."""
        places, shape = self.grid.places, (self.out_features, self.in_features)
        incoming, outgoing, unit = self.input_spread.columns, self.output_spread.columns, 1
        cuts = (outgoing, incoming)
        if self.grid.mode in ("2d", "2.5d"):
            cuts = (outgoing, ("col",))
        elif self.grid.mode == "3d":  # the weight is gathered before it is used
            cuts, unit = ((*outgoing, "weight"), incoming), places.size(("weight",))
        weight = Tile(places, shape, cuts, transposed=self.grid.mode != "1d")
        return weight, Tile(places, shape[:1], (outgoing,), unit)

    def _refuse_filling(self, weight: Tile) -> None:
        divided(self.grid, "out_features", self.out_features, weight.cuts[0])

    def _refuse_other(self, weight: nn.Parameter) -> None:
        """Raise ConfigError unless ``weight`` has the tile shape of an embedding of these features."""
        lies = Tile(
            self.grid.places, (self.out_features, self.in_features), embedding_cuts(self.grid)
        ).part_shape
        if self.inside or tuple(weight.shape) != lies:
            sizes = f"{self.out_features}, {self.in_features}"
            raise ConfigError(
                f"{self} is tied to the weight of an Embedding({sizes}), so it needs a weight of {lies} on "
                f"each rank and inside=False; this weight has {tuple(weight.shape)}"
            )

    def draw(self, device: torch.device) -> Mapping[str, torch.Tensor | None]:
        has_bias = self._parameters.get("bias") is not None
        whole = nn.Linear(
            self.in_features, self.out_features, has_bias, device=device, dtype=self.weight.dtype
        )
        return {"weight": whole.weight, "bias": whole.bias}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output for its part of the input (batch, ..., features).

        Raises:
            ConfigError: ``x`` is not this rank's part of the input.
        """
        local = self.in_features // self.grid.places.size(self.input_spread.columns)
        if x.size(-1) != local:
            raise ConfigError(
                f"{self} takes {local} of {self.in_features} features on each rank, but its input has "
                f"{x.size(-1)}; cut inputs with the grid's own_part(), and set inside=False for the first "
                "and inside=True for the second of two layers that belong together but were not built one "
                "after the other"
            )
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        bias = self.summed("bias", self.output_spread)
        if self.grid.every is None:
            return functional.linear(x, weight, bias)
        out = self._product(x, weight, self.grid.every)
        return out if bias is None else out + bias

    def _product(self, x: torch.Tensor, weight: torch.Tensor, every: Axis) -> torch.Tensor:
        if self.grid.mode == "1d":
            return (
                reduce(functional.linear(x, weight), every)
                if self.inside
                else functional.linear(copy(x, every), weight)
            )
        if self.grid.mode == "3d":
            cube = self.grid.cube(inside=self.inside)
            again = self.building.gathers_again
            return multiply_on_cube(x, weight, cube, transposes=self.is_tied, gathers_again=again)
        rows = x.reshape(-1, x.size(-1))
        out = multiply_on_square(rows, weight, self.grid.square, transposes=self.is_tied)
        return out.view(*x.shape[:-1], out.size(-1))

    @property
    def is_tied(self) -> bool:
        """Whether the weight belongs to an embedding, which stores it as (out, in)."""
        return "weight" not in self.tiles

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, mode={self.grid.mode!r}, inside={self.inside}"


class Classifier(Linear):
    """A head with any number of classes. A rank's scores are a part, which :class:`CrossEntropyLoss` takes;
    classes that pad the last parts score minus infinity. With the ``weight`` of an :class:`Embedding` it is
    tied to it, and its input is outside.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        weight: nn.Parameter | None = None,
        bias: bool = True,
        *,
        inside: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises ConfigError if the ranks do not divide the features, or ``weight`` has another shape."""
        super().__init__(
            in_features, num_classes, bias, inside=inside, device=device, dtype=dtype, _weight=weight
        )
        self.num_classes = num_classes
        self.building.end(scores_inside=not self.inside)

    def _refuse_filling(self, weight: Tile) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the scores. Raises as :class:`Linear`."""
        out = super().forward(x)
        first = self.grid.index(*self.output_spread.columns) * out.size(-1)
        own = min(max(self.num_classes - first, 0), out.size(-1))
        if own == out.size(-1):
            return out
        return functional.pad(out[..., :own], (0, out.size(-1) - own), value=-torch.inf)

    @torch.no_grad()
    def whole_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of all classes and rows from the ranks' parts, without a graph. Collective."""
        return self.grid.whole(scores, inside=not self.inside)[..., : self.num_classes]
