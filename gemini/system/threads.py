"""Starts threads, which the system may refuse; worker threads for reads and writes; the usable processors."""

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
    """Start ``thread``; ``purpose`` is for the message. Raises ThreadError."""
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread": Python drops the errno
        raise ThreadError(errno.EAGAIN, f"cannot start a thread for {purpose}: {error}") from error


def usable_processors() -> set[int]:
    """Return the processors that this process may use; all processors if the system does not say."""
    try:
        return os.sched_getaffinity(0)
    except OSError:  # a sandbox forbids the call
        return set(range(os.cpu_count() or 1))


def wait_until_idle(name: str, seconds: float) -> bool:
    """Wait until all threads of this process with a system name that begins with ``name`` are asleep, at most
    ``seconds``. Return whether they are; True if the system does not show its threads.
    """
    ends, idle_looks = time.monotonic() + seconds, 0
    while idle_looks < 2:  # twice: a thread that slept while waiting for the GIL runs in between
        is_idle = not any(_runs(task, name) for task in _TASKS.glob("*"))
        if not is_idle and time.monotonic() > ends:
            return False
        idle_looks = idle_looks + 1 if is_idle else 0
        time.sleep(_LOOK_SECONDS)
    return True


def _runs(task: Path, name: str) -> bool:
    try:
        _, said = (task / "stat").read_text().split(" (", 1)
    except OSError:  # the thread has ended
        return False
    found, state = said.rsplit(") ", 1)
    return found.startswith(name) and state[0] != "S"


class Workers:
    """A few worker threads; close them. Unlike those of concurrent.futures they accept work during
    interpreter shutdown.
    """

    def __init__(
        self, num_threads: int, name: str = "checkpoint-io", purpose: str = "reads and writes of checkpoints"
    ) -> None:
        """Start the threads. Raises ThreadError; then no thread remains."""
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
        """Queue ``work``. The future completes when it has run, with its error if it raised one."""
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
        """Finish the queued work and end the threads. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            # A worker itself may run this, if it dropped the last reference to the owner.
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
