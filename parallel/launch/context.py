"""The context of a run: its configuration, and the groups of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch.distributed as dist

from gemini.errors import ConfigError, StateError
from gemini.parallel.launch.config import Config
from gemini.parallel.launch.group_kinds import AXES, COORDINATES, ParallelMode, key_of
from gemini.parallel.launch.registry import (
    DIST_GROUP_INITIALIZER,
    INITIALIZER_MAPPING,
    ProcessGroupInitializer,
)
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Mesh
from gemini.parallel.tensor.grid import Grid
from gemini.parallel.tensor.nn import over
from gemini.parallel.tensor.nn.grid_layer import begin_model
from gemini.system.device import current_device


@dataclass(frozen=True)
class Group:
    """A group of processes, by global rank."""

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup

    @property
    def place(self) -> int:
        """The index of this process."""
        return self.ranks.index(dist.get_rank())


@dataclass
class _Launch:
    """The state of one launch."""

    config: Config
    layout: Layout
    mesh: Mesh
    grid: Grid
    parallel: Mapping[str, Any] | None  # the entry of the configuration
    world: dist.ProcessGroup | None  # the group of all processes
    groups: dict[str, Group] = field(default_factory=dict)
    own_groups: list[dist.ProcessGroup] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)


class GlobalContext:
    """The run of this process; ``global_context`` is the only instance.

    Groups are selected by :class:`ParallelMode`, or by the text of a program's own kind. Kinds that the
    configuration does not divide have groups of one process.
    """

    def __init__(self) -> None:
        self._run: _Launch | None = None
        self._own_world: dist.ProcessGroup | None = None  # made by launch()

    # -- the launched run ------------------------------------------------------------------------

    @property
    def is_launched(self) -> bool:
        """Whether :func:`launch` was called, without :func:`shutdown` since."""
        return self._run is not None

    @property
    def config(self) -> Config:
        """The configuration; empty before :func:`launch`."""
        return Config() if self._run is None else self._run.config

    @property
    def layout(self) -> Layout:
        """The number of processes for each kind of parallelism."""
        return Layout() if self._run is None else self._run.layout

    @property
    def mesh(self) -> Mesh:
        """The grid of all processes. Raises StateError before :func:`launch`."""
        return self._launched().mesh

    @property
    def grid(self) -> Grid:
        """The ranks of tensor parallelism; ``own_part(x)`` cuts inputs. Raises as :attr:`mesh`."""
        return self._launched().grid

    data_parallel_size = property(lambda self: self.layout.dp)
    pipeline_parallel_size = property(lambda self: self.layout.pp)
    sequence_parallel_size = property(lambda self: self.layout.sp)
    tensor_parallel_size = property(lambda self: self.layout.tp)

    # -- groups ----------------------------------------------------------------------------------

    def get_global_rank(self) -> int:
        """Return the global rank of this process."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def is_initialized(self, mode: Enum | str) -> bool:
        """Return whether this process is in a group of this kind with other processes. For GLOBAL and DATA,
        whether there was a launch.
        """
        if self._run is None:
            return False
        found = self._run.groups.get(key_of(mode))
        is_there_always = key_of(mode) in (ParallelMode.GLOBAL.value, ParallelMode.DATA.value)
        return found is not None and (is_there_always or len(found.ranks) > 1)

    def get_world_size(self, mode: Enum | str) -> int:
        """Return the size of the group. Raises ConfigError if there is no such kind."""
        return len(self.get_ranks_in_group(mode))

    def get_local_rank(self, mode: Enum | str) -> int:
        """Return this process's index in the group. Raises as :meth:`get_world_size`."""
        found = self._find(mode)
        return 0 if found is None else found.place

    def get_ranks_in_group(self, mode: Enum | str) -> list[int]:
        """Return the global ranks in the group, in order. Raises as :meth:`get_world_size`."""
        found = self._find(mode)
        return [self.get_global_rank()] if found is None else list(found.ranks)

    def get_group(self, mode: Enum | str) -> dist.ProcessGroup:
        """Return torch's group.

        Raises:
            ConfigError: there is no such kind, or this process is the only one in it.
        """
        found = self._find(mode)
        if found is None:
            raise ConfigError(f"{mode} has no groups in {self.layout}; call is_initialized({mode}) first")
        return found.handle

    def is_first_rank(self, mode: Enum | str) -> bool:
        """Return whether this process is the first of its group."""
        return self.get_local_rank(mode) == 0

    def is_last_rank(self, mode: Enum | str) -> bool:
        """Return whether this process is the last of its group."""
        return self.get_local_rank(mode) == self.get_world_size(mode) - 1

    def get_prev_global_rank(self, mode: Enum | str) -> int:
        """Return the global rank before this one in its group; the first wraps to the last."""
        return self._neighbour(mode, -1)

    def get_next_global_rank(self, mode: Enum | str) -> int:
        """Return the global rank behind this one in its group; the last wraps to the first."""
        return self._neighbour(mode, 1)

    # -- begin and end ---------------------------------------------------------------------------

    def begin(self, config: Config, *, owns_world: bool) -> None:
        """Create the groups for ``config`` among the processes of torch.distributed. Collective. Groups of an
        earlier run that this one does not use are destroyed. ``owns_world``: the processes were joined for
        this run.

        Raises:
            ConfigError: ``parallel`` is impossible with these processes. Nothing was changed.
        """
        asked, world = config.get("parallel"), dist.group.WORLD
        self._own_world = world if owns_world else self._own_world
        layout, initializer = _read_parallel(config, dist.get_world_size())
        run = self._run
        if run is not None and run.world is world and run.parallel == asked and initializer is None:
            run.config = config
            begin_model()
            return
        self.end()
        with ExitStack() as undo:
            mesh = undo.enter_context(Mesh(layout, device_type=_device_type()))
            run = _Launch(config, layout, mesh, undo.enter_context(over(mesh)), asked, world)
            run.groups = {ParallelMode.GLOBAL.value: _group(world)}
            for mode, axis in AXES.items():
                run.groups[mode.value] = _group(mesh[axis].get_group())
            for mode, (of, coordinate) in COORDINATES.items():
                along = run.grid.axis(coordinate) if layout.tp > 1 and layout.mode == of else None
                if along is not None:
                    run.groups[mode.value] = _group(along.group)
            if initializer is not None:
                _add_own(run, initializer)
            run.stack = undo.pop_all()
        self._run = run

    def end(self, *, and_its_world: bool = False) -> None:
        """Forget the run and destroy its groups; with ``and_its_world`` also the group of all processes, if
        it was joined for a run. Idempotent.
        """
        run, self._run = self._run, None
        if run is not None:
            run.stack.close()
            for group in run.own_groups if run.world is dist.group.WORLD else ():
                dist.destroy_process_group(group)
        if and_its_world and self._own_world is not None:
            if self._own_world is dist.group.WORLD:
                dist.destroy_process_group()
            self._own_world = None

    # -- internal --------------------------------------------------------------------------------

    def _launched(self) -> _Launch:
        if self._run is None:
            raise StateError("no run has been launched; call gemini.parallel.launch.launch(...) first")
        return self._run

    def _find(self, mode: Enum | str) -> Group | None:
        """Return the group of a kind; None if this process is the only one in it."""
        key = key_of(mode)
        groups = {} if self._run is None else self._run.groups
        if key not in groups and key not in {known.value for known in ParallelMode}:
            raise ConfigError(
                f"there are no groups {key!r}; there are {', '.join(groups) or 'none before launch()'}. Make "
                "your own with a ProcessGroupInitializer"
            )
        return groups.get(key)

    def _neighbour(self, mode: Enum | str, distance: int) -> int:
        ranks = self.get_ranks_in_group(mode)
        return ranks[(self.get_local_rank(mode) + distance) % len(ranks)]


