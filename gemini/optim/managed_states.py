"""ManagedStates: the read-only ``optimizer.state`` of an optimizer that has its states in chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gemini.errors import StateError
from gemini.optim.managed_optimizer import ManagedOptimizer
from gemini.optim.state_exchange import counted_steps, entries
from gemini.runtime.adopt import read_state
from gemini.runtime.storage.model_storage import ManagedSlot


def refuse_write() -> NoReturn:
    """Raise StateError: states in chunks are read-only."""
    raise StateError(
        "states are in the model's chunks, and optimizer.state is read-only: load_state_dict() "
        "replaces them; load {**optimizer.state_dict(), 'state': {}} to reset them"
    )


class ManagedStates(MutableMapping[Any, Mapping[str, Any]]):
    """Read-only mapping parameter -> state; other parameters of the optimizer have an empty state, as in
    torch.

    Only ``load_state_dict()`` changes states; every write raises StateError. Reading a moment copies it out
    of its chunk. Over ranks this is collective: all ranks read together.
    """

    def __init__(self, optimizer: ManagedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: Any) -> Mapping[str, Any]:
        slot = getattr(param, "_slot", None)
        if slot in self._optimizer.steps:
            return ManagedState(self._optimizer, slot)
        if slot not in self._optimizer.slots:
            raise KeyError(param)
        return {}

    def __setitem__(self, param: Any, state: Any) -> None:
        refuse_write()

    def __delitem__(self, param: Any) -> None:
        refuse_write()

    def clear(self) -> None:
        """Raise StateError."""
        refuse_write()

    def __contains__(self, param: object) -> bool:
        return getattr(param, "_slot", None) in self._optimizer.steps

    def __iter__(self) -> Iterator[Any]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if p in self)

    def __len__(self) -> int:
        return len(self._optimizer.steps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parameters)"


class ManagedState(MutableMapping[str, Any]):
    """The state of one parameter, read-only, by torch's names. Each tensor is a copy made on access. A write
    raises StateError, because no update would see it.
    """

    def __init__(self, optimizer: ManagedOptimizer, slot: ManagedSlot) -> None:
        self._optimizer, self._slot = optimizer, slot

    def __getitem__(self, name: str) -> Any:
        if name not in entries(self._optimizer, self._slot):
            raise KeyError(name)
        self._optimizer.require_complete("state")
        beside = counted_steps(self._optimizer, self._slot)
        if name in beside:
            return _to_be_read(beside[name])
        (state,) = (s for s in self._optimizer.states_of(self._slot) if s.name == name)
        return _to_be_read(read_state(self._slot, state, self._optimizer.model.manager))

    def __setitem__(self, name: str, value: Any) -> None:
        refuse_write()

    def __delitem__(self, name: str) -> None:
        refuse_write()

    def __iter__(self) -> Iterator[str]:
        return iter(entries(self._optimizer, self._slot))

    def __len__(self) -> int:
        return len(entries(self._optimizer, self._slot))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


class StateCopy(torch.Tensor):
    """A read-only copy of a state tensor. Writing to it or to a view of it raises StateError. Results of
    operators, copies and pickles are ordinary tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, or raise StateError if it writes to a StateCopy."""
        kwargs = kwargs or {}
        written = [kwargs.get("out"), args[0] if args and _writes_to_first(func) else None]
        if any(isinstance(item, cls) for item in tree_leaves(written)):
            refuse_write()
        with torch._C.DisableTorchFunctionSubclass():
            read = [item for item in tree_leaves((args, kwargs)) if isinstance(item, cls)]
            owned = {item.untyped_storage()._cdata for item in read}
            return tree_map(partial(_as_view, owned), func(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.clone().__reduce_ex__(protocol)


def _writes_to_first(func: Any) -> bool:
    """Return whether the name of an operator or tensor method says that it changes its first argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in _WRITES or func == _SET_DATA
    return bool(name.endswith("_"))


_IN_PLACE = "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_WRITES = frozenset(("__setitem__", *(f"__i{name}__" for name in _IN_PLACE.split())))
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _as_view(owned: Collection[int], item: Any) -> Any:
    """Return ``item`` as a StateCopy if its storage is in ``owned``; else unchanged."""
    if not isinstance(item, torch.Tensor) or item.untyped_storage()._cdata not in owned:
        return item
    return item.as_subclass(StateCopy)


def _to_be_read(value: Any) -> Any:
    """Return a tensor as a StateCopy; other values unchanged."""
    return value.detach().as_subclass(StateCopy) if isinstance(value, torch.Tensor) else value
