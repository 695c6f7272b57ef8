"""Effort: how much planning may try, counted and not timed, so that every rank finds the same plan."""

from __future__ import annotations

from gemini.placement.problem import PlanProblem

# In units of about 0.03 us: less than a second for a thousand chunks and moments.
_MOST = 25_000_000
_UNITS_PER_SECOND = 30_000_000
_STEPS_WORTH = 120  # planning may take as long as this many steps wait without it


class Effort:
    """What is left of it, and what things cost: ``run``, a simulation of three steps from an empty DEVICE;
    ``step``, one more step of a simulation; ``change``, making another plan of one; ``solve``, a program."""

    def __init__(self, problem: PlanProblem, waiting_seconds: float) -> None:
        """``waiting_seconds``: what a step waits for transfers without a plan."""
        chunks, moments = len(problem.iteration.chunk_bytes), problem.num_moments
        rows = len(problem.intervals) + moments
        self.run = 2_000 + moments * (chunks * 7 // 20 + 110)
        self.step = self.run // 5
        self.change = 3_000 + 6 * rows
        self.solve = rows * (150 + rows // 3)
        self.left = min(_MOST, int(_STEPS_WORTH * waiting_seconds * _UNITS_PER_SECOND))

    def spend(self, cost: int) -> None:
        """Take ``cost``, whatever is left; less than nothing gives back."""
        self.left -= cost

    def afford(self, cost: int) -> bool:
        """Take ``cost`` if that much is left; say whether it was."""
        if self.left < cost:
            return False
        self.left -= cost
        return True
