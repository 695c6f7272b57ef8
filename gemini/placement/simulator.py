"""The simulator: computes the time of a step by running the chunk table itself against a model of time."""

from __future__ import annotations

from dataclasses import dataclass

from gemini import _C
from gemini.memstats.trace import LINKS
from gemini.placement.policies import Hints, make_schedule, with_hints
from gemini.placement.problem import Iteration, Machine

_TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Simulation:
    """A simulated steady step. Link seconds and tier peaks are those of one step.

    ``stall_seconds``: per moment, how long its operator waits for transfers.
    """

    step_seconds: float
    compute_seconds: float
    stall_seconds: tuple[float, ...]
    peak_bytes: dict[str, int]
    link_bytes: dict[str, int]
    link_seconds: dict[str, float]


class Simulator:
    """Runs steps of one iteration on one machine.

    The model: a link carries one transfer at a time, first in, first out; a transfer takes its latency plus
    its bytes over the bandwidth. Reads and writes of a shared disk get half of the bandwidth each. Computing
    takes the recorded time and is not slowed down by transfers.
    """

    def __init__(self, iteration: Iteration, machine: Machine) -> None:
        self._iteration = iteration
        self._order = make_schedule(iteration, None)
        self._native = _C.Simulator(
            chunk_bytes=iteration.chunk_bytes,
            modes=iteration.modes,
            frees=iteration.frees,
            seconds=iteration.seconds,
            budgets=machine.budgets,
            links=[machine.speed(name) for name in LINKS],
            disk_shared=machine.disk_shared,
        )

    def seconds(self, hints: Hints | None, *, after: int = 2, steps: int = 1) -> float:
        """Return the mean time of ``steps`` steps after ``after`` others, to compare plans. Raises
        OutOfBudgetError."""
        return self._native.run(self.schedule(hints), after + steps, steps).seconds

    def seconds_moving(self, hints: Hints | None) -> tuple[float, float]:
        """Return the time of the third step, and the total busy time of its links. Raises
        OutOfBudgetError."""
        step = self._native.run(self.schedule(hints), 3, 1)
        return step.seconds, sum(step.link_seconds)

    def begin(self, hints: Hints | None) -> _C.SimulatedRun:
        """Return a run before its first step. Raises OutOfBudgetError, as its steps do."""
        return self._native.begin(self.schedule(hints))

    def schedule(self, hints: Hints | None) -> _C.Schedule:
        """Return the chunk table's schedule."""
        return self._order if hints is None else with_hints(self._order, hints)

    def run(self, hints: Hints | None, *, told: bool = True) -> Simulation:
        """Return the mean of two steps after two others. Without ``told`` the table does not know the order:
        eviction is LRU, and nothing is prefetched.

        Raises:
            OutOfBudgetError: the step does not fit the machine.
        """
        step = self._native.run(self.schedule(hints), 4, 2, told)
        return Simulation(
            step_seconds=step.seconds,
            compute_seconds=sum(self._iteration.seconds),
            stall_seconds=tuple(step.stall_seconds),
            peak_bytes=dict(zip(_TIERS, step.peak_bytes, strict=True)),
            link_bytes=dict(zip(LINKS, step.link_bytes, strict=True)),
            link_seconds=dict(zip(LINKS, step.link_seconds, strict=True)),
        )


def simulate(iteration: Iteration, machine: Machine, hints: Hints | None = None) -> Simulation:
    """Simulate a steady step, with the order alone (OPT and prefetch) or following ``hints``.

    Raises:
        OutOfBudgetError: it does not fit the machine.
    """
    return Simulator(iteration, machine).run(hints)
