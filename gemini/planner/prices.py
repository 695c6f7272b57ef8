"""The result of pricing a combination: seconds of a step and memory of each rank, or why it does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.planner.rotor import Item
from gemini.planner.space import Combination


@dataclass(frozen=True)
class RankPrice:
    """The memory of a rank along ``pp``. ``device_bytes``: its peak; ``lower_bytes``: model data below
    DEVICE."""

    device_bytes: int
    lower_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Price:
    """The time and memory of a step.

    Attributes:
        seconds: of the busiest rank, by resource: computing, Adam, idle, each axis, transfers.
        begins: the blocks with which stages begin, except the first stage.
        recompute: the blocks that are recomputed one by one.
        groups: recomputed groups of several blocks; each group keeps only its input.
        most_waiting: the longest time that any rank waits for transfers, in seconds.
    """

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
        """The bytes that the rank lacks."""
        return self.needed_bytes - self.given_bytes


def is_better(one: Price | Misfit, other: Price | Misfit) -> bool:
    """Return whether ``one`` is better: a price beats a misfit, then the shorter step or the fewer missing
    bytes wins."""
    if isinstance(one, Price):
        return isinstance(other, Misfit) or one.step_seconds < other.step_seconds
    return isinstance(other, Misfit) and one.missing_bytes < other.missing_bytes
