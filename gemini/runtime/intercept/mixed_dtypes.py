"""Runs operators that torch refuses because 16-bit parameters meet fp32 buffers, again in one dtype.

A refused operator with parameters runs again in their dtype (``precision.py``). One without parameters gets a
value that an fp32 buffer has promoted, beside 16-bit activations; it runs again in 16 bits. A managed model
looks for such operators only in its first passes. The module in which one ran then intercepts operators in
all of its calls, recomputed ones included; all other modules cost nothing. If it was the outermost module,
every pass is intercepted.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import graph
from torch.overrides import TorchFunctionMode

from gemini.runtime.intercept.compiled import is_compiled
from gemini.runtime.intercept.nested import map_tensors
from gemini.runtime.intercept.precision import run_in_one_dtype
from gemini.system.subclassing import class_without_mixin, mix_in, reduce_as

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class SingleDtype(TorchFunctionMode):
    """Run an operator that torch refuses for its dtypes again, in the dtype of its parameters, or else of its
    16-bit operands (docs/notes/precision.md)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``."""
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as refusal:
            params, short = _operands(args, kwargs)
            if not params and not short:
                raise
            out = run_in_one_dtype(func, args, kwargs, params or short, refusal)
            if not params:
                self.note()
            return out

    def note(self) -> None:
        """Called after an operator without parameters ran again."""


class FirstPasses:
    """The first training pass and the first evaluation of a model, which look for such operators."""

    def __init__(self, module: nn.Module, precision: torch.dtype | None) -> None:
        self._module = module
        self._to_see = {True, False} if precision in _SIXTEEN_BITS and _has_wide_buffers(module) else set()
        self._looks_always = False  # True: an operator was refused in the outermost module itself
        self.may_look = bool(self._to_see)  # False: no pass looks any longer

    @contextmanager
    def watched(self, training: bool) -> Iterator[None]:
        """Look for such operators in the block if no pass of this kind has ended before."""
        if self._looks_always:
            with SingleDtype():
                yield
            return
        if training not in self._to_see or any(map(is_compiled, self._module.modules())):
            yield
            return
        with _MixedDtypeSearch(self._module) as search:
            yield
        self._looks_always |= search.met_outside
        self._to_see.discard(training)
        self.may_look = self._looks_always or bool(self._to_see)


def _has_wide_buffers(module: nn.Module) -> bool:
    return any(buffer.dtype in (torch.float32, torch.float64) for buffer in module.buffers())


class _MixedDtypeSearch(SingleDtype):
    """Makes the module in which an operator was refused intercept operators in all of its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._inner = {id(part) for part in module.modules() if part is not module}
        self.met_outside = False  # True: refused in the outermost module, which has a class of manage()

    def note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._inner:
                mix_in(owner, _SingleDtypeForward)
                return
            frame = frame.f_back
        self.met_outside = True


class _SingleDtypeForward(nn.Module):
    """Mixin for a module with refused operators: runs its forward in one dtype. Its copies have it too;
    pickles have the module's original class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward within :class:`SingleDtype`."""
        with SingleDtype():
            return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        module: nn.Module = self
        mixed = type(self)
        module.__class__ = class_without_mixin(self)
        try:
            found = copy.deepcopy(module, memo)
        finally:
            module.__class__ = mixed
        mix_in(found, _SingleDtypeForward)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_as(class_without_mixin(self), self, protocol)


def run_backward(
    tensor: torch.Tensor, grad: torch.Tensor | None, inputs: Sequence[torch.Tensor], retain_graph: bool
) -> None:
    """Run ``torch.autograd.backward`` so that recomputed activations use one dtype, too.

    ``torch.autograd.backward`` itself is a torch function, so inside it no mode would be active.
    """
    grads = torch.autograd._make_grads((tensor,), (grad,), is_grads_batched=False)
    with SingleDtype():
        graph._engine_run_backward(
            (tensor,), grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=True
        )


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters among the operands, and the 16-bit operands."""
    params: list[torch.Tensor] = []
    short: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            params.append(tensor)
        elif tensor.dtype in _SIXTEEN_BITS:
            short.append(tensor)
        return tensor

    map_tensors((args, kwargs), look)
    return params, short


def mixes_dtypes(module: nn.Module) -> bool:
    """Say whether the floating-point parameters and buffers of ``module`` have several dtypes."""
    tensors = (*module.parameters(), *module.buffers())
    return len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) > 1
