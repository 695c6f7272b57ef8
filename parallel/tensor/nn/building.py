"""Building layers over the ranks of a mesh: which grid they are for, and where in a pair of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch.distributed as dist

from gemini.errors import ConfigError
from gemini.parallel.mesh import Mesh
from gemini.parallel.tensor.grid import Grid


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
