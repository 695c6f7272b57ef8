"""Torch functions on managed tensors that are not operators: those that read no memory of their operands, and
those that refer to a tensor rather than its values, like ``.grad``, ``.data`` and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch.autograd.graph import get_gradient_edge

from gemini.errors import ConfigError
from gemini.runtime.gate.gradients import Slot
from gemini.runtime.intercept import raw_access
from gemini.system.lazy_tensor import DESCRIPTION


def _slot_of(tensor: Any) -> Slot | None:
    """Return the slot of a managed parameter; None if ``tensor`` is a view of one."""
    slot: Slot | None = getattr(tensor, "_slot", None)
    return slot


def _is_managed(tensor: Any) -> bool:
    return hasattr(tensor, "_ref")


def _grad_of(param: Any) -> torch.Tensor | None:
    slot = _slot_of(param)
    if slot is not None:
        return slot.grad.alias() if slot.grad is not None else None
    with PlainTensors():
        grad: torch.Tensor | None = param.grad
        return grad


def _set_grad(param: Any, grad: torch.Tensor | None) -> None:
    slot = _slot_of(param)
    if slot is None:
        with PlainTensors():
            # Nn.Parameter(weight.detach()) has a gradient of its own.
            if param.requires_grad and param.is_leaf:
                param.grad = grad
                return
        raise ConfigError(
            "assigning .grad to a view of a managed parameter has no effect; assign it to the parameter"
        )
    if grad is None:
        slot.free_grad()
    else:
        slot.trainable_grad.assign(grad)


def set_data(tensor: Any, value: torch.Tensor) -> None:
    """Implement ``param.data = value`` by copying the values into the chunk: a window's address never
    changes."""
    for what in ("shape", "dtype", "device"):
        if getattr(value, what) != getattr(tensor, what):
            raise ConfigError(
                f"a managed tensor of {what} {getattr(tensor, what)} cannot take data of {what} "
                f"{getattr(value, what)}: its memory is laid out when the model is wrapped; change "
                "it before wrapping, or change an ordinary copy (copy.deepcopy(module)) and wrap that"
            )
    with PlainTensors():
        if value.data_ptr() == tensor.data_ptr() and value.stride() == tensor.stride():
            return  # module.to("cpu") does this: nothing to write
    if _is_managed(value):
        raise ConfigError(
            "param.data = other would make two managed tensors share memory, but each has its own place in a "
            "chunk; copy the values with param.copy_(other) under torch.no_grad(), or tie parameters "
            "before wrapping: layer.weight = other_layer.weight"
        )
    with torch.no_grad():
        tensor.copy_(value)


def set_memory(tensor: Any, *source: Any, **options: Any) -> Any:
    """Implement ``param.set_(other)`` by copying the values into the chunk, as :func:`set_data`. A method of
    the classes, because torch does not dispatch ``set_`` to ``__torch_function__``."""
    if options or len(source) != 1 or not isinstance(source[0], torch.Tensor):
        return _refuse("set_")(tensor)
    set_data(tensor, source[0])
    return tensor


def write_items(tensor: Any) -> Callable[..., Any]:
    """The property ``__create_write_items__``, which ``torch.distributed.checkpoint.save`` looks up on
    tensors. Over ranks it raises ConfigError: each rank would save some tensors and wait for the others to
    read them too. Otherwise the attribute is absent, and the tensor is saved like any other."""
    if not tensor._ref.manager.gathers:
        raise AttributeError("__create_write_items__")
    raise ConfigError(
        "torch.distributed.checkpoint.save makes each rank read some weights alone, but all ranks "
        "must read weights of a managed module together: give it get_model_state_dict(model) of "
        "torch.distributed.checkpoint.state_dict, or gemini.handle_of(model).state_dict()"
    )


def _require_grad(tensor: Any, requires_grad: bool = True) -> Any:
    """Implement ``param.requires_grad = ...``. A parameter that was frozen when it was wrapped gets a
    gradient chunk."""
    slot = _slot_of(tensor)
    growth = tensor._ref.manager.growth if slot is not None else None
    if requires_grad and growth is not None:
        growth.unfreeze(tensor)
        return tensor
    with PlainTensors():
        return tensor.requires_grad_(requires_grad)


def _set_requires_grad(tensor: Any, requires_grad: bool) -> None:
    _require_grad(tensor, requires_grad)


def _gradients(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    inputs: torch.Tensor | Sequence[torch.Tensor],
    *args: Any,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Implement ``torch.autograd.grad``: its inputs name places in the graph; they are not operands and need
    no memory."""
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if materialize_grads:
        options["allow_unused"] = True
    edges: Any = [get_gradient_edge(t) if _is_managed(t) else t for t in inputs]
    found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(_copied(outputs), edges, *args, **options)
    if not materialize_grads:
        return found
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True))


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Implement ``tensor.backward()`` on a view of a parameter, which is not an operator."""
    torch.autograd.backward(torch.clone(tensor), gradient, retain_graph, create_graph, inputs=inputs)


def _backward_pass(
    tensors: Sequence[Any],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Sequence[Any] | None = None,
) -> None:
    """Implement ``torch.autograd.backward``: its inputs name places in the graph. Run as one operator it
    would pin all of them, and Python code inside the pass would not be intercepted."""
    edges: Any = None
    if inputs is not None:
        for tensor in inputs:
            if _is_managed(tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.retain_grad()  # torch does this for views in inputs=
        edges = [get_gradient_edge(t) if _is_managed(t) else t for t in inputs]
    torch.autograd.backward(_copied(tensors), grad_tensors, retain_graph, create_graph, inputs=edges)


def _copied(tensors: Sequence[Any]) -> Any:
    """Return the tensors with managed ones replaced by copies, because backward reads the values of its
    roots."""
    return [torch.clone(t) if _is_managed(t) else t for t in tensors]


def _formatted(tensor: Any, spec: str) -> str:
    """Implement ``f"{weight[0]:.3f}"``: torch formats the number in a zero-dimensional tensor only for its
    own class, and never for parameters."""
    with PlainTensors():
        is_number = tensor.dim() == 0 and not isinstance(tensor, torch.nn.Parameter)
    return format(tensor.item(), spec) if is_number else object.__format__(tensor, spec)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(tensor: Any, *_args: Any, **_options: Any) -> Any:
        raise ConfigError(
            f"{name}() would remove a managed tensor of shape {tuple(tensor.shape)} from its chunk; "
            "use it on a copy, for example param.detach().clone()"
        )

    return refuse


# Torch functions on managed tensors that are not operators, and their replacements.
SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.grad.__get__: _grad_of,  # type: ignore[union-attr]
    torch.Tensor.grad.__set__: _set_grad,  # type: ignore[union-attr]
    torch.Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _require_grad,
    torch.Tensor.backward: _backward,
    torch.autograd.grad: _gradients,
    torch.autograd.backward: _backward_pass,
    torch.Tensor.data_ptr: raw_access.data_ptr,
    torch.Tensor.untyped_storage: raw_access.untyped_storage,
    torch.Tensor.numpy: raw_access.numpy,
    torch.Tensor.__array__: raw_access.array,
    torch.Tensor.__dlpack__: raw_access.dlpack,
    torch.Tensor.__format__: _formatted,
    **{getattr(torch.Tensor, name): _refuse(name) for name in ("resize_", "resize_as_", "share_memory_")},
    # Recurrent modules on a GPU want their weights contiguous, but the weights must stay in their chunks.
    torch._cudnn_rnn_flatten_weight: lambda *_args, **_kwargs: None,
}


_GETTERS = (
    *("is_leaf", "grad_fn", "is_sparse_csr", "is_mps", "is_xpu", "name", "names", "output_nr"),
    *("retains_grad", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
)
_SETTERS = ("_backward_hooks", "_post_accumulate_grad_hooks", "names")
_METHODS = (
    *("is_signed", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "is_same_size"),
    *("has_names", "is_set_to", "is_inference", "__dlpack_device__"),
)
_FUNCTIONS = (
    *("is_tensor", "is_same_size", "is_inference", "_has_compatible_shallow_copy_type"),
    *("empty_like", "zeros_like", "ones_like"),
)


def _metadata_functions() -> frozenset[Any]:
    functions: list[Any] = [
        getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)
    ]
    functions += [getattr(torch.Tensor, name).__set__ for name in _SETTERS if hasattr(torch.Tensor, name)]
    functions += [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    functions += [getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)]
    return DESCRIPTION.union(functions)


# Answered from the tensor's metadata: no fetch.
METADATA_FUNCTIONS = _metadata_functions()

# Return the same memory under another name: no fetch, and the result is managed too.
ALIASING_FUNCTIONS: frozenset[Any] = frozenset(
    (
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.detach,
        torch.detach,
        torch.Tensor.view_as,
        torch.Tensor.expand_as,
    )
)

# Return a view of a part of the same memory and read nothing; indexing only with basic indices.
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
