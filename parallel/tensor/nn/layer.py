"""What the layers of this package share: parameters of which this rank has its tile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.tensor.collectives import copy
from gemini.parallel.tensor.grid import Grid, Spread
from gemini.parallel.tensor.nn.building import Building, current_building
from gemini.parallel.tensor.tile import Tile


class GridLayer(nn.Module):
    """A layer over the ranks of a grid. Its whole tensors are those of one process, by name and by bits:
    ``reset_parameters`` draws them whole on every rank, and keeps this rank's tiles."""

    mode: ClassVar[str | None] = None  # the only one that a layer is for
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.building: Building = current_building(self.mode)
        self.grid: Grid = self.building.grid
        self.tiles: dict[str, Tile] = {}

    def draw(self, device: torch.device) -> Mapping[str, torch.Tensor | None]:
        """Return the layer's whole tensors as one process would begin with, drawn on ``device``."""
        raise NotImplementedError

    def add_parameter(
        self, name: str, tile: Tile | None, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Register this rank's tile of a tensor, without values; None: there is no such parameter."""
        if tile is None:
            self.register_parameter(name, None)
            return
        self.tiles[name] = tile
        self.register_parameter(name, nn.Parameter(torch.empty(tile.part_shape, device=device, dtype=dtype)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin again; all ranks call this. On ``meta`` nothing is drawn."""
        params = {name: param for name, param in self.named_parameters(recurse=False) if name in self.tiles}
        if not params or any(param.is_meta for param in params.values()):
            return
        device = next(iter(params.values())).device
        self.grid.share_generator(device)
        for name, whole in self.draw(device).items():
            if whole is not None and name in params:
                params[name].copy_(self.tiles[name].part(whole, self.grid.rank))

    def summed(self, name: str, spread: Spread) -> torch.Tensor | None:
        """Return a parameter as ranks use it that have the same part of it for other rows of ``spread``: its
        gradient is summed over them. None where there is no such parameter."""
        param: torch.Tensor | None = getattr(self, name)
        if param is None:
            return None
        cutting = {other for names in self.tiles[name].cuts for other in names}
        axis = self.grid.axis(*(other for other in spread.names if other not in cutting))
        # A clone: of a managed parameter autograd would keep a view, and no operator goes on with it.
        return param if axis is None else copy(param.clone(), axis)


def divided(grid: Grid, what: str, size: int, names: tuple[str, ...]) -> None:
    """Raise ConfigError unless the ranks along ``names`` divide ``size``."""
    count = grid.places.size(names)
    if size % count:
        raise ConfigError(
            f"{what} {size} is not divided by {count} ranks (along {' and '.join(names)}); "
            f"{size // count * count} and {(size // count + 1) * count} would be"
        )


def embedding_cuts(grid: Grid) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what cuts the rows and the columns of an embedding's weight."""
    if grid.mode == "1d":
        return ("tp",), ()
    columns = grid.spread().columns
    return (("input", "weight") if grid.mode == "3d" else ("col",)), columns
