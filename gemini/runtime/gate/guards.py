"""Guards against forbidden uses of managed memory, which raise StateError or EvictedAccessError: locked
tensors, a model that another thread uses, freed memory, stray accesses. Also finds the parameter at an
address."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch._C import DisableTorchFunctionSubclass as PlainTensors

from gemini import _C
from gemini.chunk import ChunkManager
from gemini.chunk.chunk import TensorIds
from gemini.errors import EvictedAccessError, StateError

logger = logging.getLogger(__name__)
_Method = TypeVar("_Method", bound=Callable[..., Any])


_BACKWARD = "backward"
_is_profiled = torch._C._autograd._profiler_enabled
# Returns autograd's id of the backward pass that runs on this thread, -1 if none does.
current_pass: Callable[[], int] = torch._C._current_graph_task_id


class TensorLock:
    """The managed tensors, by id, that must not be used now, and the reason."""

    def __init__(self) -> None:
        self.tensors: set[int] = set()  # always the same set: every PreOp reads it
        self._reason = ""

    def add(self, tensors: Iterable[int], reason: str) -> None:
        """Lock ``tensors`` too. ``reason``: why the locked tensors are locked, and what to do."""
        self.tensors.update(tensors)
        self._reason = reason

    def open(self) -> None:
        """Unlock all tensors."""
        self.tensors.clear()

    def refuse(self, tensors: Iterable[int]) -> None:
        """Raise StateError if any of ``tensors`` is locked."""
        if not self.tensors.isdisjoint(tensors):
            raise StateError(self._reason)

    def refuse_all(self) -> None:
        """Raise StateError if any tensor is locked."""
        if self.tensors:
            raise StateError(self._reason)


class _PassEnd:
    """Queued as a callback of a backward pass, which holds the only reference: a weak reference is dead once
    the pass has ended or raised."""

    def __call__(self) -> None:
        """Do nothing. Autograd calls it at the end of the pass."""


class LatestPass:
    """The latest backward pass that ran nodes of a model, and its thread."""

    def __init__(self) -> None:
        self.number = -1  # autograd's id of the pass
        self.end: Callable[[], object] = lambda: None  # returns None once the pass has ended or raised
        self._thread = 0

    def begin(self, number: int) -> None:
        """Note the pass ``number``, which runs on this thread."""
        end = _PassEnd()
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self.number, self.end, self._thread = number, ref(end), threading.get_ident()

    def other_thread(self) -> int:
        """Return another thread that runs the pass; 0: none, or one of autograd's own threads, which may
        still hold a finished pass of the thread that called it."""
        other = self._thread
        if self.end() is None or other == threading.get_ident() or not _is_python_thread(other):
            return 0
        return other if current_pass() == -1 or _is_python_thread(threading.get_ident()) else 0


def _is_python_thread(ident: int) -> bool:
    """Say whether Python started a thread, rather than autograd."""
    started = (t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
    return ident in started


class OneThread:
    """Admits one thread at a time to the calls of a model (forward, backward, step, ...).

    Autograd may run a backward pass on its own threads while the calling thread waits; these threads are
    admitted as well. After a call has returned, any other thread may call. Operators outside of calls take
    turns, for example in the thread pools of loaders and writers of state dicts.
    """

    def __init__(self) -> None:
        self.holder = 0  # the thread within a call, 0: none; every PreOp reads it
        self._last = threading.get_ident()  # the last thread within a call, or the one that wrapped the model
        self._doing = ""
        self.latest_pass = LatestPass()
        self._lock = threading.RLock()  # held within a call
        self.operators = threading.RLock()  # held within an operator outside of calls

    @contextmanager
    def inside(self, doing: str) -> Iterator[None]:
        """Hold the model in the call ``doing`` for the block. Calls may be nested.

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
            with self.operators:  # wait for another thread's operator
                pass
            yield
        finally:
            self.holder, self._doing = outer
            self._lock.release()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Within a call: let operators of this thread and of others take turns for the block."""
        held = self.holder, self._doing
        self.holder, self._doing = 0, ""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self.holder, self._doing = held

    def refuse_other(self, doing: str = "an operator") -> None:
        """Raise StateError if another thread holds the model, unless this thread runs its backward pass."""
        holder, its_doing = self.holder, self._doing
        if holder not in (0, threading.get_ident()) and not self._serves_backward():
            raise _refusal(doing, holder, its_doing)

    def take_turn(self, doing: str = "an operator") -> threading.RLock | None:
        """Wait until no other thread is within an operator, and return the lock to release when this operator
        ends; None if a call holds the model.

        Raises:
            StateError: another thread runs a backward pass.
        """
        if self.holder:  # the PreOp refuses other threads then
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
        """Reset in a forked child: the threads that held the locks exist in the parent only."""
        self.holder, self._lock, self.operators = 0, threading.RLock(), threading.RLock()

    def refuse_second_pass(self, doing: str = "backward") -> None:
        """Raise StateError if another thread runs a backward pass of this model."""
        other = self.latest_pass.other_thread()
        if other:
            raise _refusal(doing, other, "a backward pass")

    @property
    def only_looks(self) -> bool:
        """Whether this thread is not the last one that was in the model: it may read, but change nothing."""
        return self._last != threading.get_ident()

    def _serves_backward(self) -> bool:
        """Say whether this thread runs a backward pass for the thread that holds the model."""
        other = self.holder != threading.get_ident()
        return other and self._doing == _BACKWARD and current_pass() != -1


def in_one_thread(doing: str, *, shown_as: str | None = None) -> Callable[[_Method], _Method]:
    """Make a method of a managed model or its optimizer a call that holds the model: one thread at a time.

    torch.profiler shows it as the range ``gemini::doing``, or ``gemini::shown_as``.
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
    raise StateError("the managed model was closed, and its parameters no longer have memory; build it again")


