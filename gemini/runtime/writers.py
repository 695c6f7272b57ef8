"""Which operands a torch function is about to write to, as far as can be seen before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "div"),
        *("mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    )
) | {"__setitem__", "__set__"}
_KEYWORDS = ("out", "inplace", "max_norm")  # those of torch's functions with which some write to an operand
_STATISTICS = frozenset(("batch_norm", "instance_norm"))  # write their second and third argument


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


def _is_mutable(func: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> bool:
    overloads = [func] if isinstance(func, OpOverload) else [getattr(func, one) for one in func.overloads()]
    arguments = [argument for overload in overloads for argument in overload._schema.arguments]
    return any(
        each.alias_info is not None and each.alias_info.is_write and not each.is_out for each in arguments
    )


def _is_torchs(func: Callable[..., Any]) -> bool:
    owner = getattr(func, "__module__", None) or getattr(func, "__objclass__", type(func)).__module__
    return owner in ("builtins", "_operator") or owner.partition(".")[0] == "torch"
