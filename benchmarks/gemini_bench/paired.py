"""Contenders that take turns in one process, so that their times can be compared pair by pair."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gemini.errors import StateError
from gemini_bench.record import Row

# OpenMP's threads spin for a few milliseconds after their work: they must not do so on the next one's time.
PAUSE_SECONDS = 0.02
Turn = TypeVar("Turn")

WARMUP_ROUNDS = 2  # the first makes states, the second finds every page in place


@dataclass(frozen=True)
class Contender:
    """Something to time. ``nbytes``: what one run must move at least.

    ``sample``: some of what the runs so far have computed; those of contenders that do the same job agree.
    ``prepare``: what comes before every run, in nobody's time.
    """

    name: str
    run: Callable[[], object]
    nbytes: float
    sample: Callable[[], Tensor] | None = None
    prepare: Callable[[], object] = lambda: None


def wall_seconds(run: Callable[[], object], synchronize: Callable[[], None] = lambda: None) -> float:
    """Return the seconds until ``run``, and the work that ``synchronize`` waits for, are done."""
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def run_paired(
    contenders: Sequence[Contender],
    repeats: int,
    *,
    timed: Callable[[Callable[[], object]], float] = wall_seconds,
) -> dict[str, Any]:
    """Run every contender once per round and return the seconds of each, as plain data; ``timed`` runs one
    and returns them.

    ``cores``: processor time over time, to see that a setting for the number of threads was honoured.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    cores: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(WARMUP_ROUNDS + repeats):
        for contender in in_turn(contenders, number):
            contender.prepare()
            time.sleep(PAUSE_SECONDS)
            busy = time.process_time()
            elapsed = timed(contender.run)
            if number >= WARMUP_ROUNDS:
                seconds[contender.name].append(elapsed)
                cores[contender.name].append((time.process_time() - busy) / elapsed)
    return {
        "seconds": seconds,
        "nbytes": {contender.name: contender.nbytes for contender in contenders},
        "cores": {name: statistics.median(found) for name, found in cores.items()},
    }


def in_turn(contenders: Sequence[Turn], number: int) -> list[Turn]:
    """Return the order of one round: everyone comes first as often, and after different neighbours."""
    first = number % len(contenders)
    order = [*contenders[first:], *contenders[:first]]
    return order[::-1] if number // len(contenders) % 2 else order


def require_same_job(contenders: Sequence[Contender], tolerance: float) -> None:
    """Raise StateError if the samples of contenders differ: then their times compare nothing."""
    samples = [(c.name, c.sample().float()) for c in contenders if c.sample is not None]
    for name, sample in samples[1:]:
        error = (sample - samples[0][1]).abs().max().item()
        if not error <= tolerance:
            raise StateError(
                f"{name!r} and {samples[0][0]!r} should compute the same but differ by up to {error:g} "
                f"(allowed: {tolerance:g})"
            )


@dataclass(frozen=True)
class Spread:
    """The median of some readings, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, readings: Sequence[float]) -> Spread:
        """Summarize at least one reading."""
        return cls(statistics.median(readings), min(readings), max(readings))


class Timings:
    """The result of ``run_paired``, as figures."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._seconds: dict[str, list[float]] = found["seconds"]
        self._nbytes: dict[str, float] = found["nbytes"]

    def __contains__(self, name: str) -> bool:
        return name in self._seconds

    def nbytes(self, name: str) -> float:
        """Return the bytes that one run must move."""
        return self._nbytes[name]

    def milliseconds(self, name: str) -> Spread:
        """Return the time of one run."""
        return Spread.of([1e3 * seconds for seconds in self._seconds[name]])

    def rate(self, name: str) -> Spread:
        """Return the bytes that must be moved over the time, in GB/s."""
        return Spread.of([self._nbytes[name] / seconds / 1e9 for seconds in self._seconds[name]])

    def ratio(self, name: str, other: str) -> Spread:
        """Return the time over another contender's, pair by pair."""
        pairs = zip(self._seconds[name], self._seconds[other], strict=True)
        return Spread.of([mine / theirs for mine, theirs in pairs])

    def share(self, name: str, limit: str) -> Spread:
        """Return the rate in bytes over another contender's, pair by pair."""
        weight = self._nbytes[name] / self._nbytes[limit]
        pairs = zip(self._seconds[name], self._seconds[limit], strict=True)
        return Spread.of([weight * theirs / mine for mine, theirs in pairs])

    def excess(self, name: str, other: str, count: int) -> Spread:
        """Return the microseconds beyond another contender's time for each of ``count``, pair by pair."""
        pairs = zip(self._seconds[name], self._seconds[other], strict=True)
        return Spread.of([1e6 * (mine - theirs) / count for mine, theirs in pairs])

    def fastest(self, names: Sequence[str]) -> str:
        """Return the name with the lowest median time."""
        return min(names, key=lambda name: statistics.median(self._seconds[name]))


@dataclass(frozen=True)
class SpreadRow(Row):
    """A row whose value is a median, with the lowest and the highest reading."""

    low: float = math.nan
    high: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON record."""
        return {**super().to_dict(), "low": self.low, "high": self.high}


class AbsentRow(Row):
    """A row with the reason why there is no figure."""

    def __init__(self, what: str) -> None:
        super().__init__(what, math.nan, "")

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON record; its value is null."""
        return {**super().to_dict(), "value": None}


@dataclass(frozen=True)
class UnmeasuredRow(Row):
    """A row with a target that cannot be judged here: it is neither met nor missed."""

    reason: str = ""

    @property
    def met(self) -> bool | None:
        """Return None: no verdict."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as it stands in the JSON record, with the reason; its value is null."""
        return {**super().to_dict(), "value": None, "not_measured": self.reason}


def unmeasured_row(what: str, unit: str, target: float, reason: str) -> UnmeasuredRow:
    """Return a row of a target that cannot be judged here, and why."""
    return UnmeasuredRow(f"{what}: not measured, {reason}", math.nan, unit, target, reason=reason)


def spread_row(
    what: str, spread: Spread, unit: str, target: float | None = None, *, at_least: bool = False
) -> SpreadRow:
    """Return a row of the median with its range."""
    return SpreadRow(what, spread.median, unit, target, at_least, spread.low, spread.high)


def filled(numel: int, dtype: torch.dtype, *, scale: float, seed: int) -> Tensor:
    """Return ``numel`` normal numbers of one standard deviation; a stretch of 2**20 over and over.

    Every page is touched. Torch draws 100 million in seconds, copies them in a fraction of one.
    """
    stretch = min(numel, 2**20)
    drawn = torch.randn(stretch, generator=torch.Generator().manual_seed(seed)).mul_(scale).to(dtype)
    result = torch.empty(numel, dtype=dtype)
    for start in range(0, numel, stretch):
        part = result[start : start + stretch]
        part.copy_(drawn[: part.numel()])
    return result
