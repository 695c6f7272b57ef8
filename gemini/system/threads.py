"""Threads: starting them, which the system may refuse, a few that carry out reads and writes, and the
processors that there are for them."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from gemini.errors import ThreadError

_Work = Callable[[], None]

_TASKS = Path("/proc/self/task")
_LOOK_SECONDS = 0.001


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


def wait_until_idle(name: str, seconds: float) -> bool:
    """Wait until every thread of this process whose name, as the system knows it, begins with ``name`` is
    asleep, at most ``seconds``. Return whether they are, True where the system does not show its threads."""
    ends, idle_looks = time.monotonic() + seconds, 0
    while idle_looks < 2:  # one that waited for Python's lock has had it in between
        is_idle = not any(_runs(task, name) for task in _TASKS.glob("*"))
        if not is_idle and time.monotonic() > ends:
            return False
        idle_looks = idle_looks + 1 if is_idle else 0
        time.sleep(_LOOK_SECONDS)
    return True


def _runs(task: Path, name: str) -> bool:
    try:
        _, said = (task / "stat").read_text().split(" (", 1)
    except OSError:  # it has ended
        return False
    found, state = said.rsplit(") ", 1)
    return found.startswith(name) and state[0] != "S"


class Workers:
    """A few threads; close them. Unlike those of concurrent.futures they take work also while the program
    ends."""

    def __init__(
        self, num_threads: int, name: str = "checkpoint-io", purpose: str = "reads and writes of checkpoints"
    ) -> None:
        """Start the threads. Raises ThreadError, with none left behind."""
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                thread = threading.Thread(target=self._run, name=f"gemini-{name}-{number}", daemon=True)
                start_thread(thread, purpose)
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, work: _Work) -> Future[None]:
        """Have ``work`` done in turn; the future ends when it has, and has what it raised."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._work.put(run)
        return done

    def close(self) -> None:
        """Do what was submitted and end the threads. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # which dropped the last reference to its owner
                thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
