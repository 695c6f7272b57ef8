"""Backward passes on a thread of their own, as autograd runs those of a GPU's tensors.

Autograd numbers its nodes by thread. Here both threads are made to give the same numbers, which they do on a
GPU sooner or later: nodes that backward makes have those of the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch.autograd import graph
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gemini.runtime.intercept.backward import next_node_number

# How far backward's numbers begin below the next one of the caller, by turns.
_BELOW = (1, 7, 19, 2, 40, 3, 11, 5)


def advance_node_number(number: int) -> None:
    """Have this thread's next node be ``number``, or a later one."""
    leaf = torch.zeros((), requires_grad=True)
    with torch.enable_grad():
        while next_node_number() < number:
            leaf.clone()


def on_a_thread_of_its_own(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on a thread that has made no node: advancing another one to its number takes no time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with ThreadPoolExecutor(1) as own:
            own.submit(test, *args, **kwargs).result()

    return run


class _DeviceThread:
    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._caller = threading.get_ident()
        self._num_passes = 0
        advance_node_number(5_000)  # the other thread begins at 0

    def close(self) -> None:
        self._pool.shutdown()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._caller or _get_current_dispatch_mode_stack():
            return self._run(*args, **kwargs)  # within a pass; and modes belong to a thread
        wanted = next_node_number() - _BELOW[self._num_passes % len(_BELOW)]
        self._num_passes += 1
        tracks, overrides = torch.is_grad_enabled(), torch._C._is_torch_function_enabled()

        def run() -> Any:
            advance_node_number(wanted)
            plain = nullcontext() if overrides else torch._C.DisableTorchFunctionSubclass()
            with torch.set_grad_enabled(tracks), plain:
                return self._run(*args, **kwargs)

        return self._pool.submit(run).result()


@contextmanager
def backward_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each backward pass of the block on another thread."""
    thread = _DeviceThread(graph._engine_run_backward)
    with monkeypatch.context() as patch:
        patch.setattr(graph, "_engine_run_backward", thread)
        patch.setattr(torch.autograd, "_engine_run_backward", thread)
        try:
            yield
        finally:
            thread.close()
