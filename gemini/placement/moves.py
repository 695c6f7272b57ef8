"""Moves: small changes of a plan that may shorten what its operators wait for."""

from __future__ import annotations

import random

import numpy as np

from gemini.placement.intervals import Flags
from gemini.placement.problem import PlanProblem

_REACH = 24  # moments before a wait in which what is read or written delays it
_MOST_GIVEN_UP = 4  # intervals that one move gives up for another
_PLAIN = 0.3  # share of moves that look at no wait


def move_near_a_wait(
    problem: PlanProblem, keep: Flags, waits: list[float], chance: random.Random
) -> Flags | None:
    """Return another plan that fits: one more interval is kept, mostly one whose transfers come before a
    wait, and some that are in its way are not. None: no such change was found."""
    them = problem.intervals
    moved: Flags = keep.copy()
    if sum(waits) <= 0.0 or chance.random() < _PLAIN:
        for _ in range(chance.randint(1, 3)):
            i = chance.randrange(len(keep))
            moved[i] = not moved[i]
        return moved if problem.fits(moved) else None
    (wait,) = chance.choices(range(len(waits)), weights=waits)
    back = chance.randint(1, _REACH)
    moments = problem.num_moments
    near = ((wait - them.end) % moments < back) | ((wait - them.begin) % moments < back)
    wanted = np.nonzero(near & ~keep)[0]
    if not len(wanted):
        return None
    one = int(wanted[chance.randrange(len(wanted))])
    moved[one] = True
    for _ in range(_MOST_GIVEN_UP + 1):
        over = np.nonzero(them.kept_bytes(moved) > problem.limit_bytes)[0]
        if not len(over):
            return moved
        at = int(over[chance.randrange(len(over))])
        around = (them.begin < at) & (at < them.end) | (them.begin < at + moments) & (at + moments < them.end)
        given = np.nonzero(around & moved)[0]
        given = given[given != one]
        if not len(given):
            return None
        moved[int(given[chance.randrange(len(given))])] = False
    return None
