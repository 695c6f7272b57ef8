"""ColoTensor and ColoParameter: tensors that know how they are distributed, and their specs."""

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
                f"{self}: a tensor is cut along one dimension only; write ShardSpec([-1], "
                "[pg.tp_world_size()])"
            )

    @property
    def dim(self) -> int:
        """The dimension, as it was given."""
        return self.dims[0]


DistSpec = ShardSpec | ReplicaSpec


class ComputePattern(Enum):
    """The mode of tensor parallelism in which a parameter computes. Layers for modes other than TP1D are in
    ``gemini.parallel.tensor.nn``.
    """

    TP1D = "1d"
    TP2D = "2d"
    TP2P5D = "2.5d"
    TP3D = "3d"


@dataclass
class ComputeSpec:
    """How a parameter computes; ``output_replicate``: whether the output of its layer is gathered."""

    compute_pattern: ComputePattern = ComputePattern.TP1D
    output_replicate: bool = True

    def set_output_replicate(self, flag: bool = True) -> None:
        """Set whether every process gets the whole output, or keeps its part for the next layer."""
        self.output_replicate = flag


class ProcessGroup:
    """``tp_degree`` neighbouring processes have the parts of a tensor, and ``dp_degree`` such groups the
    parts of a batch. A missing degree is computed from the number of processes.
    """

    def __init__(self, tp_degree: int | None = None, dp_degree: int | None = None) -> None:
        """Collective. Raises ConfigError if the degrees do not multiply to the number of processes."""
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
                f"ProcessGroup(tp_degree={tp_degree}, dp_degree={dp_degree}) does not fit {world} processes; "
                f"choose {every}"
            )
        tp, dp = fitting[0]  # by default tp = 1: tensors are whole
        self.layout = Layout(dp=dp, tp=tp)
        self._mesh: Mesh | None = None

    @property
    def mesh(self) -> Mesh | None:
        """The mesh; None for one process. The first access is collective."""
        if self._mesh is None and self._started:
            self._mesh = Mesh(self.layout)
        return self._mesh

    @property
    def tp_mesh(self) -> DeviceMesh | None:
        """The processes with the parts of a tensor."""
        return None if self.mesh is None else self.mesh["tp"]

    def tp_world_size(self) -> int:
        """Return the number of parts of a tensor."""
        return self.layout.tp

    def dp_world_size(self) -> int:
        """Return the number of parts of a batch."""
        return self.layout.dp

    def tp_local_rank(self) -> int:
        """Return the index of this process's part of a tensor."""
        return dist.get_rank() % self.layout.tp if self._started else 0

    def dp_local_rank(self) -> int:
        """Return the index of this process's part of a batch."""
        return dist.get_rank() // self.layout.tp if self._started else 0

    def __repr__(self) -> str:
        return f"ProcessGroup(tp_degree={self.layout.tp}, dp_degree={self.layout.dp})"


@dataclass
class ColoTensorSpec:
    """The spec of a tensor: its processes, its distribution, and how it computes."""

    pg: ProcessGroup
    dist_attr: DistSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None


def check_parts(spec: DistSpec, group: ProcessGroup) -> None:
    """Raise ConfigError unless the spec has one part for each process."""
    if isinstance(spec, ShardSpec) and spec.num_partitions[0] != group.tp_world_size():
        raise ConfigError(f"{spec}: {group} cuts a tensor into {group.tp_world_size()} parts")


