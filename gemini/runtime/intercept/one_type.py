"""Operators that get several types: what 16-bit parameters and fp32 buffers make together.

An operator that takes parameters and is refused for its types runs once more, in theirs (``precision.py``).
One without parameters gets what a buffer in fp32 has promoted beside activations in 16 bits; it runs again in
those. A managed model looks for such operators in its first passes alone: the module in which one ran looks
in each of its calls from then on, recomputed ones included, and all others cost nothing. Where that is the
outermost module, every pass looks.
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
from gemini.runtime.intercept.precision import run_in_one_type
from gemini.system.mixing import class_before, mix_in, reduced_as

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class InOneType(TorchFunctionMode):
    """Run an operator that torch refuses for its types once more, in the type of its parameters, or else of
    its operands in 16 bits (docs/notes/precision.md)."""

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
            out = run_in_one_type(func, args, kwargs, params or short, refusal)
            if not params:
                self.note()
            return out

    def note(self) -> None:
        """Note that an operator without parameters ran once more."""


class FirstPasses:
    """The first training pass and the first evaluation of a model, in which such operators are looked for."""

    def __init__(self, module: nn.Module, precision: torch.dtype | None) -> None:
        self._module = module
        self._to_see = {True, False} if precision in _SIXTEEN_BITS and _has_wide_buffers(module) else set()
        self._looks_always = False  # True: such an operator ran in the outermost module itself
        self.may_look = bool(self._to_see)  # False: no pass is looked at any more

    @contextmanager
    def watched(self, training: bool) -> Iterator[None]:
        """Look for such operators within the block where no such pass has ended before."""
        if self._looks_always:
            with InOneType():
                yield
            return
        if training not in self._to_see or any(map(is_compiled, self._module.modules())):
            yield
            return
        with _Looking(self._module) as looking:
            yield
        self._looks_always |= looking.met_outside
        self._to_see.discard(training)
        self.may_look = self._looks_always or bool(self._to_see)


def _has_wide_buffers(module: nn.Module) -> bool:
    return any(buffer.dtype in (torch.float32, torch.float64) for buffer in module.buffers())


class _Looking(InOneType):
    """Have the module in which an operator ran once more look in each of its calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._inner = {id(part) for part in module.modules() if part is not module}
        self.met_outside = False  # True: one ran in the outermost module, whose class manage() changes

    def note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._inner:
                mix_in(owner, _ComputesInOneType)
                return
            frame = frame.f_back
        self.met_outside = True


class _ComputesInOneType(nn.Module):
    """A module in which operators get several types. Its copies are, too; it is pickled as one of its own
    class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        with InOneType():
            return super().forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        module: nn.Module = self
        mixed = type(self)
        module.__class__ = class_before(self)
        try:
            found = copy.deepcopy(module, memo)
        finally:
            module.__class__ = mixed
        mix_in(found, _ComputesInOneType)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced_as(class_before(self), self, protocol)


def run_backward(
    tensor: torch.Tensor, grad: torch.Tensor | None, inputs: Sequence[torch.Tensor], retain_graph: bool
) -> None:
    """Run ``torch.autograd.backward``; activations that are computed again get one type, too.

    That one is a torch function itself, so that no mode is left within it.
    """
    grads = torch.autograd._make_grads((tensor,), (grad,), is_grads_batched=False)
    with InOneType():
        graph._engine_run_backward(
            (tensor,), grads, retain_graph, False, inputs, allow_unreachable=True, accumulate_grad=True
        )


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters among the operands, and those in 16 bits."""
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


def mixes_types(module: nn.Module) -> bool:
    """Say whether floating-point parameters and buffers of ``module`` have several types."""
    tensors = (*module.parameters(), *module.buffers())
    return len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) > 1
