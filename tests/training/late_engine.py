"""LateEngine: transfers that take their time, at random; everything else as the engine does it."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gemini import _C

MOST_TIMES = 10.0  # a transfer is late by up to so many times what it takes

_Engine = _C.TransferEngine  # the real one: tests put the late one in its place
_Job = tuple[int, Callable[[_C.TransferEngine], int]]


@dataclass(frozen=True)
class LateResult:
    """A ``TransferResult`` with another ticket."""

    ticket: int
    ok: bool
    errno: int
    path: str
    offset: int
    message: str
    begin_s: float
    end_s: float


class _LateLink:
    """One link: a thread that does one transfer after the other, with an engine of its own.

    Half of the transfers move their bytes late, the others report late, so that bytes that are looked at too
    early are not there yet, and room that is taken too early is still in use.
    """

    def __init__(self, file: _C.AsyncFile | None, seed: str, report: Callable[[LateResult], None]) -> None:
        self.engine = _Engine(file)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.num_late = 0
        self.own_s = 0.0
        self._chance = random.Random(seed)
        self._report = report
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        latest_s = 0.0
        while (job := self.jobs.get()) is not None:
            number, start = job
            moves_late = self._chance.random() < 0.5
            if moves_late:
                self._be_late(latest_s)
            start(self.engine)
            self.engine.drain()
            (done,) = self.engine.poll()
            latest_s = done.end_s - done.begin_s
            self.own_s += latest_s
            if not moves_late:
                self._be_late(latest_s)
            self._report(
                LateResult(
                    number,
                    done.ok,
                    done.errno,
                    done.path,
                    done.offset,
                    done.message,
                    done.begin_s,
                    time.perf_counter(),
                )
            )

    def _be_late(self, own_s: float) -> None:
        self.num_late += 1
        time.sleep(self._chance.uniform(0, MOST_TIMES) * own_s)


class LateEngine:
    """Stands in for a TransferEngine.

    Transfers of one link end in the order of submission, those of different links in any; ``seed`` says how
    late.
    """

    def __init__(self, file: _C.AsyncFile | None = None, *, seed: int = 0) -> None:
        self._condition = threading.Condition()
        self._tickets = itertools.count(1)
        self._done: list[LateResult] = []
        self.num_in_flight = 0
        self.links = {
            link: _LateLink(file, f"{seed} {link.name}", self._report)
            for link in (_C.Link.H2D, _C.Link.D2H, _C.Link.DISK_READ, _C.Link.DISK_WRITE)
        }

    def copy(self, dst: int, src: int, nbytes: int, link: _C.Link) -> int:
        """Start a copy; return its ticket."""
        return self._submit(link, lambda engine: engine.copy(dst, src, nbytes, link))

    def read(self, dst: int, nbytes: int, offset: int, link: _C.Link) -> int:
        """Start reading from the file; return the ticket."""
        return self._submit(link, lambda engine: engine.read(dst, nbytes, offset, link))

    def write(self, src: int, nbytes: int, offset: int, link: _C.Link) -> int:
        """Start writing to the file; return the ticket."""
        return self._submit(link, lambda engine: engine.write(src, nbytes, offset, link))

    def poll(self) -> list[LateResult]:
        """Return what was reported since the last call, each once."""
        with self._condition:
            done, self._done = self._done, []
            return done

    def wait_any(self, timeout_s: float) -> bool:
        """Block until poll would return something or nothing is in flight; return the former."""
        with self._condition:
            self._condition.wait_for(lambda: self._done or not self.num_in_flight, timeout_s)
            return bool(self._done)

    def close(self) -> None:
        """Complete all transfers and stop the threads."""
        for link in self.links.values():
            link.jobs.put(None)
        for link in self.links.values():
            link.thread.join()
            link.engine.close()

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what the engines of the links count."""
        return {
            link.name.lower(): late.engine.stats()[link.name.lower()] for link, late in self.links.items()
        }

    def _submit(self, link: _C.Link, start: Callable[[_C.TransferEngine], int]) -> int:
        with self._condition:
            number = next(self._tickets)
            self.num_in_flight += 1
        self.links[link].jobs.put((number, start))
        return number

    def _report(self, result: LateResult) -> None:
        with self._condition:
            self._done.append(result)
            self.num_in_flight -= 1
            self._condition.notify_all()
