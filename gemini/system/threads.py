"""Starting threads, which the system may refuse, and the processors that there are for them."""

from __future__ import annotations

import errno
import os
import threading

from gemini.errors import ThreadError


def start_thread(thread: threading.Thread, purpose: str) -> None:
    """Start ``thread``, which is for ``purpose``. Raises ThreadError."""
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread": Python keeps no errno
        raise ThreadError(errno.EAGAIN, f"cannot start a thread for {purpose}: {error}") from error


def usable_processors() -> set[int]:
    """Return the processors that this process may use; all there are where the system does not say."""
    try:
        return os.sched_getaffinity(0)
    except OSError:  # a sandbox forbids the call
        return set(range(os.cpu_count() or 1))
