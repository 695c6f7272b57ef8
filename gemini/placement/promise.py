"""Promise: the expected time of the next steps of a plan, at the machine's current pace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemini.memstats.trace import LinkSpeed
from gemini.placement.policies import Hints
from gemini.placement.problem import Iteration, Machine
from gemini.placement.simulator import Simulation, simulate

# A smaller difference counts as noise, and the promise is not made again.
DRIFT = 0.02


@dataclass(frozen=True)
class Pace:
    """How fast a machine runs a step: its computing seconds and the speed of each link.

    ``num_steps``: it is the median of this many planned steps; 0 for the pace from which the plan was made.
    """

    computing_seconds: float
    links: tuple[LinkSpeed, ...]
    num_steps: int = 0

    def updated(self, measured: Pace) -> Pace:
        """Return ``measured``, with missing links taken from this pace."""
        known = {link.name: link for link in measured.links}
        return replace(measured, links=tuple(known.get(link.name, link) for link in self.links))

    def differs(self, other: Pace) -> bool:
        """Say whether computing or a link is faster or slower by more than ``DRIFT``."""
        pairs = [(self.computing_seconds, other.computing_seconds)]
        speeds = {link.name: link.bytes_per_second for link in other.links}
        pairs += [(link.bytes_per_second, speeds[link.name]) for link in self.links if link.name in speeds]
        return any(abs(now - before) > DRIFT * before for before, now in pairs)


@dataclass(frozen=True)
class Promise:
    """The simulation of a step at some pace."""

    pace: Pace
    simulation: Simulation


def promise_at(pace: Pace, iteration: Iteration, machine: Machine, hints: Hints | None) -> Promise:
    """Simulate the step with its plan at ``pace``; its periods keep their proportions in ``iteration``.

    Raises:
        OutOfBudgetError: the step does not fit the machine.
    """
    recorded = sum(iteration.seconds)
    if recorded > 0:
        seconds = tuple(pace.computing_seconds / recorded * period for period in iteration.seconds)
    else:
        seconds = (pace.computing_seconds / max(1, iteration.num_moments),) * iteration.num_moments
    at_pace = replace(iteration, seconds=seconds)
    return Promise(pace, simulate(at_pace, replace(machine, links=pace.links), hints))
