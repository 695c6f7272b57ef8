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


class InterruptAt:
    """Sends SIGINT to this process at the ``number``-th "line" or "call" that it executes in some files."""

    def __init__(self, number: int, event: str, files: tuple[str, ...]) -> None:
        self._left = number
        self._event = event
        self._files = files

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Be what :func:`sys.settrace` calls."""
        if event == "call" and not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "call" and frame.f_lasti >= 0 and not _GENERATORS_GO_ON:
            return self
        if event == self._event:
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted(action: Callable[[], Any], number: int, event: str, files: tuple[str, ...]) -> bool:
    """Run ``action`` with Ctrl-C at one line or call in ``files``; say whether it came to that."""
    gradients = torch.is_grad_enabled()
    sys.settrace(InterruptAt(number, event, files))
    try:
        action()
    except KeyboardInterrupt:
        # Left disabled where it came between the last line of ``with torch.no_grad()`` and its end.
        torch.set_grad_enabled(gradients)
        return True
    finally:
        sys.settrace(None)
    return False
