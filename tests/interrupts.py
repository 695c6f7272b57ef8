"""Ctrl-C at a chosen place of the library's own code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

# Python 3.10 runs no ``finally`` of a generator whose tracer raises as it goes on, which no signal does.
_GENERATORS_GO_ON = sys.version_info >= (3, 11)

Tracer = Callable[[FrameType, str, object], Any]
_KEPT: list[Tracer] = []


def interrupt_at(number: int, event: str, files: tuple[str, ...]) -> Tracer:
    """Return a tracer that sends SIGINT to this process at the ``number``-th "line" or "call" in some files.

    It lives as long as the process and, where it counts calls, no frame refers to it. Once, in a process
    that had run hundreds of other tests, the tracer of then, an object that only CPython's trace state and
    the frames referred to, was freed while in use. What gave a reference too many back was not found:
    counted after each of 500 interrupts of torch's writers, with and without torch.compile before, they
    come out even.
    """
    left = number

    def trace(frame: FrameType, happened: str, _argument: object) -> Tracer | None:
        nonlocal left
        if happened == "call" and not frame.f_code.co_filename.endswith(files):
            return None
        goes_on = happened == "call" and frame.f_lasti >= 0
        if happened == event and (_GENERATORS_GO_ON or not goes_on):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace if event == "line" else None

    _KEPT.append(trace)
    return trace


def interrupted(action: Callable[[], Any], number: int, event: str, files: tuple[str, ...]) -> bool:
    """Run ``action`` with Ctrl-C at one line or call in ``files``; say whether it came to that."""
    return _traced(action, interrupt_at(number, event, files))


def _traced(action: Callable[[], Any], trace: Tracer) -> bool:
    gradients = torch.is_grad_enabled()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        # Left disabled where it came between the last line of ``with torch.no_grad()`` and its end.
        torch.set_grad_enabled(gradients)
        return True
    finally:
        sys.settrace(None)
    return False


def interrupted_within(
    action: Callable[[], Any], number: int, functions: tuple[Callable[..., Any], ...]
) -> bool:
    """Run ``action`` with Ctrl-C at the ``number``-th line in ``functions``; say whether it came to that."""
    codes = {function.__code__ for function in functions}
    tracer = interrupt_at(number, "line", ("",))

    def trace(frame: FrameType, happened: str, argument: object) -> Any:
        return tracer(frame, happened, argument) if frame.f_code in codes else None

    return _traced(action, trace)
