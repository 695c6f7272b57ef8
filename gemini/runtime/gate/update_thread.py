"""The thread on which the CPU makes updates beside the one that trains (docs/notes/gpu.md)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from gemini.system.threads import Workers


class UpdateThread:
    """The thread beside the one that trains on which the CPU makes updates; started for the first of them."""

    def __init__(self) -> None:
        self._workers: Workers | None = None
        self._end: Callable[[], object] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Have ``work``, which raises nothing, done after what was submitted before. Raises ThreadError."""
        if self._workers is None:
            self._workers = Workers(1, "update", "updates by the CPU")
            # Also at exit: what runs uses memory that goes away.
            self._end = weakref.finalize(self, self._workers.close)
        self._workers.submit(work)

    def close(self) -> None:
        """Do what was submitted and end the thread. Idempotent."""
        self._workers = None
        if self._end is not None:
            self._end()


class GivenWork:
    """Work that was given to :class:`UpdateThread`; done once, however often it was given."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._is_given = False

    def give(self, thread: UpdateThread) -> None:
        """Have it done. Ctrl-C may come between any two lines: :meth:`wait` gives it once more."""
        thread.submit(self._do)
        self._is_given = True

    def wait(self, thread: UpdateThread) -> None:
        """Wait until it is done. Raises what it raised."""
        if not self._is_given:
            self.give(thread)
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def _do(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self._error = error
        self._is_over.set()
