"""What lies at an address: the managed parameter, for what comes back from elsewhere as plain memory; and
stray accesses, to memory of evicted chunks outside operators."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.errors import EvictedAccessError

logger = logging.getLogger(__name__)


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


class _StrayLog:
    """Whose memory stray accesses hit. One per process: one fault handler serves all models."""

    def __init__(self) -> None:
        self._models: WeakSet[ChunkManager] = WeakSet()
        self._struck: WeakKeyDictionary[ChunkManager, int] = WeakKeyDictionary()  # chunk, -1: not known
        self._pid = 0  # of the process that tells of what is left

    def join(self, model: ChunkManager) -> int:
        """Count what hits the memory of ``model``; return how many stray accesses came before."""
        before = self.sort()
        if not self._models:
            atexit.unregister(self._tell_last)
            atexit.register(self._tell_last)
            self._pid = os.getpid()
        self._models.add(model)
        return before

    def _tell_last(self) -> None:
        """Log at the end of the process what no operator has reported."""
        if os.getpid() != self._pid:
            return  # a forked process: the parent tells of it
        self.sort()
        for model in list(self._models):
            chunk = self.take(model)
            if chunk is not None:
                logger.error("%s", _stray_error(chunk))

    def sort(self) -> int:
        """Find out whom the stray accesses since the last call hit; return how many there were ever."""
        count = _C.stray_count()
        address = _C.take_stray()
        if address is not None:
            for model in list(self._models):
                chunk = model.chunk_at(address)
                # What else was hit shows by its poison, unless its chunk has come back since.
                if model.heal() or chunk != -1:
                    self._struck.setdefault(model, chunk)
        return count

    def take(self, model: ChunkManager) -> int | None:
        """Return the chunk of ``model`` that was hit and not reported, once."""
        return self._struck.pop(model, None)


_LOG = _StrayLog()


class Strays:
    """Stray accesses to the memory of one model, each reported once, by this model alone."""

    def __init__(self, model: ChunkManager) -> None:
        self._model = model
        self.seen = _LOG.join(model)  # of all in the process: a PreOp compares

    def refuse(self) -> None:
        """Raise EvictedAccessError where there was one that was not reported yet."""
        error = self._take()
        if error is not None:
            raise error

    @contextmanager
    def reported_last(self, report: bool) -> Iterator[None]:
        """Report one of before the block when the block has ended, not within it; or not at all.

        Raises:
            EvictedAccessError: there was one, and the block raised nothing.
        """
        error = self._take()
        yield
        if error is not None and report:
            raise error

    def _take(self) -> EvictedAccessError | None:
        self.seen = _LOG.sort()
        chunk = _LOG.take(self._model)
        if chunk is None:
            return None
        return _stray_error(chunk)


def _stray_error(chunk: int) -> EvictedAccessError:
    return EvictedAccessError(
        f"memory of evicted chunk {chunk if chunk >= 0 else 'unknown'} was read or written outside an "
        "operator (a numpy view, a writer of files, or a tensor made from a raw pointer); what was made "
        "of it since may be NaN, a file too. Clone the value while it is in use, for example "
        "param.detach().clone(), and save model.state_dict(), not that of the module"
    )
