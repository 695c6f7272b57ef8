"""What must not be used now, and why: tensors that are locked, a model that another thread is in, memory that
is gone; and what lies at an address. A StateError says so.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini import _C
from gemini.chunk import ChunkManager, TensorIds
from gemini.errors import EvictedAccessError, StateError
from gemini.runtime.gate.waiting import NO_SNAPSHOT

logger = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])


_BACKWARD = "backward"
_is_profiled = torch._C._autograd._profiler_enabled


class TensorLock:
    """Managed tensors, by id, that are in no state to be used, and why."""

    def __init__(self) -> None:
        self.tensors: set[int] = set()  # always the same object: every PreOp looks at it
        self._reason = ""

    def add(self, tensors: Iterable[int], reason: str) -> None:
        """Lock ``tensors`` too; ``reason`` says why what is locked is, and what to do."""
        self.tensors.update(tensors)
        self._reason = reason

    def open(self) -> None:
        """Lock nothing any more."""
        self.tensors.clear()

    def refuse(self, tensors: Iterable[int]) -> None:
        """Raise StateError if any of ``tensors`` is locked."""
        if not self.tensors.isdisjoint(tensors):
            raise StateError(self._reason)

    def refuse_all(self) -> None:
        """Raise StateError if anything is locked."""
        if self.tensors:
            raise StateError(self._reason)


class OneThread:
    """Which thread is in a call of one model (forward, backward, step, ...), and in which.

    Autograd may run a backward pass on threads of its own while the one that called it waits: those are in
    the model as well. Once it has left, any other thread may follow. Operators outside of calls take turns,
    as those of loaders and writers that have a pool of threads for a state dict.
    """

    def __init__(self) -> None:
        self.holder = 0  # the thread within a call, 0: none; every PreOp looks at it
        self._last = threading.get_ident()  # the one that was in one last, or wrapped the model
        self._doing = ""
        self._other_pass: Callable[[], int] = lambda: 0
        self._lock = threading.RLock()  # held within a call
        self.operators = threading.RLock()  # held within an operator outside of calls

    def watch_passes(self, other_pass: Callable[[], int]) -> None:
        """Ask ``other_pass`` for another thread that runs a backward pass of this model, 0: there is none."""
        self._other_pass = other_pass

    @contextmanager
    def inside(self, doing: str) -> Iterator[None]:
        """Be in the call ``doing`` for the block. Calls may be within each other.

        Raises:
            StateError: another thread is in the model.
        """
        if self._serves_backward():
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise _refusal(doing, self.holder, self._doing)
        outer = self.holder, self._doing
        try:
            self.refuse_second_pass(doing)
            self.holder = self._last = threading.get_ident()
            self._doing = doing
            with self.operators:  # that of another thread, begun before
                pass
            yield
        finally:
            self.holder, self._doing = outer
            self._lock.release()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Have operators of this thread and of others take turns for the block, though it is in a call."""
        held = self.holder, self._doing
        self.holder, self._doing = 0, ""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self.holder, self._doing = held

    def refuse_other(self, doing: str = "an operator") -> None:
        """Raise StateError if a thread is in the model beside which this one must not be."""
        holder, its_doing = self.holder, self._doing
        if holder not in (0, threading.get_ident()) and not self._serves_backward():
            raise _refusal(doing, holder, its_doing)

    def take_turn(self, doing: str = "an operator") -> threading.RLock | None:
        """Wait until no other thread is within an operator, and return the lock that is to be released when
        this one ends; None: a call holds the model.

        Raises:
            StateError: another thread runs a backward pass.
        """
        if self.holder:  # and a PreOp refuses others
            return None
        self.operators.acquire()
        try:
            self.refuse_second_pass(doing)
        except BaseException:
            self.operators.release()
            raise
        return self.operators

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Take a turn for the block. Raises as :meth:`take_turn`."""
        lock = self.take_turn()
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def forget_others(self) -> None:
        """This is a forked process: the threads that held anything are the parent's."""
        self.holder, self._lock, self.operators = 0, threading.RLock(), threading.RLock()

    def refuse_second_pass(self, doing: str = "backward") -> None:
        """Raise StateError if another thread runs a backward pass of this model."""
        other = self._other_pass()
        if other:
            raise _refusal(doing, other, "a backward pass")

    @property
    def only_looks(self) -> bool:
        """Whether this is not the thread that was in the model last: it may look, but change nothing."""
        return self._last != threading.get_ident()

    def _serves_backward(self) -> bool:
        """Say whether this thread runs a backward pass that the one in the model waits for."""
        other = self.holder != threading.get_ident()
        return other and self._doing == _BACKWARD and torch._C._current_graph_task_id() != -1


def in_one_thread(doing: str, *, shown_as: str | None = None) -> Callable[[_Method], _Method]:
    """Make a method of a managed model, or of its optimizer, a call that one thread at a time is in.

    torch.profiler shows it as the range ``gemini::doing``, or as that of ``shown_as``.
    """
    shown = f"gemini::{shown_as or doing}"

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with getattr(self, "_gemini", self).manager.threads.inside(doing):
                if not _is_profiled():
                    return method(self, *args, **kwargs)
                with torch.profiler.record_function(shown):
                    return method(self, *args, **kwargs)

        return cast(_Method, call)

    return decorate


def _refusal(doing: str, other: int, its_doing: str) -> StateError:
    return StateError(
        f"{_name(threading.get_ident())} calls {doing} while {_name(other)} is in {its_doing or 'a call'} of "
        "the same model; a model is for one thread at a time: hold one threading.Lock around each thread's "
        "use of it, from the forward pass to the end of step(), or wrap a copy of the module for each thread"
    )


def _name(ident: int) -> str:
    found = next((thread.name for thread in threading.enumerate() if thread.ident == ident), None)
    return f"thread {found!r}" if found is not None else f"thread {ident}"


def closed(tensors: TensorIds, *, on_host: bool = False) -> None:
    """Raise StateError: the model was closed."""
    raise StateError("the managed model was closed; its parameters hold no memory any more")


def in_child(_tensors: TensorIds = (), *, on_host: bool = False) -> None:
    """Raise StateError: the memory is the parent's."""
    raise StateError(
        "managed parameters cannot be used in a forked process: their memory stays with the parent; "
        "pass copies, for example param.detach().clone(), or start the process with 'spawn'"
    )


class RefusingGate(ABC):
    """Stands in for the gate of tensors whose values nobody may use: what an operator asks of it raises."""

    number = -1  # before all others: it refuses before they are pinned
    resident = False
    cuts_tensors = False
    mixes_types = False
    snapshot = NO_SNAPSHOT

    @abstractmethod
    def pre_op(self, *_tensors: Any) -> NoReturn:
        """Raise."""

    @property
    def threads(self) -> NoReturn:
        self.pre_op()

    @property
    def raw_uses(self) -> NoReturn:
        self.pre_op()

    @property
    def windows(self) -> NoReturn:
        self.pre_op()


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
