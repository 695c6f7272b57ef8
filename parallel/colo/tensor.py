"""ColoTensor and ColoParameter: tensors that know how they are distributed, and the specs that say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_map

from gemini.errors import ConfigError
from gemini.parallel.layout import Layout
from gemini.parallel.mesh import Mesh
from gemini.system.device import resolve_device


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


class ColoTensor(torch.Tensor):
    """A whole tensor whose part here is ``data``; shapes are those of the part.

    Operators compute with the whole tensor, as DTensor infers them, and give ColoTensors. Changes of its spec
    are operators that autograd knows. In one process it is the whole.
    """

    _held: torch.Tensor  # a DTensor, or in one process the tensor itself
    process_group: ProcessGroup
    compute_spec: ComputeSpec | None

    @staticmethod
    def __new__(cls, *_args: Any) -> Any:
        """Use :meth:`from_torch_tensor`."""
        return torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu", dtype=torch.float32))

    def __init__(self, held: torch.Tensor, group: ProcessGroup, compute: ComputeSpec | None = None) -> None:
        super().__init__()
        if isinstance(held, DTensor) and any(placement.is_partial() for placement in held.placements):
            held = held.redistribute(placements=[Replicate()])
        self._held, self.process_group, self.compute_spec = held, group, compute

    @classmethod
    def from_torch_tensor(cls, tensor: torch.Tensor, spec: ColoTensorSpec) -> ColoTensor:
        """Return the whole tensor of which ``tensor`` is the part of this process. Gradients reach it.

        Raises:
            ConfigError: the spec is for another number of processes.
        """
        check_parts(spec.dist_attr, spec.pg)
        held, mesh = tensor, spec.pg.tp_mesh
        if mesh is not None:
            held = DTensor.from_local(tensor, mesh, [_placement(spec.dist_attr, tensor.dim())])
        return cls(held, spec.pg, spec.compute_attr)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def dist_spec(self) -> DistSpec:
        """How it lies."""
        if not isinstance(self._held, DTensor):
            return ReplicaSpec()
        return _spec_of(self._held.placements, self.process_group)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of the part here."""
        return self.data.shape

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The part here, without a graph."""
        held = self._held.detach()
        return held.to_local() if isinstance(held, DTensor) else held

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of the part here, or how long it is along ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def size_global(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._held.shape

    def dtensor(self) -> torch.Tensor:
        """Return it as torch's DTensor, in one process as it is."""
        return self._held

    # -- changing how it lies --------------------------------------------------------------------

    def redistribute(self, spec: DistSpec) -> ColoTensor:
        """Return it as ``spec`` has it. All processes call this, and its backward. Raises ConfigError where
        the spec is for another number of processes."""
        check_parts(spec, self.process_group)
        held = self._held
        if isinstance(held, DTensor):
            held = held.redistribute(placements=[_placement(spec, held.dim())])
        return type(self)(held, self.process_group, self.compute_spec)

    def to_replicate(self) -> ColoTensor:
        """Return it whole on every process."""
        return self.redistribute(ReplicaSpec())

    def set_dist_spec(self, spec: DistSpec) -> None:
        """Change this tensor itself; raises as :meth:`redistribute`."""
        self._held = self.redistribute(spec)._held

    def set_process_group(self, group: ProcessGroup) -> None:
        """Say among which processes it lies; only while that is this one alone.

        Raises:
            ConfigError: it lies among others.
        """
        if self.process_group.layout == group.layout:
            return
        if self.process_group.tp_world_size() > 1:
            raise ConfigError(
                f"the tensor lies over {self.process_group}; make one over {group} of its whole"
            )
        held, mesh = self._held, group.tp_mesh
        whole = held.to_local() if isinstance(held, DTensor) else held
        self._held = whole if mesh is None else DTensor.from_local(whole, mesh, [Replicate()])
        self.process_group = group

    def set_tensor_spec(self, dist_spec: DistSpec, compute_spec: ComputeSpec | None = None) -> None:
        """Change how it lies, and how it is computed with. Raises as :meth:`redistribute`."""
        self.set_dist_spec(dist_spec)
        self.compute_spec = compute_spec

    # -- operators -------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        groups: list[ProcessGroup] = []

        def opened(value: Any) -> Any:
            if isinstance(value, ColoTensor):
                groups.append(value.process_group)
                return value._held
            return value

        def spread(value: Any) -> Any:
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            return DTensor.from_local(value, mesh, [Replicate()]) if is_plain and mesh is not None else value

        def closed(value: Any) -> Any:
            return ColoTensor(value, group) if isinstance(value, torch.Tensor) else value

        inner_args, inner_kwargs = tree_map(opened, (tuple(args), dict(kwargs or {})))
        group = groups[0]
        if any(other.layout != group.layout for other in groups):
            raise ConfigError(f"tensors over {group} and over {groups[-1]} meet in one operator")
        mesh = group.tp_mesh
        inner_args, inner_kwargs = tree_map(spread, (inner_args, inner_kwargs))
        return tree_map(closed, func(*inner_args, **inner_kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ColoTensor({self.data}, {self.dist_spec})"


def _placement(spec: DistSpec, num_dims: int) -> Placement:
    """Return what torch calls it."""
    if isinstance(spec, ReplicaSpec):
        return Replicate()
    if not -num_dims <= spec.dim < num_dims:
        raise ConfigError(f"{spec}: the tensor has {num_dims} dimensions")
    return Shard(spec.dim % num_dims)


def _spec_of(placements: Sequence[Placement], group: ProcessGroup) -> DistSpec:
    (placement,) = placements
    if isinstance(placement, Shard):
        return ShardSpec([placement.dim], [group.tp_world_size()])
    return ReplicaSpec()


_RECORDS = ("process_group", "recorded_spec", "compute_spec")


class ColoParameter(ColoTensor, nn.Parameter):
    """A whole parameter of a model, and a record of how it is to be cut and computed with.

    Nothing is cut before :func:`gemini.parallel.colo.apply_specs`, which wrapping the model in
    ``gemini.parallel.colo.GeminiDDP`` calls: then it is a part, and an ordinary parameter.
    """

    recorded_spec: DistSpec

    shape = torch.Tensor.shape
    data = torch.Tensor.data
    size = torch.Tensor.size  # type: ignore[assignment]
    __repr__ = nn.Parameter.__repr__
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
        made = (
            nn.Parameter(requires_grad=requires_grad) if data is None else nn.Parameter(data, requires_grad)
        )
        return record(made, ProcessGroup(), ReplicaSpec())

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    @property
    def dist_spec(self) -> DistSpec:
        """How it is to lie."""
        return self.recorded_spec

    def size_global(self) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self.shape

    def set_process_group(self, group: ProcessGroup) -> None:
        """Say among which processes it is to lie."""
        self.process_group = group

    def set_dist_spec(self, spec: DistSpec) -> None:
        """Say how it is to lie. Raises ConfigError where that is for another number of processes."""
        check_parts(spec, self.process_group)
        self.recorded_spec = spec

    def set_tensor_spec(self, dist_spec: DistSpec, compute_spec: ComputeSpec | None = None) -> None:
        """Say how it is to lie, and to be computed with. Raises as :meth:`set_dist_spec`."""
        self.set_dist_spec(dist_spec)
        self.compute_spec = compute_spec or ComputeSpec()

    def __deepcopy__(self, memo: dict[int, Any]) -> ColoParameter:
        if id(self) not in memo:
            values = self.detach().clone(memory_format=torch.preserve_format)
            made = nn.Parameter(values, self.requires_grad)
            memo[id(self)] = record(made, self.process_group, self.recorded_spec, self.compute_spec)
        found: ColoParameter = memo[id(self)]
        return found


def record(
    param: nn.Parameter, group: ProcessGroup, spec: DistSpec, compute_spec: ComputeSpec | None = None
) -> ColoParameter:
    """Make ``param`` itself a ColoParameter."""
    param.__class__ = ColoParameter
    assert isinstance(param, ColoParameter)
    param.process_group, param.recorded_spec = group, spec
    param.compute_spec = compute_spec or ComputeSpec()
    return param


def forget(param: nn.Parameter) -> None:
    """Make a ColoParameter an ordinary parameter."""
    for name in _RECORDS:
        vars(param).pop(name, None)
    param.__class__ = nn.Parameter


@contextmanager
def ColoInitContext(
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    *,
    default_pg: ProcessGroup | None = None,
    default_dist_spec: DistSpec | None = None,
) -> Iterator[None]:
    """Have parameters that are made here lie on ``device`` and be ColoParameters, which begin with these
    records. They are whole: what is to be cut is cut when the model is wrapped.

    Raises:
        ConfigError: the spec is for another number of processes than the group has, or there is no such
            device.
    """
    place = device if device is None or str(device) == "meta" else resolve_device(device)
    group = default_pg or ProcessGroup()
    spec = default_dist_spec or ReplicaSpec()
    check_parts(spec, group)

    def note(_module: nn.Module, _name: str, param: nn.Parameter) -> None:
        if type(param) is nn.Parameter:
            record(param, group, spec)

    before = torch.get_default_dtype()
    handle = register_module_parameter_registration_hook(note)
    try:
        torch.set_default_dtype(dtype or before)
        with torch.device(place) if place is not None else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)
        handle.remove()
