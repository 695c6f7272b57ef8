"""RankState: what a rank publishes with each heartbeat. LastSeen: the last state read from another rank."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_NOT_THE_PROGRAM = {"gemini", "torch", "contextlib"}  # packages


@dataclass(frozen=True)
class RankState:
    """The state that a rank publishes.

    Attributes:
        beat: grows while the rank's interpreter runs.
        calls: the number of collective calls that it has begun.
        doing: a description of the last call.
        waits: whether the last call is still running.
        place: the line of the program that made the call.
        other: the calls with some of the ranks only for which it waits.
        begun: the number of collectives over all ranks that it has begun.
        computed: CPU time of its thread, in tenths of a second.
        pulse: the address at which its process can be asked whether it is alive.
        left: why it has stopped making calls; "" until then.
    """

    beat: int = 0
    calls: int = 0
    doing: str = "wraps a model"
    waits: bool = False
    place: str = ""
    other: str = ""
    begun: int = 0
    computed: int = 0
    pulse: str = ""
    left: str = ""

    def is_stuck(self, begun: int) -> bool:
        """Return whether the rank waits for others, in this group or another one, or has begun more
        collectives over all ranks than ``begun``, those of a rank that waits; these belong to the program.
        Such a collective may run in the background, so the caller must also check that the thread has not
        computed.
        """
        return self.waits or bool(self.other) or self.begun > begun

    @property
    def progress(self) -> tuple[object, ...]:
        """The fields that change when the rank makes progress."""
        return self.calls, self.waits, self.other, self.begun, self.computed

    @property
    def what(self) -> str:
        """A description of the call that it waits for."""
        return self.other or self.doing

    def __str__(self) -> str:
        if self.left:
            return f"{self.left} after {self.calls} calls together; the last one {self.doing}"
        at = f", at {self.place}" if self.place else ""
        where = f", and {self.other}" if self.other else ""
        return f"last {self.doing} (call {self.calls}{', not over' if self.waits else ''}{at}){where}"


@dataclass
class LastSeen:
    """The last state of another rank, with three times (monotonic seconds): when its beat last changed, when
    its progress last changed, and when its process last proved to be alive, by a beat or a pulse answer.
    """

    state: RankState
    beat_s: float
    progress_s: float
    alive_s: float

    @classmethod
    def at(cls, now: float) -> LastSeen:
        """Return an empty record with all times set to ``now``."""
        return cls(RankState(), now, now, now)

    def restart_times(self, now: float) -> None:
        """Restart the times: states were not read for a while, which is not the rank's silence."""
        self.beat_s = self.progress_s = self.alive_s = now

    def answer(self, now: float) -> None:
        """Record that its process has answered a pulse query."""
        self.alive_s = now

    def take(self, state: RankState, now: float) -> bool:
        """Record its newest ``state``; return whether its beat has changed."""
        goes_on = state.beat != self.state.beat
        if goes_on:
            self.beat_s = self.alive_s = now
        if state.progress != self.state.progress:
            self.progress_s = now
        self.state = state
        return goes_on


def own_place() -> str:
    """Return the innermost line of the calling thread outside this library and torch, as "file:line in
    function"; "" if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_PROGRAM:
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def computed_seconds(clock: int) -> float:
    """Return the CPU time of the thread with ``clock`` (from :func:`time.pthread_getcpuclockid`); 0 if it has
    ended.
    """
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0
