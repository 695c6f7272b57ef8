"""Entries: the modules of a managed model that callers may call directly. Each call from outside is a pass.

A program does not always call the module that it wrapped. ``generate()`` calls the module inside a GeminiDDP,
PEFT's ``generate()`` calls the module two wrappers below, and a custom loss calls the backbone. Each call
from outside is a forward pass of the model: recorded, planned and prefetched. A call from within a pass
belongs to that pass.

Forward hooks cannot do this: torch runs none of them after Ctrl-C, so the pass would never end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from gemini.errors import StateError
from gemini.system.subclassing import reduce_as

_KEY = "_gemini_entry"
_SHARE = 0.1  # the least share of a model's parameters for an entry
# Weak values: a generated class goes away with its last module, so that the user's class can, too.
_CLASSES: WeakValueDictionary[tuple[type[nn.Module], type[nn.Module], bool], type[nn.Module]] = (
    WeakValueDictionary()
)


class PassOwner(Protocol):
    """The interface that an entry calls: the handle of its model."""

    module: nn.Module

    @property
    def in_pass(self) -> bool: ...

    def forward(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        alone: bool = True,
    ) -> Any:
        """Run ``call`` as a forward pass. Without ``alone`` other threads may use the model meanwhile."""


class ModuleOfModel(nn.Module):
    """Mixin for the class of a module while it belongs to a managed model. Copies and pickles of the module
    have its original class. ``_held``: attributes that copies and pickles leave out."""

    _held: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary, unmanaged module: code that constructs ``type(module)``, like slicing a
        Sequential, must not get a managed one."""
        return plain_class(cls)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        module: nn.Module = self
        managed = type(self)
        held = {name: self.__dict__.pop(name) for name in self._held if name in self.__dict__}
        module.__class__ = plain_class(managed)
        try:
            return copy.deepcopy(module, memo)
        finally:
            module.__class__ = managed
            self.__dict__.update(held)

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, arguments, *rest = reduce_as(plain_class(type(self)), self, protocol)
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key not in self._held}
        return (function, arguments, *rest)


class Entry(ModuleOfModel):
    """Mixin for the class of an entry: a call from outside a pass becomes a forward pass of the model."""

    _held = (_KEY,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner: PassOwner | None = self.__dict__.get(_KEY)
        if owner is None or _belongs_to_pass(owner, self):
            return super().__call__(*args, **kwargs)
        return owner.forward(super().__call__, args, kwargs, alone=False)


def _belongs_to_pass(owner: PassOwner, module: nn.Module) -> bool:
    """Say whether a call is part of a pass under way, of a backward pass that recomputes a block, or of
    torch.compile tracing a submodule."""
    if torch.compiler.is_compiling():
        return module is not owner.module
    return owner.in_pass or torch._C._current_graph_task_id() != -1


def class_on_top(mixin: type[nn.Module], plain: type[nn.Module], *, shared: bool = False) -> type[nn.Module]:
    """Return a subclass of ``plain`` with ``mixin`` and the same name. The class is cached, so all modules of
    ``plain`` share one, as ``torch.func.stack_module_state`` requires. ``shared``: the module is used over
    several ranks."""
    known = _CLASSES.get((mixin, plain, shared))
    if known is not None:
        return known
    names: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    if shared:
        names["_is_accelerate_prepared"] = True  # otherwise Accelerate wraps it in DistributedDataParallel
    made: type[nn.Module] = type(plain.__name__, (mixin, plain), names)
    _CLASSES[mixin, plain, shared] = made
    return made


def plain_class(managed: type[nn.Module]) -> type[nn.Module]:
    """Return the class from which :func:`class_on_top` made ``managed``.

    Raises:
        StateError: the module's class was changed again since.
    """
    bases = managed.__bases__
    if not any(managed is made for made in _CLASSES.values()):
        raise StateError(
            f"the class of a managed {managed.__name__} changed after it was managed, as "
            "parametrizations do; register parametrizations of the outermost module before you "
            "manage it, or remove them"
        )
    return cast("type[nn.Module]", bases[1])


class Entries:
    """The entries of one model. ``plain_call``: calls the module without beginning a pass."""

    def __init__(self, owner: PassOwner) -> None:
        """Make the module and its large submodules entries."""
        self._modules: list[nn.Module] = []
        self.plain_call: Callable[..., Any] = owner.module
        for module in _entries(owner.module):
            if isinstance(module, ModuleOfModel):
                continue
            with suppress(TypeError):  # the class forbids subclasses: its calls are not followed
                module.__class__ = class_on_top(Entry, type(module))
                module.__dict__[_KEY] = owner
                self._modules.append(module)
        if isinstance(owner.module, Entry):
            self.plain_call = super(Entry, owner.module).__call__  # the call of the original class

    def release(self) -> None:
        """Restore the original classes."""
        while self._modules:
            module = self._modules.pop()
            kind: type[nn.Module] = type(module)
            if issubclass(kind, Entry):
                module.__class__ = plain_class(kind)
                del module.__dict__[_KEY]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and its submodules with at least a tenth of its parameters, down to the lists of
    blocks. Examples: the model inside a PeftModel, and the encoder and decoder of that model."""
    sizes: dict[nn.Module, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        least = _measure(module, sizes) * _SHARE
    parts = [module]
    while parts:
        part = parts.pop()
        yield part
        if not isinstance(part, nn.Sequential):
            parts += [below for below in part.children() if sizes[below] >= least and _is_called(below)]


def _is_called(part: nn.Module) -> bool:
    """Say whether ``part`` has submodules and is not a ModuleList or ModuleDict, which are never called."""
    is_list = isinstance(part, (nn.ModuleList, nn.ModuleDict))
    return not is_list and next(part.children(), None) is not None


def _measure(module: nn.Module, sizes: dict[nn.Module, int]) -> int:
    """Write the number of parameter elements of each submodule to ``sizes``; return that of ``module``."""
    own = sum(param.numel() for param in module._parameters.values() if param is not None)
    sizes[module] = own + sum(_measure(part, sizes) for part in module.children())
    return sizes[module]
