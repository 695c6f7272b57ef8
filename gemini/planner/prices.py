"""Prices: how long a step of a combination takes and what each rank holds, or why it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.planner.rotor import Item
from gemini.planner.space import Combination


@dataclass(frozen=True)
class RankPrice:
    """A rank along ``pp``. ``device_bytes``: the most at a time; ``lower_bytes``: of model data below
    DEVICE."""

    device_bytes: int
    lower_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Price:
    """A step of ``step_seconds``. ``seconds``: of the busiest rank, by resource: computing, Adam, idle, each
    axis, transfers. ``begins``: blocks with which stages begin, but the first; ``recompute``: blocks that
    do; ``groups``: those of several blocks, in groups that keep one input each; ``most_waiting``: seconds
    for which a rank waits for transfers at most."""

    combination: Combination
    step_seconds: float
    seconds: dict[str, float]
    ranks: tuple[RankPrice, ...]
    begins: tuple[int, ...]
    sent_bytes: dict[str, int]
    recompute: tuple[int, ...] = ()
    groups: tuple[Item, ...] = ()
    most_waiting: float = 0.0


@dataclass(frozen=True)
class Misfit:
    """A combination that does not fit: a rank needs ``needed_bytes`` of ``tier``, and has ``given_bytes``."""

    combination: Combination
    rank: int
    tier: str
    needed_bytes: int
    given_bytes: int

    @property
    def missing_bytes(self) -> int:
        """How much more would do."""
        return self.needed_bytes - self.given_bytes


def is_better(one: Price | Misfit, other: Price | Misfit) -> bool:
    """Say whether one is a price, where the other is none or a longer step, or the nearer miss of two."""
    if isinstance(one, Price):
        return isinstance(other, Misfit) or one.step_seconds < other.step_seconds
    return isinstance(other, Misfit) and one.missing_bytes < other.missing_bytes
