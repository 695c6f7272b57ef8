"""Which managed parameter lies where: for what comes back from elsewhere as plain memory."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from torch._C import DisableTorchFunctionSubclass as PlainTensors

if TYPE_CHECKING:
    from gemini.runtime.param import ManagedParameter

# Windows of living models do not overlap.
_by_address: WeakValueDictionary[int, ManagedParameter] = WeakValueDictionary()


def remember(param: ManagedParameter) -> None:
    """Have :func:`parameter_at` know ``param``, for as long as it is managed."""
    with PlainTensors():
        if param.numel():
            _by_address[param.data_ptr()] = param


def parameter_at(address: int) -> ManagedParameter | None:
    """Return the managed parameter in whose memory ``address`` lies."""
    from gemini.runtime import living  # whose managers need parameters

    if not living.has_windows_at(address):
        return None
    found = _by_address.get(address)
    if found is None:
        with PlainTensors():
            at = (p for begin, p in list(_by_address.items()) if begin < address < begin + p.nbytes)
            found = next(at, None)
    return found if hasattr(found, "_slot") else None  # or it is an ordinary one again
