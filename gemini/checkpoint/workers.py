"""Threads that carry out reads and writes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from gemini.system.threads import start_thread

_Work = Callable[[], None]


class Workers:
    """A few threads; close them. Unlike those of concurrent.futures they take work also while the program
    ends."""

    def __init__(self, num_threads: int) -> None:
        """Start the threads. Raises ThreadError, with none left behind."""
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                name = f"gemini-checkpoint-io-{number}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                start_thread(thread, "reads and writes of checkpoints")
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
            thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
