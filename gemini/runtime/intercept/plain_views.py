"""Plain tensors that stand for managed ones while code runs that must not see those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini.runtime.intercept.nested import exchange_tensors
from gemini.runtime.intercept.param import ManagedParameter, adopt


class PlainViews:
    """Plain tensors over the memory of managed ones, one for each; gradients go on to the managed one."""

    def __init__(self, managed: Sequence[torch.Tensor]) -> None:
        from torch._dynamo import mark_static_address  # large; loaded already where anything was compiled

        self._operands = list(managed)
        with PlainTensors():
            self._views = {id(each): _Plain.apply(each) for each in managed}  # type: ignore[no-untyped-call]
        self._managed = {id(self._views[id(tensor)]): tensor for tensor in managed}
        for view in self._views.values():
            mark_static_address(view, guard=False)  # a window's never changes: CUDA graphs may rely on that

    @contextmanager
    def replacing(self, module: nn.Module) -> Iterator[None]:
        """Have them in the places of the module's managed parameters for the block; what it leaves in
        attributes of the module is managed again."""
        places = list(managed_places(module))
        for held, name, param in places:
            held[name] = self.plain(param)
        try:
            yield
        finally:
            for held, name, param in places:
                held[name] = param
            for part in module.modules():
                attributes = vars(part)
                for name, value in attributes.items():
                    if type(value) is torch.Tensor:
                        attributes[name] = self._managed_again(value)

    def plain(self, value: Any) -> Any:
        """Return ``value`` with the plain tensors in the places of managed ones, see
        :func:`gemini.runtime.intercept.nested.exchange_tensors`."""
        return exchange_tensors(value, lambda tensor: self._views.get(id(tensor), tensor))

    def managed(self, value: Any) -> Any:
        """Return ``value`` with managed tensors in the places of plain ones, and of views of these."""
        return exchange_tensors(value, self._managed_again)

    def _managed_again(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._managed.get(id(tensor))
        if found is not None:
            return found
        with PlainTensors():
            return adopt(tensor, self._operands)  # type: ignore[no-any-return]


def managed_places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, ManagedParameter]]:
    """Yield where the module and its parts keep managed parameters."""
    for part in module.modules():
        held: dict[str, Any] = part._parameters
        for name, param in held.items():
            if type(param) is ManagedParameter:
                yield held, name, param


class _Plain(torch.autograd.Function):
    """The same memory and version; no view: a compiler would look at the base of one, and at its gradient."""

    @staticmethod
    def forward(_ctx: Any, managed: torch.Tensor) -> torch.Tensor:
        return managed.detach()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
