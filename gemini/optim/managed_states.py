"""ManagedStates: optimizer states that live in chunks, as ``optimizer.state`` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch

from gemini.errors import StateError
from gemini.optim.managed_optimizer import ManagedOptimizer
from gemini.optim.state_exchange import counted_steps, entries
from gemini.runtime import ManagedSlot, read_state


def refuse_write() -> NoReturn:
    """Raise StateError: what was to be replaced lies in chunks."""
    raise StateError(
        "states live in the model's chunks, and optimizer.state is to be read: load_state_dict() replaces "
        "them, and with {**optimizer.state_dict(), 'state': {}} they begin anew"
    )


class ManagedStates(MutableMapping[Any, Mapping[str, Any]]):
    """The state of each parameter that has one; of others of the optimizer it is empty, as in torch.

    To be read: ``load_state_dict()`` changes states, and what else would raises StateError.
    Reading moments copies them out of their chunks, one at a time; over ranks all of them read together.
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
    """The state of one parameter, by torch's names; each tensor is a copy, made when it is asked for. torch
    refuses to write to it: an update would not see that."""

    def __init__(self, optimizer: ManagedOptimizer, slot: ManagedSlot) -> None:
        self._optimizer, self._slot = optimizer, slot

    def __getitem__(self, name: str) -> Any:
        if name not in entries(self._optimizer, self._slot):
            raise KeyError(name)
        self._optimizer.require_complete("state")
        beside = counted_steps(self._optimizer, self._slot)
        if name in beside:
            return _to_be_read(beside[name])
        (state,) = (s for s in self._optimizer.states_of(self._slot.group) if s.name == name)
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


def _to_be_read(value: Any) -> Any:
    """Return a tensor's memory as an inference tensor, which torch refuses to write to; else ``value``."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.inference_mode():
        place = value.storage_offset(), value.shape, value.stride()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage(), *place)
