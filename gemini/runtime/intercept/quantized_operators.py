"""Managed quantized weights, and operators on them.

The class of a managed weight is a subclass of its original class. A weight with memory of its own takes
operators like any managed parameter. A wrapper handles operators itself, so operators run on its twin: a
wrapper of the original class over the same bytes, which are pinned meanwhile. Results over these bytes are
managed too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as PlainTensors
from torch._C import _EnableTorchFunction as SubclassesAnswer

from gemini.errors import ConfigError
from gemini.runtime.gate.gate import NO_SNAPSHOT, Gate, TensorRef
from gemini.runtime.gate.gradients import Slot
from gemini.runtime.intercept import raw_access
from gemini.runtime.intercept.backward import hook_backward, next_node_number
from gemini.runtime.intercept.functions import METADATA_FUNCTIONS, SPECIAL
from gemini.runtime.intercept.nested import map_tensors
from gemini.runtime.intercept.quantized import QuantizedForm, is_wrapper, leaves_of, rebuilding
from gemini.runtime.intercept.tensors import (
    MANAGED,
    MANAGED_PARAMETERS,
    ManagedParameter,
    ManagedTensor,
    adopt,
    as_managed,
    copy_before,
    operands_of,
    plain_copy,
    plain_view,
)

_CLASSES: dict[tuple[type, type], type] = {}
_OWN_ATTRIBUTES = ("_ref", "_slot", "_form", "_twin", "_name_again")


class QuantizedParameter(ManagedParameter):
    """A managed quantized weight; its inner tensors lie in a chunk, and its class also derives from the
    weight's."""

    _form: QuantizedForm
    _twin: torch.Tensor | None  # of a wrapper only

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Return an unmanaged weight of the original class with a copy of the data."""
        if id(self) not in memo:
            memo[id(self)] = unmanaged_copy(self, memo)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        return unmanaged_copy(self, {}).__reduce_ex__(proto)


class OwnMemoryParameter(QuantizedParameter):
    """A quantized weight that has memory of its own."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weight itself if it is on the device and in the dtype asked for, as ``to()`` of a tensor
        does. That of bitsandbytes returns another one, and PEFT's DoRA replaces the weight with it."""
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, memory_format = parsed
        changes = device not in (None, self.device) or dtype not in (None, self.dtype)
        if changes or memory_format is not None or kwargs.get("copy"):
            return super().to(*args, **kwargs)
        return self


