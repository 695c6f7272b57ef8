"""ColoTensor: a tensor of which each process of tensor parallelism has a part. It holds a DTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_map

from gemini.errors import ConfigError
from gemini.parallel.colo.specs import (
    ColoTensorSpec,
    ComputeSpec,
    DistSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    check_parts,
)


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
