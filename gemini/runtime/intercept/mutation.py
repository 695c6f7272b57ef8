"""What an operator writes to, by its schema, its name and its keywords.

Torch moves the version counters of what its operators write to *and* return. What they write to besides,
such as the parameters of a fused optimizer, and whatever operators of libraries write to, is said in the
schema alone. What declares nothing and moves no counter cannot be known to write. Who must know before an
operator runs what it may write to asks :func:`possibly_written`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

# Places of an argument: its position, None where it has to be named; and its name.
Places = tuple[tuple[int | None, str], ...]

_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "div"),
        *("mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    )
) | {"__setitem__", "__set__"}
_KEYWORDS = ("out", "inplace", "max_norm")  # those of torch's functions with which some write to an operand
_STATISTICS = frozenset(("batch_norm", "instance_norm"))  # write their second and third argument


def silent_places(func: Callable[..., Any]) -> Places:
    """Return the arguments that ``func`` writes to and whose counters it may leave; () for what has no
    schema, such as a Python function."""
    places: dict[tuple[int | None, str], None] = {}
    for schema in _schemas(func):
        aliases = [returned.alias_info for returned in schema.returns if returned.alias_info is not None]
        announces = schema.name.startswith("aten::") and bool(aliases)
        announced = set().union(*(alias.before_set for alias in aliases))
        for position, argument in enumerate(schema.arguments):
            if not _is_written(argument) or "Tensor" not in str(argument.type):
                continue
            if not announces or not argument.alias_info.before_set <= announced:  # that of a list is empty
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


def possibly_written(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return those of the arguments that ``func`` may write to, or into which something in them is.

    Torch's own functions say it by their names, keywords or schemas; of any other function all arguments are.
    """
    name = getattr(func, "__name__", "")
    everything = (args, kwargs)
    if isinstance(func, (OpOverload, OpOverloadPacket)) and _is_mutable(func):
        return everything
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        single = args and not name.startswith("_fused")
        return (args[0], kwargs.get("out")) if single else everything
    given = [kwargs.get(keyword) for keyword in _KEYWORDS]
    if any(value is not None and value is not False for value in given):
        return everything
    if name in _STATISTICS:
        return (args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
    return () if _is_torchs(func) else everything


def _is_mutable(func: Callable[..., Any]) -> bool:
    arguments = [argument for schema in _schemas(func) for argument in schema.arguments]
    return any(_is_written(each) and not each.is_out for each in arguments)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_torchs(func: Callable[..., Any]) -> bool:
    owner = getattr(func, "__module__", None) or getattr(func, "__objclass__", type(func)).__module__
    return owner in ("builtins", "_operator") or owner.partition(".")[0] == "torch"
