"""Starting threads: where the system refuses, the error says what the thread was for, and the way out."""

from __future__ import annotations

import errno
import threading

from gemini.errors import ThreadError


def start_thread(thread: threading.Thread, purpose: str) -> None:
    """Start ``thread``, which is for ``purpose``. Raises ThreadError."""
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread": Python keeps no errno
        raise ThreadError(errno.EAGAIN, f"cannot start a thread for {purpose}: {error}") from error