class ColoTensor(torch.Tensor):
    """A whole tensor with this process's part in ``data``; shapes are those of the part.

    Operators compute with the whole tensor, as DTensor infers, and return ColoTensors. Autograd sees changes
    of the spec as operators. In one process the part is the whole tensor.
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
        """Return a whole tensor with ``tensor`` as this process's part. Gradients flow back to ``tensor``.

        Raises:
            ConfigError: the spec is for another number of processes.
        """
        check_parts(spec.dist_attr, spec.pg)
        held, mesh = tensor, spec.pg.tp_mesh
        if mesh is not None:
            held = DTensor.from_local(tensor, mesh, [_placement(spec.dist_attr, tensor.dim())])
        return cls(held, spec.pg, spec.compute_attr)

    # -- properties ------------------------------------------------------------------------------

    @property
    def dist_spec(self) -> DistSpec:
        """Its distribution."""
        if not isinstance(self._held, DTensor):
            return ReplicaSpec()
        return _spec_of(self._held.placements, self.process_group)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape of this process's part."""
        return self.data.shape

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """This process's part, without a graph."""
        held = self._held.detach()
        return held.to_local() if isinstance(held, DTensor) else held

    def size(self, dim: int | None = None) -> Any:
        """Return the shape of this process's part, or its length along ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def size_global(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self._held.shape

    def dtensor(self) -> torch.Tensor:
        """Return torch's DTensor; in one process the tensor itself."""
        return self._held

    # -- changing the distribution ---------------------------------------------------------------

    def redistribute(self, spec: DistSpec) -> ColoTensor:
        """Return the tensor distributed by ``spec``. Collective, as is its backward. Raises ConfigError if
        the spec is for another number of processes.
        """
        check_parts(spec, self.process_group)
        held = self._held
        if isinstance(held, DTensor):
            held = held.redistribute(placements=[_placement(spec, held.dim())])
        return type(self)(held, self.process_group, self.compute_spec)

    def to_replicate(self) -> ColoTensor:
        """Return the tensor whole on every process. Collective."""
        return self.redistribute(ReplicaSpec())

    def set_dist_spec(self, spec: DistSpec) -> None:
        """Redistribute this tensor in place; raises as :meth:`redistribute`. Collective."""
        self._held = self.redistribute(spec)._held

    def set_process_group(self, group: ProcessGroup) -> None:
        """Set the processes over which it is distributed; allowed only while it is on this one.

        Raises:
            ConfigError: it is distributed over several processes.
        """
        if self.process_group.layout == group.layout:
            return
        if self.process_group.tp_world_size() > 1:
            raise ConfigError(
                f"the tensor is laid out over {self.process_group}; make one over {group} from its whole "
                "value"
            )
        held, mesh = self._held, group.tp_mesh
        whole = held.to_local() if isinstance(held, DTensor) else held
        self._held = whole if mesh is None else DTensor.from_local(whole, mesh, [Replicate()])
        self.process_group = group

    def set_tensor_spec(self, dist_spec: DistSpec, compute_spec: ComputeSpec | None = None) -> None:
        """Set the distribution, and how it computes. Raises as :meth:`redistribute`."""
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
            raise ConfigError(
                f"one operator got tensors over {group} and over {groups[-1]}; make them over one group"
            )
        mesh = group.tp_mesh
        inner_args, inner_kwargs = tree_map(spread, (inner_args, inner_kwargs))
        return tree_map(closed, func(*inner_args, **inner_kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ColoTensor({self.data}, {self.dist_spec})"


def _placement(spec: DistSpec, num_dims: int) -> Placement:
    """Return torch's placement for a spec."""
    if isinstance(spec, ReplicaSpec):
        return Replicate()
    if not -num_dims <= spec.dim < num_dims:
        raise ConfigError(f"{spec}: the tensor has only {num_dims} dimensions")
    return Shard(spec.dim % num_dims)


def _spec_of(placements: Sequence[Placement], group: ProcessGroup) -> DistSpec:
    (placement,) = placements
    if isinstance(placement, Shard):
        return ShardSpec([placement.dim], [group.tp_world_size()])
    return ReplicaSpec()


_RECORDS = ("process_group", "recorded_spec", "compute_spec")


class ColoParameter(ColoTensor, nn.Parameter):
    """A whole parameter of a model that records how to cut it and how it computes.

    :func:`gemini.parallel.colo.apply_specs`, which ``gemini.parallel.colo.GeminiDDP`` calls, cuts it. Then it
    is a part, and an ordinary parameter.
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
        """The recorded distribution."""
        return self.recorded_spec

    def size_global(self) -> torch.Size:
        """Return the shape of the whole parameter."""
        return self.shape

    def set_process_group(self, group: ProcessGroup) -> None:
        """Record the processes over which to distribute it."""
        self.process_group = group

    def set_dist_spec(self, spec: DistSpec) -> None:
        """Record its distribution. Raises ConfigError if that is for another number of processes."""
        check_parts(spec, self.process_group)
        self.recorded_spec = spec

    def set_tensor_spec(self, dist_spec: DistSpec, compute_spec: ComputeSpec | None = None) -> None:
        """Record its distribution, and how it computes. Raises as :meth:`set_dist_spec`."""
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
    """Convert ``param`` to a ColoParameter in place."""
    param.__class__ = ColoParameter
    assert isinstance(param, ColoParameter)
    param.process_group, param.recorded_spec = group, spec
    param.compute_spec = compute_spec or ComputeSpec()
    return param


def forget(param: nn.Parameter) -> None:
    """Convert a ColoParameter back to an ordinary parameter in place."""
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
    """Parameters created inside the block are on ``device`` and are ColoParameters with these specs. They are
    whole: cutting happens when the model is wrapped.

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
