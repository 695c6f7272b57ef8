"""Turn Ctrl-C into a request that the training loop answers between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """While entered: the first SIGINT, SIGTERM or SIGUSR1 is noted, the second raises KeyboardInterrupt at
    once.

    ``notify`` is called from the handler, so it must not write to a buffered stream. Outside the main thread,
    where Python takes no handlers, signals stay as they are. The previous handlers come back on exit.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.signum: int | None = None
        self._notify = notify
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether a signal asked the run to end."""
        return self.signum is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._on_signal) for signum in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.signum = signum
        self._notify()
