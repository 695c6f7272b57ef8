"""LazyTensor: a tensor with a shape and a dtype that computes its values only when they are needed.

Operators that a subclass knows return lazy results, or compute only a part. Every other use computes the
values and gets an ordinary tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.utils._pytree import tree_map

from gemini.errors import StateError

Lazy = TypeVar("Lazy", bound="LazyTensor")

_GETTERS = (
    *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_nested", "is_quantized", "is_mkldnn"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
    *("get_device", "is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__"),
)
# Torch functions that need no values, for every tensor.
DESCRIPTION: frozenset[Any] = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _GETTERS),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    )
)


class LazyTensor(torch.Tensor):
    """A tensor without memory.

    ``description``: the torch functions that need no values. ``lost_gradient``: the message of the StateError
    for a gradient that arrives at this tensor itself. That happens if an operator bypassed
    ``__torch_function__``, so that the gradient would get lost.
    """

    description: ClassVar[frozenset[Any]] = DESCRIPTION
    lost_gradient: ClassVar[str]

    _whole: torch.Tensor | None

    @classmethod
    def without_memory(
        cls: type[Lazy], like: torch.Tensor, shape: Sequence[int], *, trains: bool, **options: Any
    ) -> Lazy:
        """Return a lazy tensor of ``shape`` on the device of ``like``. ``options``: dtype, and strides unless
        it is contiguous.
        """
        with PlainTensors():
            made: Lazy = torch.Tensor._make_wrapper_subclass(
                cls, shape, device=like.device, requires_grad=trains, **options
            )
            made._whole = None
            if trains:
                made.register_hook(cls._refuse_gradient)  # type: ignore[no-untyped-call]
        return made

    @classmethod
    def _refuse_gradient(cls, _gradient: torch.Tensor) -> None:
        raise StateError(cls.lost_gradient)

    @abstractmethod
    def compute(self) -> torch.Tensor:
        """Compute and return the values as an ordinary tensor. Raises StateError if they would differ from
        those at the time when the tensor was made.
        """

    @classmethod
    @abstractmethod
    def without_values(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of ``func`` if it does not need all values; else NotImplemented."""

    def whole(self) -> torch.Tensor:
        """Return an ordinary tensor, computed at the first call. Raises like :meth:`compute`."""
        if self._whole is None:
            with PlainTensors():
                trains = self.requires_grad
            with torch.set_grad_enabled(trains):
                self._whole = self.compute()
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in cls.description:
            with PlainTensors():
                return func(*args, **kwargs)
        found = cls.without_values(func, args, kwargs)
        if found is not NotImplemented:
            return found
        args, kwargs = tree_map(_ordinary, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute the values for callers that bypass ``__torch_function__``, such as C++ code. Autograd does
        not record this, so the values are not kept for :meth:`whole`.
        """
        args, kwargs = tree_map(_computed, (tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))


def _ordinary(value: Any) -> Any:
    return value.whole() if isinstance(value, LazyTensor) else value


def _computed(value: Any) -> Any:
    if not isinstance(value, LazyTensor):
        return value
    return value.compute() if value._whole is None else value._whole


def versions_of(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Return the version counters of the inputs of a lazy tensor; -1 for inference tensors, which
    have none.
    """
    with PlainTensors():
        return tuple(-1 if each.is_inference() else each._version for each in tensors)
