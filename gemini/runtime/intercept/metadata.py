"""Which torch functions need no memory of their operands."""

from __future__ import annotations

from typing import Any

import torch

_GETTERS = [
    "shape",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_sparse_csr",
    "is_quantized",
    "is_meta",
    "is_mps",
    "is_mkldnn",
    "is_xpu",
    "is_nested",
    "itemsize",
    "nbytes",
    "name",
    "names",
    "output_nr",
    "retains_grad",
    "_version",
    "_base",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
]
_SETTERS = ["_backward_hooks", "_post_accumulate_grad_hooks", "names"]
_METHODS = [
    "size",
    "dim",
    "stride",
    "numel",
    "nelement",
    "element_size",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "get_device",
    "ndimension",
    "__len__",
    "__hash__",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "retain_grad",
    "is_same_size",
    "has_names",
    "is_set_to",
    "is_inference",
    "__dlpack_device__",
]
_FUNCTIONS = [
    "numel",
    "is_floating_point",
    "is_complex",
    "is_tensor",
    "is_same_size",
    "is_inference",
    "_has_compatible_shallow_copy_type",
    "empty_like",
    "zeros_like",
    "ones_like",
]


def _metadata_functions() -> frozenset[Any]:
    functions: list[Any] = [
        getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)
    ]
    functions += [getattr(torch.Tensor, name).__set__ for name in _SETTERS if hasattr(torch.Tensor, name)]
    functions += [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    functions += [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    return frozenset(functions)


# Answered from the tensor's description: no fetch.
METADATA_FUNCTIONS = _metadata_functions()

# Make another name for the same memory: no fetch, the result is managed too.
ALIASING_FUNCTIONS: frozenset[Any] = frozenset(
    (
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.detach,
        torch.detach,
        torch.Tensor.view_as,
        torch.Tensor.expand_as,
    )
)

# Name a part of the same memory, of which nothing is read; an index only where it is no list of elements.
_VIEWS: frozenset[Any] = frozenset(
    (torch.Tensor.view, torch.Tensor.select, torch.Tensor.narrow, torch.Tensor.__getitem__)
)
_BASIC_INDICES = frozenset((int, slice, type(None), type(...)))


def is_view(func: Any, args: tuple[Any, ...]) -> bool:
    """Say whether ``func(*args)`` reads no element of its operand."""
    if func is not torch.Tensor.__getitem__:
        return func in _VIEWS
    indices = args[1] if type(args[1]) is tuple else args[1:]
    return _BASIC_INDICES.issuperset(map(type, indices))
