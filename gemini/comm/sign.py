"""What a rank says of itself to the others, and what they have seen of it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_NOT_THE_PROGRAM = {"gemini", "torch", "contextlib"}  # packages


@dataclass(frozen=True)
class Sign:
    """What a rank lets the others see: ``beat`` grows while its interpreter runs, ``calls`` is how many calls
    it has begun that ranks make together, ``doing`` says what the last one does and ``place`` where in the
    program, ``waits`` whether it is in it, ``other`` what it waits for with some of them alone, ``begun`` how
    many collectives of all ranks it has begun, ``computed`` tenths of a second that its thread has computed,
    ``pulse`` where its process can be asked whether it is alive, and ``left`` why its calls have ended."""

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
        """Whether it waits for other ranks, here or with some of them; or has begun more collectives of all
        ranks than the ``begun`` of one that waits, which are the program's own. Such a collective may run
        beside the program: only a thread that has not computed either is taken for one that waits."""
        return self.waits or bool(self.other) or self.begun > begun

    @property
    def state(self) -> tuple[object, ...]:
        """What changes when it gets on."""
        return self.calls, self.waits, self.other, self.begun, self.computed

    @property
    def what(self) -> str:
        """What it waits for."""
        return self.other or self.doing

    def __str__(self) -> str:
        if self.left:
            return f"{self.left} after {self.calls} calls together; the last one {self.doing}"
        at = f", at {self.place}" if self.place else ""
        where = f", and {self.other}" if self.other else ""
        return f"last {self.doing} (call {self.calls}{', not over' if self.waits else ''}{at}){where}"


@dataclass
class Seen:
    """The last sign of another rank, since when its beat and its state are what they are, and when its
    process has last shown that it is alive: by a beat or by an answer of its pulse."""

    sign: Sign
    beat_s: float
    state_s: float
    alive_s: float

    @classmethod
    def at(cls, now: float) -> Seen:
        """Nothing yet, from ``now`` on."""
        return cls(Sign(), now, now, now)

    def forgive(self, now: float) -> None:
        """Begin to watch again: what was read last is old, and no silence."""
        self.beat_s = self.state_s = self.alive_s = now

    def answer(self, now: float) -> None:
        """Note that its process has answered."""
        self.alive_s = now

    def take(self, sign: Sign, now: float) -> bool:
        """Note its newest ``sign``; say whether its beat goes on."""
        goes_on = sign.beat != self.sign.beat
        if goes_on:
            self.beat_s = self.alive_s = now
        if sign.state != self.sign.state:
            self.state_s = now
        self.sign = sign
        return goes_on


def own_place() -> str:
    """Return the innermost line of the calling thread that is neither this library's nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_PROGRAM:
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def computed_seconds(clock: int) -> float:
    """Return how long the thread has computed that has ``clock`` (:func:`time.pthread_getcpuclockid`); 0
    where it has ended."""
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0
