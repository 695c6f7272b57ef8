"""What sets a parameter apart for an optimizer: attributes that user code has set on it, and its identity.

A step under management runs over other tensors. They get the attributes. They have another identity, so an
optimizer that looks a parameter up by it is refused. Trials and rules both need this.
"""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gemini.runtime.intercept.tensors import OWN_ATTRIBUTES

_ABSENT = object()
_MOST_OBJECTS = 2**17  # that are looked at; more are no table of parameters
_OPAQUE = (type, types.ModuleType, torch.Tensor, torch.nn.Module)


@dataclass(frozen=True, eq=False)
class Marks:
    """The attributes that user code has set on a parameter. Equal where they read equal."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, param: torch.Tensor) -> Marks:
        """Return those of ``param``, as they are now."""
        values = {name: value for name, value in vars(param).items() if name not in OWN_ATTRIBUTES}
        return cls(values) if values else _NONE

    @property
    def text(self) -> str:
        """What the attributes read, by name."""
        return repr(sorted(self.values.items(), key=lambda item: item[0])) if self.values else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def apart(self) -> Marks:
        """Return copies, for a trial; what cannot be copied is as it is."""
        return Marks({name: _copy(value) for name, value in self.values.items()}) if self.values else self

    def put_on(self, tensor: torch.Tensor) -> None:
        """Set them on a tensor of a step."""
        if self.values:
            vars(tensor).update(self.values)

    def changed_on(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of those that a step has set to something else, or new, on ``tensor``."""
        now = vars(tensor)
        names = sorted({*now, *self.values})
        return [name for name in names if now.get(name, _ABSENT) is not self.values.get(name, _ABSENT)]


_NONE = Marks()


def holder_of_identities(held: Mapping[str, Any], params: Iterable[torch.Tensor], but: object) -> str:
    """Return the first name in ``held`` from which a parameter can be reached, or a number or a text that is
    its ``id``: by items, keys, attributes, closures, weak references. Nothing is searched behind ``but``."""
    ids = {id(param) for param in params}
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
    if isinstance(item, types.FunctionType):  # not its globals
        cells = [cell.cell_contents for cell in item.__closure__ or () if _is_filled(cell)]
        return [*cells, item.__defaults__, item.__kwdefaults__, vars(item)]
    if isinstance(item, dict):  # keys that are text are no referents of theirs
        return [*dict.keys(item), *gc.get_referents(item)]
    return gc.get_referents(item)


def _copy(value: Any) -> Any:
    if isinstance(value, _OPAQUE):
        return value.detach().clone() if isinstance(value, torch.Tensor) else value
    try:
        return copy.deepcopy(value)
    except Exception:  # of any class
        return value


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
