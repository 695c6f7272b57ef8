"""Which managed parameter lies where: for what comes back from elsewhere as plain memory."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini.runtime import living

if TYPE_CHECKING:
    from gemini.runtime.param import ManagedParameter


class ParametersByAddress:
    """The managed parameters of one model. Weakly: they keep the model, not the other way round."""

    def __init__(self) -> None:
        self._params: WeakValueDictionary[int, ManagedParameter] = WeakValueDictionary()

    def add(self, param: ManagedParameter) -> None:
        """Know ``param``, for as long as it is managed."""
        with PlainTensors():
            if param.numel():
                self._params.setdefault(param.data_ptr(), param)

    def at(self, address: int) -> ManagedParameter | None:
        """Return the parameter in whose memory ``address`` lies."""
        found = self._params.get(address)
        if found is None:
            with PlainTensors():
                params = list(self._params.items())
                found = next((p for begin, p in params if begin < address < begin + p.nbytes), None)
        return found if hasattr(found, "_slot") else None  # or it is an ordinary one again


def parameter_at(address: int) -> ManagedParameter | None:
    """Return the parameter of a model that is not closed in whose memory ``address`` lies."""
    manager = living.owner_of(address)
    return manager.parameters.at(address) if manager is not None else None
