"""LayerwisePlan: a strategy for every block of a model. Uniform plans can run; other plans report the
properties that must be uniform."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

from gemini.errors import ConfigError
from gemini.parallel.layout import Layout

_SCHEDULES = ("1f1b", "gpipe")
_SHOWN = 3  # ranges of blocks that a reason names


@dataclass(frozen=True, order=True)
class Strategy:
    """How the ranks of a stage share a block. ``zero``: ZeRO stage of the ranks along dp and sp;
    ``recompute``: the block is recomputed in backward."""

    tp: int = 1
    sp: int = 1
    dp: int = 1
    zero: int = 0
    recompute: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks that share the block."""
        return self.tp * self.sp * self.dp

    @property
    def copies(self) -> int:
        """Number of ranks over which ZeRO cuts."""
        return self.dp * self.sp

    def __str__(self) -> str:
        sizes = [f"{name} {size}" for name in ("tp", "sp", "dp") if (size := getattr(self, name)) > 1]
        parts = [" x ".join(sizes) or "one rank"]
        if self.copies > 1:
            parts.append(f"ZeRO {self.zero}")
        return ", ".join([*parts, "recompute"] if self.recompute else parts)


@dataclass(frozen=True)
class LayerwisePlan:
    """How each block of a model is trained.

    Attributes:
        batch: number of samples in a step of all ranks.
        chunks: number of micro-batches.
        strategies: one per block.
        outside: strategies of the layers before and behind the blocks.
        division: number of blocks of each stage.

    Raises:
        ConfigError: the numbers contradict each other.
    """

    batch: int
    chunks: int
    strategies: tuple[Strategy, ...]
    outside: tuple[Strategy, Strategy]
    division: tuple[int, ...]
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if not self.division or min(self.division) < 1 or sum(self.division) != len(self.strategies):
            raise ConfigError(
                f"stages have {', '.join(map(str, self.division))} of {len(self.strategies)} blocks; each "
                "needs one or more"
            )
        if min(self.batch, self.chunks) < 1:
            raise ConfigError(f"{self.batch} samples in {self.chunks} micro-batches: both are 1 or more")
        if self.schedule not in _SCHEDULES:
            raise ConfigError(f"schedule is {self.schedule!r}; it must be {' or '.join(_SCHEDULES)}")
        if len(self.division) == 1 and self.outside[0] != self.outside[1]:
            raise ConfigError("on one stage what runs before and behind the blocks has one strategy")
        for stage, (first, last) in enumerate(self.ranges):
            own = [
                *self.strategies[first:last],
                *self.outside[: stage == 0],
                *self.outside[2 - (stage == self.pp - 1) :],
            ]
            if len({each.ranks for each in own}) > 1:
                raise ConfigError(f"stage {stage} has strategies for different numbers of ranks")

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The blocks ``[first, last)`` of each stage."""
        ends = list(accumulate(self.division))
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.division)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.strategies[first].ranks for first, _ in self.ranges)

    def microbatch(self, strategy: Strategy) -> int | None:
        """Return the number of samples of a micro-batch on a rank; None if the batch does not divide
        evenly."""
        return None if self.batch % (strategy.dp * self.chunks) else self.batch // (strategy.dp * self.chunks)

    def not_uniform(self) -> tuple[str, ...]:
        """Return the properties that must be made uniform for the plan to run; empty if it runs.
        Recomputation and the lengths of stages may differ."""
        reasons = [
            reason
            for name, of in _UNIFORM
            if (reason := _differing(name, of, self.strategies, self.outside)) is not None
        ]
        for each in sorted({replace(each, zero=0, recompute=False) for each in self.strategies}):
            if self.microbatch(each) is None:
                reasons.append(uneven(self.batch, each.dp, self.chunks))
        return tuple(reasons)

    def layout(self) -> Layout:
        """Return the layout of a uniform plan.

        Raises:
            ConfigError: the plan is not uniform; the message lists the differences.
        """
        if reasons := self.not_uniform():
            raise ConfigError(f"the plan does not run: {'; '.join(reasons)}")
        one = self.strategies[0]
        return Layout(dp=one.dp, pp=self.pp, sp=one.sp, tp=one.tp)


def uneven(batch: int, dp: int, chunks: int) -> str:
    """Return the error text for samples that do not divide among ranks and micro-batches."""
    return f"{batch} samples over dp {dp} do not divide into {chunks} micro-batches of one size"


def _zero_of(each: Strategy) -> str:
    return f"ZeRO {each.zero}" if each.copies > 1 else "no ZeRO"


_UNIFORM: tuple[tuple[str, Callable[[Strategy], Any]], ...] = (
    ("tp", lambda each: each.tp),
    ("sp", lambda each: each.sp),
    ("dp", lambda each: each.dp),
    ("the ZeRO stage", _zero_of),
)


def _differing(
    name: str, of: Callable[[Strategy], Any], strategies: Sequence[Strategy], outside: Sequence[Strategy]
) -> str | None:
    """Return why a property must be uniform; None if it is."""
    if len({of(each) for each in (*strategies, *outside)}) == 1:
        return None
    found = [f"{value} in {where}" for value, where in _stretches(of, strategies)]
    more = [f"and {len(found) - _SHOWN} more stretches"] if len(found) > _SHOWN else []
    ends = [
        f"{of(each)} {place} the blocks" for each, place in zip(outside, ("before", "behind"), strict=True)
    ]
    return f"{name} must be one, and is {', '.join([*found[:_SHOWN], *more, *ends])}"


def _stretches(of: Callable[[Strategy], Any], strategies: Iterable[Strategy]) -> list[tuple[Any, str]]:
    """Return each value with the range of consecutive blocks that have it, as text."""
    found = []
    for value, own in groupby(enumerate(strategies), key=lambda pair: of(pair[1])):
        places = [at for at, _ in own]
        some = f"blocks {places[0]} to {places[-1]}" if len(places) > 1 else f"block {places[0]}"
        found.append((value, some))
    return found
