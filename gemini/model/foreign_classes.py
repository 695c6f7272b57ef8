"""Route operators on managed tensors to the runtime even if another Tensor subclass handles the operator.

torch asks the classes of an operator's operands in order, and the first that handles the operator ends the
search. A nested tensor left of a weight would handle the operator for the weight, too. So while managed
tensors exist, ``__torch_function__`` of each Tensor subclass is wrapped. See docs/notes/interception.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _EnableTorchFunction as SubclassesAnswer

from gemini.errors import ConfigError
from gemini.runtime.gate.gate import when_last_gate_ends
from gemini.runtime.intercept.functions import METADATA_FUNCTIONS, SPECIAL
from gemini.runtime.intercept.tensors import MANAGED, ManagedParameter, ManagedTensor, dispatch

_NAME = "__torch_function__"
_REFUSES = "_refuses_managed"  # marks a __new__ that refuses managed tensors


class _Intercepted(classmethod):  # type: ignore[type-arg]
    """Wraps a class's ``__torch_function__`` so that managed tensors go to the runtime."""


def intercept_foreign_classes() -> None:
    """Wrap ``__torch_function__`` of all Tensor subclasses so that managed tensors go to the runtime. Called
    before every forward pass, because more classes may have been defined or imported."""
    classes: list[type] = [torch.Tensor]
    for cls in classes:  # the list grows in the loop
        classes += type.__subclasses__(cls)
    for cls in classes[1:]:
        if issubclass(cls, (ManagedTensor, ManagedParameter)):
            continue
        if cls.__name__ == "DTensor":
            _refuse_within(cls)
        owner = next(part for part in cls.__mro__ if _NAME in part.__dict__)
        answer = owner.__dict__[_NAME]
        # Tensor's own defers to the classes of other operands. One that is not a classmethod (Parameter's)
        # handles no operators.
        if owner is not torch.Tensor and type(answer) is classmethod:
            _replace(owner, _NAME, _Intercepted(_intercepting(answer.__func__)))


def _refuse_within(wrapper: Any) -> None:
    """Make the class ``wrapper`` (DTensor) refuse managed tensors as contents: its operators would read their
    memory while it may be evicted."""
    make = wrapper.__new__
    if hasattr(make, _REFUSES):
        return

    @functools.wraps(make)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if any(type(each) in MANAGED for each in (*args, *kwargs.values())):
            raise ConfigError(
                f"a {wrapper.__name__} cannot wrap a managed parameter or a view of one: its "
                "operators would bypass the runtime and read memory that may be evicted; wrap a "
                f"copy, {wrapper.__name__}.from_local(param.detach().clone(), mesh)"
            )
        return make(cls, *args, **kwargs)

    setattr(new, _REFUSES, True)
    _replace(wrapper, "__new__", staticmethod(new))


def _replace(owner: type, name: str, value: object) -> None:
    """Set an attribute of ``owner``. After the last managed model is gone, restore the previous value, unless
    the attribute was replaced again meanwhile."""
    before = owner.__dict__.get(name)

    def undo() -> None:
        if owner.__dict__.get(name) is not value:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    when_last_gate_ends(undo)


def _intercepting(answer: Callable[..., Any]) -> Callable[..., Any]:
    # torch.compile traces this function, so it lies in a file that it may trace
    # (gemini/runtime/intercept/compiled.py).
    def intercepted(
        cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if torch.compiler.is_compiling() or MANAGED.isdisjoint(types) or func in METADATA_FUNCTIONS:
            return answer(cls, func, types, args, kwargs)
        return _operate(functools.partial(answer, cls, func, types), func, args, kwargs)

    return intercepted


def _operate(answer: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on operands with managed tensors through the runtime; ``answer`` is the foreign class's
    handler."""
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)

    def answered(*args: Any, **kwargs: Any) -> Any:
        with SubclassesAnswer():
            return answer(args, kwargs)

    answered.__name__ = getattr(func, "__name__", str(func))
    return dispatch(answered, args, kwargs)
