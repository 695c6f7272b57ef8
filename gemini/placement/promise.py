"""Promise: what the next steps of a plan are expected to take, at the pace that the machine has now."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemini.memstats.trace import LinkSpeed
from gemini.placement.policies import Hints
from gemini.placement.problem import Iteration, Machine
from gemini.placement.simulator import Simulation, simulate

# A pace that differs by less is the same one: a promise is not made again for noise.
DRIFT = 0.02


@dataclass(frozen=True)
class Pace:
    """How fast a machine goes through a step: the seconds that one computes, the speed of each link.

    ``num_steps``: how many planned steps it is the middle of; 0 for what the plan was made from.
    """

    computing_seconds: float
    links: tuple[LinkSpeed, ...]
    num_steps: int = 0

    def updated(self, measured: Pace) -> Pace:
        """Return ``measured``, with the links of this pace where it says nothing of them."""
        known = {link.name: link for link in measured.links}
        return replace(measured, links=tuple(known.get(link.name, link) for link in self.links))

    def differs(self, other: Pace) -> bool:
        """Say whether computing or some link is faster or slower by more than ``DRIFT``."""
        pairs = [(self.computing_seconds, other.computing_seconds)]
        speeds = {link.name: link.bytes_per_second for link in other.links}
        pairs += [(link.bytes_per_second, speeds[link.name]) for link in self.links if link.name in speeds]
        return any(abs(now - before) > DRIFT * before for before, now in pairs)


@dataclass(frozen=True)
class Promise:
    """What a step takes in the simulator at some pace."""

    pace: Pace
    simulation: Simulation


def promise_at(pace: Pace, iteration: Iteration, machine: Machine, hints: Hints | None) -> Promise:
    """Simulate the step with its plan at ``pace``, its periods in the proportions that ``iteration`` has.

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
