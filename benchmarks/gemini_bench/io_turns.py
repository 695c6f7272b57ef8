"""Contenders that write and read whole files in turns, so that a drifting disk does not decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gemini.errors import StateError
from gemini_bench.paired import in_turn

WARMUP_ROUNDS = 1  # places get their blocks on the disk, and pages of memory theirs

WRITE, READ = "write", "read"
DIRECTIONS = (WRITE, READ)


@dataclass(frozen=True)
class Mover:
    """Something that writes, or reads, a file from its beginning to its end and returns the seconds.

    ``verify`` says whether what is read is what was written; None where that is somebody else's business.
    """

    name: str
    write: Callable[[], float]
    read: Callable[[], float]
    verify: Callable[[], bool] | None = None


def run_turns(movers: Sequence[Mover], repeats: int, nbytes: int) -> dict[str, Any]:
    """Have everyone write once and then everyone read once per round; return the seconds as plain data.

    The result has, per direction, what :class:`gemini_bench.paired.Timings` takes.

    Raises:
        StateError: a mover reads something else than it wrote: its times mean nothing.
    """
    for mover in movers:
        if mover.verify is not None and not mover.verify():
            raise StateError(f"{mover.name!r} reads something else than it wrote")
    seconds: dict[str, dict[str, list[float]]] = {
        direction: {mover.name: [] for mover in movers} for direction in DIRECTIONS
    }
    for number in range(WARMUP_ROUNDS + repeats):
        for direction in DIRECTIONS:
            for mover in in_turn(movers, number):
                elapsed = mover.write() if direction == WRITE else mover.read()
                if number >= WARMUP_ROUNDS:
                    seconds[direction][mover.name].append(elapsed)
    return {
        direction: {"seconds": found, "nbytes": dict.fromkeys(found, nbytes)}
        for direction, found in seconds.items()
    }
