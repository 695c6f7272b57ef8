"""Everything by which an optimizer can tell parameters apart: attributes that user code set on them, their
place in the groups, and their identity.

A step under management runs over other tensors, and not over all at once. They get the attributes and places;
placeholders fill the other places. Their identity differs, so an optimizer that looks parameters up by
identity is refused. Trials and rules both use this module.
"""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gemini.runtime.intercept.tensors import OWN_ATTRIBUTES

_ABSENT = object()
_MOST_OBJECTS = 2**17  # search limit; a table of parameters is smaller
_OPAQUE = (type, types.ModuleType, torch.Tensor, torch.nn.Module)


@dataclass(frozen=True, eq=False)
class Marks:
    """The attributes that user code set on a parameter. Equal if they read equal."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, param: torch.Tensor) -> Marks:
        """Return the current marks of ``param``."""
        values = {name: value for name, value in vars(param).items() if name not in OWN_ATTRIBUTES}
        return cls(values) if values else _NONE

    @property
    def text(self) -> str:
        """The attributes and their values as text."""
        return repr(sorted(self.values.items(), key=lambda item: item[0])) if self.values else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def apart(self) -> Marks:
        """Return a copy for a trial; values that cannot be copied are shared."""
        return Marks({name: _copy(value) for name, value in self.values.items()}) if self.values else self

    def put_on(self, tensor: torch.Tensor) -> None:
        """Set the attributes on a tensor of a step."""
        if self.values:
            vars(tensor).update(self.values)

    def changed_on(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of attributes that a step has changed, added or removed on ``tensor``."""
        now = vars(tensor)
        names = sorted({*now, *self.values})
        return [name for name in names if now.get(name, _ABSENT) is not self.values.get(name, _ABSENT)]


_NONE = Marks()


class ParamIndex(NamedTuple):
    """The place of a parameter: the index of its group, and its index in the group."""

    group: int
    place: int


class ParamForm(NamedTuple):
    """The properties of a parameter that its placeholder imitates."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    marks: Marks

    @classmethod
    def of(cls, param: torch.Tensor) -> ParamForm:
        """Return the form of ``param``, with the dtype in which its optimizer sees it."""
        with torch._C.DisableTorchFunctionSubclass():
            slot = vars(param).get("_slot")
            dtype = param.dtype if slot is None else slot.group.plan.updated_dtype
            shape, stride = tuple(param.shape), tuple(param.stride())
            return cls(shape, stride, dtype, param.device, param.requires_grad, Marks.of(param))


class Placeholder(torch.Tensor):
    """A parameter without values and gradient. Operators on placeholders return placeholders. An operator
    that combines it with real values, or writes it to a real tensor, raises RuntimeError.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _meta: torch.Tensor
    _marks: Marks
    _touched: list[Placeholder] | None  # receives this object when an attribute of it is set

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, *, requires_grad: bool = False) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        return made

    def __init__(self, meta: torch.Tensor, device: torch.device, *, requires_grad: bool = False) -> None:
        vars(self).update(_meta=meta, _marks=_NONE, _touched=None)

    @classmethod
    def of(cls, form: ParamForm, touched: list[Placeholder]) -> Placeholder:
        """Return a placeholder for the parameter of ``form``. It adds itself to ``touched`` whenever an
        attribute is set on it.
        """
        meta = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        made = cls(meta, form.device, requires_grad=form.requires_grad)
        vars(made).update(_marks=form.marks, _touched=touched)
        form.marks.put_on(made)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if self._touched is not None:
            self._touched.append(self)
        super().__setattr__(name, value)

    def forget(self) -> None:
        """Remove the attributes that a step set on it."""
        kept = {name: vars(self)[name] for name in ("_meta", "_marks", "_touched")}
        vars(self).clear()
        vars(self).update(kept)
        self._marks.put_on(self)
        torch.Tensor.__setattr__(self, "grad", None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on shapes only."""
        own = {id(item._meta): item for item in tree_leaves((args, kwargs)) if isinstance(item, Placeholder)}
        written = func._schema.arguments
        by_name = {**dict(zip((a.name for a in written), args, strict=False)), **(kwargs or {})}
        written = tree_leaves([by_name.get(a.name) for a in written if a.is_write])
        if any(item.dim() > 0 for item in _real(tree_leaves((args, kwargs)))) or _real(written):
            raise RuntimeError(
                f"{func._schema.name.rpartition('::')[2]}() of a parameter and of another one that has no "
                "gradient, or is updated at another time"
            )
        device = next(iter(own.values())).device
        metas, named = tree_map(_meta_of, (args, kwargs or {}))
        made = func(*metas, **named)

        def as_placeholder(item: Any) -> Any:
            if not isinstance(item, torch.Tensor) or item.device.type != "meta":
                return item
            return own[id(item)] if id(item) in own else cls(item, device)

        return tree_map(as_placeholder, made)


def _meta_of(item: Any) -> Any:
    return item._meta if isinstance(item, Placeholder) else item


def _real(items: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that have values."""
    return [item for item in items if isinstance(item, torch.Tensor) and not isinstance(item, Placeholder)]


def holder_of_identities(held: Mapping[str, Any], found: Iterable[object], but: object) -> str:
    """Return the first name in ``held`` from which an object of ``found``, or a number or text equal to its
    ``id``, can be reached; "" if there is none.

    Follows items, keys, attributes, closures and weak references, but not through ``but``.
    """
    ids = {id(each) for each in found}
    for name, value in held.items():
        if _reaches(value, ids, {id(but)}):
            return name
    return ""


def _reaches(value: Any, ids: set[int], seen: set[int]) -> bool:
    left = [value]
    while left and len(seen) < _MOST_OBJECTS:
        item = left.pop()
        if id(item) in ids or (type(item) is int and item in ids):
            return True
        if isinstance(item, str) and item.isdecimal() and len(item) < 24 and int(item) in ids:
            return True
        if isinstance(item, _OPAQUE) or id(item) in seen:
            continue
        seen.add(id(item))
        left += _parts(item)
    return False


def _parts(item: Any) -> list[Any]:
    if isinstance(item, weakref.ref):
        return [item()]
    if isinstance(item, types.FunctionType):  # globals are not followed
        cells = [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
        return [*cells, item.__defaults__, item.__kwdefaults__, vars(item)]
    if isinstance(item, dict):  # get_referents leaves out keys that are strings
        return [*dict.keys(item), *gc.get_referents(item)]
    return gc.get_referents(item)


def _copy(value: Any) -> Any:
    if isinstance(value, _OPAQUE):
        return value.detach().clone() if isinstance(value, torch.Tensor) else value
    try:
        return copy.deepcopy(value)
    except Exception:  # user classes may raise anything
        return value


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
