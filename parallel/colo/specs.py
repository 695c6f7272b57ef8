"""How a tensor lies among processes, and is computed with: what programs say of tensors and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gemini.errors import ConfigError
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Mesh


@dataclass(frozen=True)
class ReplicaSpec:
    """Every process of tensor parallelism has the whole tensor."""


@dataclass(frozen=True)
class ShardSpec:
    """Every process of tensor parallelism has one of ``num_partitions`` parts along one dimension.

    Raises:
        ConfigError: there is more than one dimension, or none.
    """

    dims: Sequence[int]
    num_partitions: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", tuple(self.dims))
        object.__setattr__(self, "num_partitions", tuple(self.num_partitions))
        if len(self.dims) != 1 or len(self.num_partitions) != 1:
            raise ConfigError(
                f"{self}: a tensor is cut along one dimension; write ShardSpec([-1], [pg.tp_world_size()])"
            )

    @property
    def dim(self) -> int:
        """The dimension, as it was given."""
        return self.dims[0]


DistSpec = ShardSpec | ReplicaSpec


class ComputePattern(Enum):
    """In which mode a parameter is computed with. Layers of the modes but TP1D are those of
    ``gemini.parallel.tensor.nn``."""

    TP1D = "1d"
    TP2D = "2d"
    TP2P5D = "2.5d"
    TP3D = "3d"


@dataclass
class ComputeSpec:
    """How a parameter is computed with; ``output_replicate``: what a layer makes of it is put together."""

    compute_pattern: ComputePattern = ComputePattern.TP1D
    output_replicate: bool = True

    def set_output_replicate(self, flag: bool = True) -> None:
        """Say whether every process gets the whole output, or keeps its part for the next layer."""
        self.output_replicate = flag


class ProcessGroup:
    """``tp_degree`` neighbouring processes have the parts of a tensor, ``dp_degree`` such groups the parts of
    a batch; what is left out is the rest."""

    def __init__(self, tp_degree: int | None = None, dp_degree: int | None = None) -> None:
        """All processes call this. Raises ConfigError where the degrees do not make the number of them."""
        self._started = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if self._started else 1
        fitting = [
            (tp, world // tp)
            for tp in range(1, world + 1)
            if world % tp == 0 and tp_degree in (None, tp) and dp_degree in (None, world // tp)
        ]
        if not fitting:
            every = ", ".join(f"tp {n} x dp {world // n}" for n in range(1, world + 1) if world % n == 0)
            raise ConfigError(
                f"ProcessGroup(tp_degree={tp_degree}, dp_degree={dp_degree}) over {world} processes; it may "
                f"be {every}"
            )
        tp, dp = fitting[0]  # where nothing is said, one part of each tensor
        self.layout = Layout(dp=dp, tp=tp)
        self._mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The mesh, made when it is first used, by all processes; None for one process alone."""
        if self._mesh is None and self._started:
            self._mesh = Mesh(self.layout)
        return self._mesh

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The processes that have the parts of a tensor."""
        return None if self.mesh is None else self.mesh["tp"]

    def tp_world_size(self) -> int:
        """How many parts there are of a tensor."""
        return self.layout.tp

    def dp_world_size(self) -> int:
        """How many parts there are of a batch."""
        return self.layout.dp

    def tp_local_rank(self) -> int:
        """Which part of a tensor is here."""
        return dist.get_rank() % self.layout.tp if self._started else 0

    def dp_local_rank(self) -> int:
        """Which part of a batch is here."""
        return dist.get_rank() // self.layout.tp if self._started else 0

    def __repr__(self) -> str:
        return f"ProcessGroup(tp_degree={self.layout.tp}, dp_degree={self.layout.dp})"


@dataclass
class ColoTensorSpec:
    """What is said of a tensor: among which processes, how it lies there, how it is computed with."""

    pg: ProcessGroup
    dist_attr: DistSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None


def check_parts(spec: DistSpec, group: ProcessGroup) -> None:
    """Raise ConfigError unless there is a part for each process."""
    if isinstance(spec, ShardSpec) and spec.num_partitions[0] != group.tp_world_size():
        raise ConfigError(f"{spec}: {group} has {group.tp_world_size()} parts of a tensor")
