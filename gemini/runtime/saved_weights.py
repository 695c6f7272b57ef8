"""What custom autograd functions saved of managed memory, handed back as managed.

Without hooks on saved tensors ``ctx.saved_tensors`` gives the very objects that were saved. With hooks, which
activation offloading and non-reentrant checkpointing set, autograd makes new tensors of what a hook returns:
plain ones over a window, so that an operator on one would read a chunk that may be away, and what is added to
the ``grad`` of one is nobody's gradient. So whoever asks is given the parameter itself, or a managed view.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch._C import _FunctionBase
from torch.autograd.function import BackwardCFunction

from gemini.runtime import living
from gemini.runtime.param import ManagedParameter, as_managed

_NAME = "saved_tensors"

# Windows of living models do not overlap.
_by_address: WeakValueDictionary[int, ManagedParameter] = WeakValueDictionary()


def remember_parameter(param: ManagedParameter) -> None:
    """Have custom functions that saved ``param``, or a view of it, be given it, or a managed view."""
    with PlainTensors():
        if param.numel():
            _by_address[param.data_ptr()] = param
    if _NAME not in BackwardCFunction.__dict__:
        setattr(BackwardCFunction, _NAME, property(_saved_tensors))


def _saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """The tensors that were given to ``save_for_backward()``."""
    saved: tuple[Any, ...] = getattr(_FunctionBase, _NAME).__get__(ctx)
    return tuple([_as_it_was(tensor) for tensor in saved])


def _as_it_was(tensor: Any) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    param = _parameter_at(tensor.data_ptr())
    if param is None:
        return tensor
    with PlainTensors():
        is_whole = tensor.is_leaf and (tensor.shape, tensor.stride()) == (param.shape, param.stride())
        same = is_whole and (tensor.dtype, tensor.requires_grad) == (param.dtype, param.requires_grad)
    return param if same else as_managed(tensor, param._ref)


def _parameter_at(address: int) -> ManagedParameter | None:
    """Return the parameter in whose memory ``address`` lies."""
    if not living.has_windows_at(address):
        return None
    found = _by_address.get(address)
    if found is not None:
        return _if_managed(found)
    with PlainTensors():
        for begin, param in list(_by_address.items()):
            if begin < address < begin + param.nbytes:
                return _if_managed(param)
    return None


def _if_managed(param: ManagedParameter) -> ManagedParameter | None:
    """Return ``param`` unless it has become an ordinary one again."""
    return param if type(param) is ManagedParameter else None
