"""Programs of others, run for so long and no longer."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def seconds_in(filename: str, most: float, refusal: Exception) -> Iterator[None]:
    """Raise ``refusal`` in the block at the first line of what was compiled as ``filename`` that begins after
    ``most`` seconds of this thread's processor time, which a busy machine does not make longer. Another
    tracer of this thread, such as a debugger's, rests meanwhile."""
    end = time.thread_time() + most

    def check(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and time.thread_time() > end:
            raise refusal
        return check

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return check if frame.f_code.co_filename == filename else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