class _Twinned:
    """A managed wrapper: operators run on its twin."""

    _twin: torch.Tensor | None
    _kind: type  # the original class

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain wrapper: an object that the original class's code creates from a managed one is not
        managed."""
        return cls._kind(*args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``nn.Parameter(managed)`` returns the managed wrapper, and Python then calls its
        ``__init__`` again."""

    @property
    def __tensor_unflatten__(self) -> Any:
        """Absent, so that torch does not swap the wrapper for another one when a module is moved."""
        raise AttributeError("__tensor_unflatten__")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return run_on_twins(func, args, kwargs or {})

    @staticmethod
    def run_on_twins(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that arrived at another managed operand first."""
        return run_on_twins(func, args, kwargs)


class WrapperParameter(_Twinned, QuantizedParameter):
    """A quantized weight that is a wrapper around plain tensors."""


class WrapperView(_Twinned, ManagedTensor):
    """A result over the bytes of a managed wrapper, such as its transpose."""


def managed_class(kind: type, base: type) -> type:
    """Return the class that derives from ``base`` and ``kind``, with the name of ``kind``."""
    made = _CLASSES.get((kind, base))
    if made is None:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_kind": kind}
        made = _CLASSES[kind, base] = type(base)(kind.__name__, (base, kind), names)
        MANAGED.add(made)
        if issubclass(base, ManagedParameter):
            MANAGED_PARAMETERS.add(made)
    return made


def make_managed_quantized(
    param: nn.Parameter,
    form: QuantizedForm,
    held: torch.Tensor,
    ref: TensorRef,
    slot: Slot,
    name_again: Callable[[Any, torch.Tensor], torch.nn.Parameter],
) -> None:
    """Turn a quantized weight into a managed one over ``held``, the bytes of its slot in the window."""
    with PlainTensors(), torch.no_grad():
        twin = None
        if form.rebuild is None:
            param.data = form.inner[0].view(held)
        else:
            twin = form.over(held)
    form.put(held, lambda view: as_managed(view, ref))
    param.__class__ = managed_class(form.kind, OwnMemoryParameter if twin is None else WrapperParameter)
    values = {"_ref": ref, "_slot": slot, "_form": form, "_twin": twin, "_name_again": name_again}
    vars(param).update(values)


def make_plain_quantized(param: nn.Parameter, form: QuantizedForm, held: torch.Tensor) -> None:
    """Turn a managed quantized weight back into one of its original class, over ``held``."""
    param.__class__ = form.kind
    for name in _OWN_ATTRIBUTES:
        delattr(param, name)
    form.put(held, lambda view: view)
    if form.rebuild is None:
        with PlainTensors():
            param.data = form.inner[0].view(held)


def unmanaged_copy(param: QuantizedParameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return an unmanaged weight of the original class with a copy of the data."""
    form = param._form
    if form.rebuild is not None:
        copies = [plain_copy(leaf) for leaf in leaves_of(param)]
        return nn.Parameter(form.rebuild(copies), requires_grad=False)
    copied: nn.Parameter = torch.Tensor._make_subclass(form.kind, plain_copy(param), False)
    memo[id(param)] = copied
    for name, value in vars(param).items():
        if name not in _OWN_ATTRIBUTES:
            vars(copied)[name] = value if isinstance(value, nn.Module) else copy.deepcopy(value, memo)
    return copied


def run_on_twins(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on operands with managed wrappers; the counterpart of ``dispatch`` for other
    managed tensors.

    Raises:
        ConfigError: the function cannot run on these operands.
        OutOfBudgetError, IoError, StateError, EvictedAccessError: as a PreOp.
    """
    if func in METADATA_FUNCTIONS:
        with PlainTensors():
            return func(*args, **kwargs)
    if func is torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        if args[0] is args[1]:  # module.to("cpu") does this
            return None
        raise ConfigError(
            f"a managed {type(args[0]).__name__} takes no other .data, as its memory is laid out once; "
            "load_state_dict() of the managed model writes quantized values"
        )
    special = SPECIAL.get(func)
    # A wrapper has no memory of its own.
    if special is not None and special.__module__ != raw_access.__name__:
        return special(*args, **kwargs)
    given: list[Any] | None = [] if torch.is_grad_enabled() else None
    operands = operands_of(args, kwargs, given)
    managers = {operand._ref.manager for operand in operands}
    if len(managers) != 1:
        raise ConfigError(
            f"{getattr(func, '__name__', func)}() was given quantized weights of {len(managers)} managed "
            "models, or one inside an object that is no list, tuple or dict; pass those of one model"
        )
    return _operate(func, args, kwargs, operands, given, managers.pop())


def _operate(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: list[Any],
    given: list[Any] | None,
    manager: Gate,
) -> Any:
    """Run one operator with its managed operands pinned, and hook its backward nodes to do the same."""
    tensors = tuple(dict.fromkeys(tensor for operand in operands for tensor in operand._ref.tensors))
    pinned = not manager.resident
    turn = manager.threads.take_turn() if pinned and not manager.threads.holder else None
    try:
        views = _plain_operands(operands)
        given_args, given_kwargs = map_tensors((args, kwargs), lambda each: views.get(id(each), each))
        versions = _versions(views)
        first_node = next_node_number()
        unsaved: frozenset[int] = frozenset()
        if manager.snapshot is not NO_SNAPSHOT:
            with PlainTensors():
                copy_before(func, args, kwargs, operands)
            unsaved = manager.snapshot.unsaved(tensors)
        if pinned:
            manager.pre_op(tensors)
        try:
            with SubclassesAnswer():
                out = func(*given_args, **given_kwargs)
        finally:
            written = _versions(views) != versions
            if written:
                manager.written.note(list(tensors))
                if lost := unsaved.intersection(tensors):
                    manager.snapshot.spoil(lost)
                if not pinned:
                    manager.pre_op(tensors)
            if pinned or written:
                manager.post_op(tensors, written)
        if given is not None and pinned:
            hook_backward(out, (first_node, given), manager, tensors, (given_args, given_kwargs))
        return _adopt(out, operands)
    finally:
        if turn is not None:
            turn.release()


def _plain_operands(operands: list[Any]) -> dict[int, torch.Tensor]:
    """Return the plain tensor that replaces each operand in the call, by the operand's id."""
    with PlainTensors():
        return {
            id(each): twin if (twin := getattr(each, "_twin", None)) is not None else plain_view(each)
            for each in operands
        }


def _versions(views: dict[int, torch.Tensor]) -> list[int]:
    found = []
    for view in views.values():
        leaves = leaves_of(view) if is_wrapper(view) else [view]
        found += [leaf._version for leaf in leaves]
    return found


def _adopt(out: Any, operands: list[Any]) -> Any:
    """Return the result with all parts in windows managed; an operand itself if the result is all of it."""
    if isinstance(out, (list, tuple)) and type(out) in (list, tuple):
        return type(out)(_adopt(item, operands) for item in out)
    if not isinstance(out, torch.Tensor) or not is_wrapper(out):
        with PlainTensors():
            return adopt(out, operands)
    leaves = leaves_of(out)
    for operand in operands:
        ref: TensorRef = operand._ref
        twin: Any = getattr(operand, "_twin", None)
        windows = ref.manager.windows
        if not any(leaf.data_ptr() in windows and ref.manager.viewed(ref, leaf) for leaf in leaves):
            continue
        if out is twin or (
            is_wrapper(twin) and type(out) is type(twin) and _geometry(out) == _geometry(twin)
        ):
            return operand
        view: Any = rebuilding(out)([as_managed(leaf.data, ref) for leaf in leaves])
        view.__class__ = managed_class(type(out), WrapperView)
        vars(view).update(_ref=ref, _twin=out)
        return view
    return out


def _geometry(tensor: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return a key by which wrappers over the same memory are compared."""
    parts = [tensor, *leaves_of(tensor)]
    return [(part.shape, part.stride(), part.dtype, part.requires_grad) for part in parts] + [
        (leaf.data_ptr(),) for leaf in parts[1:]
    ]