def in_child(_tensors: TensorIds = (), *, on_host: bool = False) -> None:
    """Raise StateError: the memory is the parent's."""
    raise StateError(
        "managed parameters cannot be used in a forked process: their memory stays with the parent; "
        "pass copies, for example param.detach().clone(), or start the process with 'spawn'"
    )


class ParametersByAddress:
    """The managed parameters of one model, by address. Weak references: parameters keep the model alive, not
    the other way round."""

    def __init__(self) -> None:
        self._params: WeakValueDictionary[int, torch.nn.Parameter] = WeakValueDictionary()

    def add(self, param: torch.nn.Parameter) -> None:
        """Register ``param`` while it is managed, if it has memory: on ``meta`` all parameters are at address
        0."""
        with PlainTensors():
            if param.numel() and param.data_ptr():
                self._params.setdefault(param.data_ptr(), param)

    def at(self, address: int) -> torch.nn.Parameter | None:
        """Return the parameter that contains ``address``; None if there is none."""
        found = self._params.get(address)
        if found is None:
            with PlainTensors():
                params = list(self._params.items())
                found = next((p for begin, p in params if begin < address < begin + p.nbytes), None)
        return found if hasattr(found, "_slot") else None  # it may have been released since


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the beginning of the first element to the end of the last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


class _StrayLog:
    """Assigns stray accesses to models. One per process, because one fault handler serves all models."""

    def __init__(self) -> None:
        self._models: WeakSet[ChunkManager] = WeakSet()
        self._struck: WeakKeyDictionary[ChunkManager, int] = WeakKeyDictionary()  # chunk; -1: unknown
        self._pid = 0  # of the process that logs unreported accesses at exit

    def join(self, model: ChunkManager) -> int:
        """Watch the memory of ``model``; return the number of stray accesses so far."""
        before = self.sort()
        if not self._models:
            atexit.unregister(self._tell_last)
            atexit.register(self._tell_last)
            self._pid = os.getpid()
        self._models.add(model)
        return before

    def _tell_last(self) -> None:
        """Log stray accesses at exit that no operator has reported."""
        if os.getpid() != self._pid:
            return  # a forked child: the parent logs them
        self.sort()
        for model in list(self._models):
            chunk = self.take(model)
            if chunk is not None:
                logger.error("%s", _stray_error(chunk))

    def sort(self) -> int:
        """Assign the stray accesses since the last call to models; return the total number so far."""
        count = _C.stray_count()
        address = _C.take_stray()
        if address is not None:
            for model in list(self._models):
                chunk = model.chunk_at(address)
                # heal() finds further hits by their poison, unless the chunk has returned to DEVICE since.
                if model.heal() or chunk != -1:
                    self._struck.setdefault(model, chunk)
        return count

    def take(self, model: ChunkManager) -> int | None:
        """Return a chunk of ``model`` with an unreported stray access, once; None if there is none."""
        return self._struck.pop(model, None)


_LOG = _StrayLog()


class Strays:
    """Reports the stray accesses to the memory of one model, each once."""

    def __init__(self, model: ChunkManager) -> None:
        self._model = model
        self.seen = _LOG.join(model)  # process-wide count, which each PreOp compares

    def refuse(self) -> None:
        """Raise EvictedAccessError if there is an unreported stray access."""
        error = self._take()
        if error is not None:
            raise error

    @contextmanager
    def reported_last(self, report: bool) -> Iterator[None]:
        """Report a stray access from before the block after the block has ended, or without ``report`` never.

        Raises:
            EvictedAccessError: there was one, and the block did not raise.
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
        f"memory of evicted chunk {chunk if chunk >= 0 else 'unknown'} was read or written outside "
        "an operator (a numpy view, a writer of files, or a tensor made from a raw pointer); results "
        "and files written from it may contain NaN. Clone the value while it is in use, for example "
        "param.detach().clone(), and save model.state_dict(), not that of the module"
    )
