"""GridLayer, the base of the layers over a grid: the grid that a layer is built for, its place in a pair of
layers, its parameters (this rank's tiles), and the partition of a model of such layers.
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
    """The state of building layers inside one ``over``: the grid; whether the next layer begins inside a
    pair, between its two Linear layers; and whether the scores for a loss are inside.
    """

    grid: Grid
    inside: bool = False
    scores_inside: bool = False
    gathers_again: bool = False

    def go_on(self, *, inside: bool) -> None:
        """Set whether the next layer begins inside a pair."""
        self.inside = self.scores_inside = inside

    def end(self, *, scores_inside: bool) -> None:
        """A head was built: the next layer is another head or begins another model, outside."""
        self.inside, self.scores_inside = False, scores_inside

    def place(self, inside: bool | None) -> bool:
        """Return whether a layer's input is inside; ``inside=None`` takes the current state."""
        return self.inside if inside is None else inside


_CURRENT: ContextVar[Building | None] = ContextVar("gemini_building", default=None)


@contextmanager
def over(mesh: Mesh | None, *, gathers_again: bool = False) -> Iterator[Grid]:
    """Build the layers of this package over the ranks of ``tp`` of a mesh, in its mode, inside the block. All
    its ranks must build the same layers in the same order. Yields the grid, which cuts inputs.

    Args:
        mesh: None builds whole layers, as in one process.
        gathers_again: in mode 3d, keep only tiles for backward and gather them again there. This takes less
            memory and, if X, W and Y have equal sizes, 8 / 6 of the bytes.
    """
    building = Building(Grid(mesh), gathers_again=gathers_again)
    token = _CURRENT.set(building)
    try:
        yield building.grid
    finally:
        _CURRENT.reset(token)


def begin_model() -> None:
    """Begin a new model, outside of pairs."""
    building = _CURRENT.get()
    if building is not None:
        building.go_on(inside=False)


def current_building(mode: str | None) -> Building:
    """Return the state for building a layer; in one process, without ``over``, the layer is whole.

    Raises:
        ConfigError: there are several processes and no ``over``, or the layer is for another ``mode``.
    """
    building = _CURRENT.get()
    if building is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "this layer does not know its ranks; build the model within `with over(mesh):`, for example "
                "mesh = Mesh(Layout(tp=4, mode='2d')) (gemini.parallel.tensor.nn)"
            )
        building = Building(Grid(None))
    if mode is not None and building.grid.every is not None and building.grid.mode != mode:
        raise ConfigError(f"this layer is for mode {mode!r}, but the mesh is for {building.grid.mode!r}")
    return building


class GridLayer(nn.Module):
    """A layer over the ranks of a grid. Its whole tensors have the names and the initial bits of one process:
    ``reset_parameters`` draws them whole on every rank, and keeps this rank's tiles.
    """

    mode: ClassVar[str | None] = None  # the only mode of a subclass; None: any
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.building: Building = current_building(self.mode)
        self.grid: Grid = self.building.grid
        self.tiles: dict[str, Tile] = {}

    def draw(self, device: torch.device) -> Mapping[str, torch.Tensor | None]:
        """Return the layer's whole initial tensors, drawn on ``device`` as in one process."""
        raise NotImplementedError

    def add_parameter(
        self, name: str, tile: Tile | None, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """Register this rank's tile of a tensor, without values; None registers no parameter."""
        if tile is None:
            self.register_parameter(name, None)
            return
        self.tiles[name] = tile
        self.register_parameter(name, nn.Parameter(torch.empty(tile.part_shape, device=device, dtype=dtype)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial values. Collective. On ``meta`` nothing is drawn."""
        params = {name: param for name, param in self.named_parameters(recurse=False) if name in self.tiles}
        if not params or any(param.is_meta for param in params.values()):
            return
        device = next(iter(params.values())).device
        self.grid.share_generator(device)
        for name, whole in self.draw(device).items():
            if whole is not None and name in params:
                params[name].copy_(self.tiles[name].part(whole, self.grid.rank))

    def summed(self, name: str, spread: Spread) -> torch.Tensor | None:
        """Return a parameter for use in a layer; None if there is none. If ranks use the same tile for
        different rows of ``spread``, its gradient is summed over them.
        """
        param: torch.Tensor | None = getattr(self, name)
        if param is None:
            return None
        cutting = {other for names in self.tiles[name].cuts for other in names}
        axis = self.grid.axis(*(other for other in spread.names if other not in cutting))
        # A clone: for a managed parameter autograd would keep a view, and no operator would use it again.
        return param if axis is None else copy(param.clone(), axis)


def divided(grid: Grid, what: str, size: int, names: tuple[str, ...]) -> None:
    """Raise ConfigError unless the ranks along ``names`` divide ``size``."""
    count = grid.places.size(names)
    if size % count:
        raise ConfigError(
            f"{what} {size} is not divisible by {count} ranks (along {' and '.join(names)}); use "
            f"{size // count * count} or {(size // count + 1) * count}"
        )


def embedding_cuts(grid: Grid) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the coordinates that cut the rows and the columns of an embedding's weight."""
    if grid.mode == "1d":
        return ("tp",), ()
    columns = grid.spread().columns
    return (("input", "weight") if grid.mode == "3d" else ("col",)), columns


def partition_of(model: nn.Module) -> Partition:
    """Return the partition of a model of these layers. Collective; call it before the model is wrapped:
    ``GeminiDDP(model, process_group=mesh["dp"], model_ranks=partition_of(model).model_ranks)``.

    In mode 1d, parameters of other layers are whole on all ranks and get the first rank's values.

    Raises:
        ConfigError: the model has no such layers, layers of several grids, or, in modes other than 1d,
            parameters of other layers. Their gradients would be those of this rank's part of the batch.
    """
    layers = [module for module in model.modules() if isinstance(module, GridLayer)]
    grids = list({id(layer.grid): layer.grid for layer in layers if layer.grid.every is not None}.values())
    if not layers or len(grids) > 1:
        raise ConfigError(
            f"{type(model).__name__} has layers of {len(grids)} grids, but must have those of one; build it "
            "from gemini.parallel.tensor.nn within one `with over(mesh):`"
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
            f"{next(iter(others))!r} and {len(others) - 1} more parameters belong to ordinary layers, but in "
            f"mode {grids[0].mode!r} each rank has only a part of the batch, so their gradients would "
            "differ; use Linear, LayerNorm, Embedding, PatchEmbedding or Classifier of "
            "gemini.parallel.tensor.nn instead"
        )
    _broadcast_first(every, others, model)
    return partition


def partition_along(model: nn.Module, axis: Axis | None) -> Partition:
    """Return the partition of a model that may have no such layers. Then its parameters are whole on all
    ranks of ``axis``, with the values of the first rank. Collective.
    """
    if any(isinstance(module, GridLayer) for module in model.modules()):
        return partition_of(model)
    names = dict(model.named_parameters(remove_duplicate=False))
    if axis is not None:
        _broadcast_first(axis, names, model)
    return Partition(axis, names)


def _broadcast_first(every: Axis, others: dict[str, nn.Parameter], model: nn.Module) -> None:
    """Broadcast the first rank's values of parameters and buffers that are whole on each rank."""
    for param in {id(param): param for param in others.values()}.values():
        if not param.is_meta:
            every.broadcast(param.data)
    for buffer in model.buffers():
        if not buffer.is_meta:
            every.broadcast(buffer)
