"""Modes that watch operators: DataFlow records which parameters each tensor depends on, OperatorTrace which
operators run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that copy, fill or reshape and combine no elements.
_COPIES = ("alias", "clone", "contiguous", "copy", "detach", "lift_fresh", "resolve_conj", "to_copy")
_VIEWS = ("permute", "reshape", "reshape_alias", "squeeze", "t", "transpose", "unsqueeze", "view")
_FILLS = ("empty_like", "fill", "full_like", "masked_fill", "ones_like", "zero", "zeros_like", "unsafe_view")
_NEW = ("empty_strided", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
_STRUCTURAL = frozenset((*_COPIES, *_VIEWS, *_FILLS, *_NEW))  # without the _ of variants
_REDUCED_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
# Functions that hand elements to code that no torch mode sees.
_ESCAPES = frozenset((torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr))


class DataFlow:
    """Follows parameters and gradients through all operators within a ``with`` block.

    Exact for the operators that run: it knows for each storage which parameters its contents depend on.
    Afterwards each attribute names the first operator of its kind, or is "":

    Attributes:
        mixed: combined two parameters.
        reduced: combined elements of one parameter.
        read: turned elements into a Python value.
        drawn: drew random numbers.
    """

    def __init__(self, owned: Iterable[Iterable[torch.Tensor]]) -> None:
        """``owned``: the tensors of each parameter."""
        self.mixed = self.reduced = self.read = self.drawn = ""
        self._owners: dict[int, frozenset[int]] = {}
        self._kept: list[
            torch.UntypedStorage
        ] = []  # kept alive so that no new storage gets the address of an old one
        for owner, tensors in enumerate(owned):
            for tensor in tensors:
                self._add(tensor, frozenset((owner,)))
        self._modes = ExitStack()

    def __enter__(self) -> DataFlow:
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.close()

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operator that has run."""
        name = str(func._schema.name).rpartition("::")[2]
        values = [*args, *kwargs.values()]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = self.drawn or name
        if name.startswith("_foreach_"):
            self._note_lists(name, values, result)
            return
        tensors = list(_tensors(values))
        owners = self._owners_of(tensors)
        if not owners:
            return
        if len(owners) > 1:
            self.mixed = self.mixed or name
        pointwise = torch.Tag.pointwise in func.tags or name.strip("_") in _STRUCTURAL
        if not pointwise and any(t.numel() > 1 and self._owners_of([t]) for t in tensors):
            self.reduced = self.reduced or name
        made = list(_tensors([result]))
        if not made and result is not None:
            self.read = self.read or name
        written = func._schema.arguments
        by_name = {**dict(zip((a.name for a in written), args, strict=False)), **kwargs}
        changed = [by_name[a.name] for a in written if a.is_write and by_name.get(a.name) is not None]
        for tensor in (*made, *_tensors(changed)):
            self._add(tensor, owners)

    def read_by(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        """Record a function that read elements of tensors without an operator."""
        if self._owners_of(_tensors(args)):
            self.read = self.read or str(getattr(func, "__name__", func))

    def _note_lists(self, name: str, values: Sequence[Any], result: Any) -> None:
        """Record an operator over lists; each output element depends on the inputs at its index."""
        lists = [value for value in values if isinstance(value, (list, tuple)) and _holds_tensors(value)]
        shared = self._owners_of(value for value in values if isinstance(value, torch.Tensor))
        made = [result] if isinstance(result, (list, tuple)) else []
        for row in zip(*lists, *made, strict=True):
            owners = self._owners_of(row[: len(lists)]) | shared
            if len(owners) > 1:
                self.mixed = self.mixed or name
            if owners and name in _REDUCED_LISTS and row[0].numel() > 1:
                self.reduced = self.reduced or name
            for tensor in (*row[len(lists) :], *(row[:1] if name.endswith("_") else ())):
                self._add(tensor, owners)

    def _add(self, tensor: torch.Tensor, owners: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._owners:
            self._kept.append(storage)
        self._owners[key] = self._owners.get(key, frozenset()) | owners

    def _owners_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for tensor in tensors:
            found |= self._owners.get(tensor.untyped_storage()._cdata, frozenset())
        return found


class OperatorTrace(TorchDispatchMode):
    """Records the operators that run within a ``with`` block: the name of each, and the numbers that it is
    called with, but for those of shapes. Two traces are equal if they depend on no size.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[tuple[str, tuple[float, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func._schema.name)
        computes = torch.Tag.pointwise in func.tags or "::_foreach_" in name
        values = [*args, *(kwargs or {}).values()] if computes else []
        numbers = tuple(value for value in values if isinstance(value, (int, float)))
        self.operators.append((name, numbers))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, flow: DataFlow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flow = flow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._flow.note(func, args, kwargs or {}, result)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, flow: DataFlow) -> None:
        super().__init__()
        self._flow = flow

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ESCAPES:
            self._flow.read_by(func, args)
        return func(*args, **(kwargs or {}))


def _holds_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], torch.Tensor)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
