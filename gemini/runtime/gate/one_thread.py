"""OneThread: a model is for one thread at a time; a second one is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from gemini.errors import StateError

_Method = TypeVar("_Method", bound=Callable[..., Any])

_BACKWARD = "backward"


class OneThread:
    """Which thread is in a call of one model (forward, backward, step, ...), and in which.

    Autograd may run a backward pass on threads of its own while the one that called it waits: those are in
    the model as well. Once it has left, any other thread may follow.
    """

    def __init__(self) -> None:
        self.holder = 0  # the thread within a call, 0: none; every PreOp looks at it
        self._last = threading.get_ident()  # the one that was in one last, or wrapped the model
        self._doing = ""
        self._other_pass: Callable[[], int] = lambda: 0
        self._lock = threading.RLock()  # held within a call

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
            yield
        finally:
            self.holder, self._doing = outer
            self._lock.release()

    def refuse_other(self, doing: str = "an operator") -> None:
        """Raise StateError if a thread is in the model beside which this one must not be."""
        holder, its_doing = self.holder, self._doing
        if holder not in (0, threading.get_ident()) and not self._serves_backward():
            raise _refusal(doing, holder, its_doing)

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


def in_one_thread(doing: str) -> Callable[[_Method], _Method]:
    """Make a method of a managed model, or of its optimizer, a call that one thread at a time is in."""

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with getattr(self, "_gemini", self).manager.threads.inside(doing):
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
