"""Entries: the modules of a managed model that callers outside of it may call, and each call is a pass.

A program does not always call what it wrapped. ``generate()`` calls the module within a GeminiDDP, PEFT's
calls the module two wrappers below, and a loss of its own calls the backbone. Wherever a call comes in, it is
a forward pass of the model: recorded, planned and prefetched. A call from within a pass belongs to that pass.

A hook would not do: torch runs none of them after Ctrl-C, and the pass would never end.
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
from gemini.system.mixing import reduced_as

_KEY = "_gemini_entry"
_SHARE = 0.1  # of a model's parameters that an entry has at least
# Gone with the last module of a class, as the class itself may be.
_CLASSES: WeakValueDictionary[tuple[type[nn.Module], type[nn.Module], bool], type[nn.Module]] = (
    WeakValueDictionary()
)


class PassOwner(Protocol):
    """What an entry tells that it was called: the handle of its model."""

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
        """Run ``call`` as a forward pass; other threads may use the model meanwhile, but with ``alone``."""


class ModuleOfModel(nn.Module):
    """What a class gets on top while a module of it belongs to a managed model. Copies and pickles of the
    module are of its own class. ``_held``: the attributes that they do not get."""

    _held: tuple[str, ...] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary module: what the class makes of itself, as a slice of a Sequential, is none that
        was managed."""
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
        function, arguments, *rest = reduced_as(plain_class(type(self)), self, protocol)
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key not in self._held}
        return (function, arguments, *rest)


class Entry(ModuleOfModel):
    """What the class of an entry gets on top."""

    _held = (_KEY,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner: PassOwner | None = self.__dict__.get(_KEY)
        if owner is None or _belongs_to_pass(owner, self):
            return super().__call__(*args, **kwargs)
        return owner.forward(super().__call__, args, kwargs, alone=False)


def _belongs_to_pass(owner: PassOwner, module: nn.Module) -> bool:
    """Say whether a call is a part of what is under way: a pass, a backward pass that computes a block again,
    or the tracing of a part by torch.compile."""
    if torch.compiler.is_compiling():
        return module is not owner.module
    return owner.in_pass or torch._C._current_graph_task_id() != -1


def class_on_top(mixin: type[nn.Module], plain: type[nn.Module], *, shared: bool = False) -> type[nn.Module]:
    """Return a subclass of ``plain`` with ``mixin`` that passes for it by name, for all modules of it one,
    as ``torch.func.stack_module_state`` wants; ``shared``: of a module over ranks."""
    known = _CLASSES.get((mixin, plain, shared))
    if known is not None:
        return known
    names: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
    }
    if shared:
        names["_is_accelerate_prepared"] = True  # or Accelerate puts DistributedDataParallel around it
    made: type[nn.Module] = type(plain.__name__, (mixin, plain), names)
    _CLASSES[mixin, plain, shared] = made
    return made


def plain_class(managed: type[nn.Module]) -> type[nn.Module]:
    """Return the class that :func:`class_on_top` made ``managed`` of.

    Raises:
        StateError: somebody has put another class over it since.
    """
    bases = managed.__bases__
    if not any(managed is made for made in _CLASSES.values()):
        raise StateError(
            f"the class of a managed {managed.__name__} was changed after it was managed, as "
            "parametrizations do; register those of the outermost module before, or take them off again"
        )
    return cast("type[nn.Module]", bases[1])


class Entries:
    """The entries of one model. ``plain_call``: that of its module, which begins no pass."""

    def __init__(self, owner: PassOwner) -> None:
        """Make entries of the module and of its large parts."""
        self._modules: list[nn.Module] = []
        self.plain_call: Callable[..., Any] = owner.module
        for module in _entries(owner.module):
            if isinstance(module, ModuleOfModel):
                continue
            with suppress(TypeError):  # of a class that may have no subclasses: its calls are not followed
                module.__class__ = class_on_top(Entry, type(module))
                module.__dict__[_KEY] = owner
                self._modules.append(module)
        if isinstance(owner.module, Entry):
            self.plain_call = super(Entry, owner.module).__call__  # as its own class does

    def release(self) -> None:
        """Give them their own classes back."""
        while self._modules:
            module = self._modules.pop()
            kind: type[nn.Module] = type(module)
            if issubclass(kind, Entry):
                module.__class__ = plain_class(kind)
                del module.__dict__[_KEY]


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and, down to the lists of blocks, the parts that have a tenth of its parameters: of a
    PeftModel the model that it wraps, and the encoder and the decoder of that."""
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
    """Say whether a part is more than one layer, and no list."""
    is_list = isinstance(part, (nn.ModuleList, nn.ModuleDict))
    return not is_list and next(part.children(), None) is not None


def _measure(module: nn.Module, sizes: dict[nn.Module, int]) -> int:
    """Write down how many elements each part has; return those of ``module``."""
    own = sum(param.numel() for param in module._parameters.values() if param is not None)
    sizes[module] = own + sum(_measure(part, sizes) for part in module.children())
    return sizes[module]
