"""Returns managed memory that custom autograd functions saved as managed tensors again.

Without hooks on saved tensors ``ctx.saved_tensors`` returns the very objects that were saved. With hooks,
which activation offloading and non-reentrant checkpointing set, autograd makes new tensors of the hooks'
results: plain tensors over a window. An operator on one would read a chunk that may be evicted, and a
gradient added to its ``grad`` would be lost. So ``saved_tensors`` returns the parameter itself, or a managed
view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch._C import _FunctionBase
from torch.autograd.function import BackwardCFunction

from gemini.runtime.gate.gate import parameter_at, when_last_gate_ends
from gemini.runtime.intercept.tensors import as_managed

_NAME = "saved_tensors"


def restore_saved_weights() -> None:
    """Patch ``saved_tensors`` of custom functions to return managed memory as managed, until the last managed
    model is gone."""
    if _NAME not in BackwardCFunction.__dict__:
        setattr(BackwardCFunction, _NAME, property(_saved_tensors))
        when_last_gate_ends(lambda: delattr(BackwardCFunction, _NAME))


def _saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """The tensors that were passed to ``save_for_backward()``."""
    saved: tuple[Any, ...] = getattr(_FunctionBase, _NAME).__get__(ctx)
    return tuple([_as_it_was(tensor) for tensor in saved])


def _as_it_was(tensor: Any) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    param = parameter_at(tensor.data_ptr())
    if param is None:
        return tensor
    with PlainTensors():
        is_whole = tensor.is_leaf and (tensor.shape, tensor.stride()) == (param.shape, param.stride())
        same = is_whole and (tensor.dtype, tensor.requires_grad) == (param.dtype, param.requires_grad)
    return param if same else as_managed(tensor, param._ref)  # type: ignore[attr-defined]
