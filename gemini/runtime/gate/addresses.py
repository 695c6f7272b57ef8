"""Which managed parameter lies where: for what comes back from elsewhere as plain memory."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors


class ParametersByAddress:
    """The managed parameters of one model. Weakly: they keep the model, not the other way round."""

    def __init__(self) -> None:
        self._params: WeakValueDictionary[int, torch.nn.Parameter] = WeakValueDictionary()

    def add(self, param: torch.nn.Parameter) -> None:
        """Know ``param``, for as long as it is managed, if it has memory: on ``meta`` all are at 0."""
        with PlainTensors():
            if param.numel() and param.data_ptr():
                self._params.setdefault(param.data_ptr(), param)

    def at(self, address: int) -> torch.nn.Parameter | None:
        """Return the parameter in whose memory ``address`` lies."""
        found = self._params.get(address)
        if found is None:
            with PlainTensors():
                params = list(self._params.items())
                found = next((p for begin, p in params if begin < address < begin + p.nbytes), None)
        return found if hasattr(found, "_slot") else None  # or it is an ordinary one again


def span_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes lie between the beginning of the first element and the end of the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize
