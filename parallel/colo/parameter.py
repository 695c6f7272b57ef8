"""ColoParameter: a parameter of a model that records how it is to lie, and the context that makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gemini.parallel.colo.specs import (
    ComputeSpec,
    DistSpec,
    ProcessGroup,
    ReplicaSpec,
    check_parts,
)
from gemini.parallel.colo.tensor import ColoTensor
from gemini.system.device import resolve_device

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
