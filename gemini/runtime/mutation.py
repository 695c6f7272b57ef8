"""What an operator writes to without moving its version counter, by its schema.

Torch moves the counters of what its operators write to *and* return. What they write to besides, such as
the parameters of a fused optimizer, and whatever operators of libraries write to, is said in the schema
alone. What declares nothing and moves no counter cannot be known to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

# Places of an argument: its position, None where it has to be named; and its name.
Places = tuple[tuple[int | None, str], ...]


def silent_places(func: Callable[..., Any]) -> Places:
    """Return the arguments that ``func`` writes to and whose counters it may leave; () for what has no
    schema, such as a Python function."""
    places: dict[tuple[int | None, str], None] = {}
    for schema in _schemas(func):
        aliases = [returned.alias_info for returned in schema.returns if returned.alias_info is not None]
        announces = schema.name.startswith("aten::") and bool(aliases)
        announced = set().union(*(alias.before_set for alias in aliases))
        for position, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            if alias is None or not alias.is_write or "Tensor" not in str(argument.type):
                continue
            if not announces or not alias.before_set <= announced:  # that of a list is empty
                places[None if argument.kwarg_only else position, argument.name] = None
    return tuple(places)


def _schemas(func: Callable[..., Any]) -> Iterable[Any]:
    if isinstance(func, OpOverload):
        return [func._schema]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name)._schema for name in func.overloads()]
    name = getattr(func, "__name__", "")
    if not name or hasattr(func, "__code__") or name.startswith("__"):
        return []
    return torch._C._jit_get_schemas_for_operator(f"aten::{name}")


def arguments_in(places: Places, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return what was given in these places."""
    found = [args[at] for at, _ in places if at is not None and at < len(args)]
    return found + [kwargs[name] for _, name in places if name in kwargs]


class SilentPlaces(dict[Any, Places]):
    """:func:`silent_places` of every function that was asked for."""

    def __missing__(self, func: Callable[..., Any]) -> Places:
        places = self[func] = silent_places(func)
        return places
