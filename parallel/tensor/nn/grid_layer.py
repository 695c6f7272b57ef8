"""What the layers of this package share: which grid they are built for and where in a pair of layers,
parameters of which this rank has its tile, and what a model of them has on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis, Mesh
from gemini.parallel.partition import Partition
from gemini.parallel.tensor.grid import Grid, Spread, Tile
from gemini.parallel.tensor.region import copy


@dataclass
class Building:
    """The layers that are built within one ``over``: their grid, whether what is built next begins between
    the two Linear of a pair, and whether the scores for a loss lie there."""

    grid: Grid
    inside: bool = False
    scores_inside: bool = False
    gathers_again: bool = False

    def go_on(self, *, inside: bool) -> None:
        """What is built next begins between the two Linear of a pair, or not."""
        self.inside = self.scores_inside = inside

    def end(self, *, scores_inside: bool) -> None:
        """A head was built: what is built next is another head or another model, and begins outside."""
        self.inside, self.scores_inside = False, scores_inside

    def place(self, inside: bool | None) -> bool:
        """Return where a layer's input lies, if ``inside`` leaves it open."""
        return self.inside if inside is None else inside


_CURRENT: ContextVar[Building | None] = ContextVar("gemini_building", default=None)


@contextmanager
def over(mesh: Mesh | None, *, gathers_again: bool = False) -> Iterator[Grid]:
    """Have layers of this package that are built here lie over the ranks of ``tp`` of a mesh, in its mode.

    All ranks of it build the same layers in the same order. Yields the grid, which cuts inputs.

    Args:
        mesh: None builds whole layers, as one process has them.
        gathers_again: in mode 3d backward puts tiles together again, and keeps tiles alone: less memory and,
            where X, W and Y are equally large, 8 / 6 of the bytes.
    """
    building = Building(Grid(mesh), gathers_again=gathers_again)
    token = _CURRENT.set(building)
    try:
        yield building.grid
    finally:
        _CURRENT.reset(token)


def begin_model() -> None:
    """Have what is built next be a model of its own, which begins outside."""
    building = _CURRENT.get()
    if building is not None:
        building.go_on(inside=False)


def current_building(mode: str | None) -> Building:
    """Return what a layer is built in; in one process, without ``over``, the layer is whole.

    Raises:
        ConfigError: there are several processes and no ``over``, or the layer is for another ``mode``.
    """
    building = _CURRENT.get()
    if building is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "over which ranks is this layer to be? build the model within `with over(mesh):`, "
                "mesh = Mesh(Layout(tp=4, mode='2d')) for example (gemini.parallel.tensor.nn)"
            )
        building = Building(Grid(None))
    if mode is not None and building.grid.every is not None and building.grid.mode != mode:
        raise ConfigError(f"this layer is for mode {mode!r}, and the mesh is for {building.grid.mode!r}")
    return building


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


def partition_of(model: nn.Module) -> Partition:
    """Return which parts of which tensors the parameters of ``model`` are; all ranks call this, before it is
    wrapped: ``GeminiDDP(model, process_group=mesh["dp"], model_ranks=partition_of(model).model_ranks)``.

    In mode 1d parameters of other layers are whole on all ranks, and the first one's values are taken.

    Raises:
        ConfigError: there are no such layers, those of several grids, or in the modes but 1d parameters of
            other layers, whose gradients would be those of this rank's part of the batch.
    """
    layers = [module for module in model.modules() if isinstance(module, GridLayer)]
    grids = list({id(layer.grid): layer.grid for layer in layers if layer.grid.every is not None}.values())
    if not layers or len(grids) > 1:
        raise ConfigError(
            f"{type(model).__name__} has layers of {len(grids)} grids; build it of "
            "gemini.parallel.tensor.nn within one `with over(mesh):`"
        )
    names = dict(model.named_parameters(remove_duplicate=False))
    if not grids:
        return Partition(None, names)
    every = grids[0].every
    assert every is not None
    partition = Partition(every, names)
    for layer in layers:
        for key, tile in layer.tiles.items():
            partition.note(layer.get_parameter(key), tile)
    others = {name: param for name, param in names.items() if partition.cut_of(param) is None}
    if others and grids[0].mode != "1d":
        raise ConfigError(
            f"{next(iter(others))!r} and {len(others) - 1} more parameters are of layers that know no ranks, "
            f"and in mode {grids[0].mode!r} a rank has a part of the batch: take Linear, LayerNorm, "
            "Embedding, PatchEmbedding or Classifier of gemini.parallel.tensor.nn for them"
        )
    _take_first(every, others, model)
    return partition


def partition_along(model: nn.Module, axis: Axis | None) -> Partition:
    """Return the same of a model that may have no such layers, whose parameters all ranks of ``axis`` then
    have whole: the first one's values are taken."""
    if any(isinstance(module, GridLayer) for module in model.modules()):
        return partition_of(model)
    names = dict(model.named_parameters(remove_duplicate=False))
    if axis is not None:
        _take_first(axis, names, model)
    return Partition(axis, names)


def _take_first(every: Axis, others: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Give all ranks the first one's values of what is whole on each."""
    for param in {id(param): param for param in others.values()}.values():
        if not param.is_meta:
            every.broadcast(param.data)
    for buffer in model.buffers():
        if not buffer.is_meta:
            every.broadcast(buffer)