# Global: a program and its layers read their groups here without being passed them.
global_context = GlobalContext()


def _read_parallel(config: Config, world_size: int) -> tuple[Layout, ProcessGroupInitializer | None]:
    """Return the layout of ``parallel``, and the initializer if the program has registered its mode."""
    parallel = dict(config.get("parallel") or {})
    tensor = parallel.get("tensor")
    mode = tensor.get("mode") if isinstance(tensor, Mapping) else None
    if not isinstance(tensor, Mapping) or not isinstance(mode, str) or mode not in INITIALIZER_MAPPING:
        return Layout.from_config(parallel, world_size), None
    extra = {key: value for key, value in tensor.items() if key not in ("size", "mode")}
    plain = {**{key: value for key, value in tensor.items() if key == "size"}, "mode": "1d"}
    layout = Layout.from_config({**parallel, "tensor": plain}, world_size)
    cls = DIST_GROUP_INITIALIZER.get_module(INITIALIZER_MAPPING[mode])
    made = cls(dist.get_rank(), world_size, config, layout.dp, layout.pp, layout.tp, **extra)
    if not isinstance(made, ProcessGroupInitializer):
        raise ConfigError(f"{cls.__name__} must be a subclass of ProcessGroupInitializer")
    return layout, made


def _add_own(run: _Launch, initializer: ProcessGroupInitializer) -> None:
    """Create the groups of a program's own kinds."""
    for mode, groups in (initializer.init_parallel_groups() or {}).items():
        key, lists = key_of(mode), [list(ranks) for ranks in groups]
        members = [rank for ranks in lists for rank in ranks]
        world = dist.get_world_size()
        if len(set(members)) != len(members) or not set(members) <= set(range(world)):
            raise ConfigError(
                f"{type(initializer).__name__}: the groups of {key!r} are {lists}; each of the ranks 0 to "
                f"{world - 1} may be in at most one of them"
            )
        for ranks in lists:
            made = dist.new_group(ranks)  # collective over all processes, for every group
            if dist.get_rank() in ranks:
                run.groups[key] = _group(made)
                run.own_groups.append(made)


def _device_type() -> str:
    """Return the device type of tensors in collectives over all processes."""
    taken: Sequence[Any] = dist.group.WORLD._device_types  # type: ignore[union-attr]
    here = current_device().type
    return here if any(device.type == here for device in taken) else "cpu"


def _group(handle: dist.ProcessGroup | None) -> Group:
    assert handle is not None
    return Group(tuple(dist.get_process_group_ranks(handle)), handle)
