"""Galvatron's cost model over Galvatron's own profiles: reproduces the result of its search for a model and a
machine that it measured.

Times are in milliseconds and sizes in MiB, as in its profiles. Its model assumes: backward takes twice as
long as forward; a gradient exchange and backward slow each other down while they overlap; recomputation is
one more forward; ZeRO leaves ``1/d + 0.003`` of the data that it cuts. Above 20 GiB it reserves a fifth of
the memory, so 21 GiB have less room than 20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from gemini.errors import ConfigError
from gemini.planner.spaces.costs import Cheapest, LayerCosts, cheapest_each

_MIB = 2**20
_BACKWARD = 2.0  # time of backward relative to forward
_CONTEXT_MIB = 1024
_RESERVED, _RESERVED_ABOVE_GIB = 0.2, 20
# Tiny costs that order strategies of equal time: ZeRO 3 and recomputation come first in a row of layers.
_SP_LATER = 1e-10
_LATER = {(True, False): 1e-9, (False, True): 2e-9, (True, True): 3e-9}


@dataclass(frozen=True, order=True)
class ProfiledStrategy:
    """How ranks share a layer. ``tp`` or ``sp`` is 1. ``zero``: 0, 2 or 3."""

    pp: int
    tp: int
    sp: int
    dp: int
    zero: int
    recompute: bool = False

    @property
    def parts(self) -> int:
        """Number of ranks that share one sample."""
        return self.tp * self.sp

    @property
    def copies(self) -> int:
        """Number of ranks over which ZeRO cuts."""
        return self.dp * self.sp

    def __str__(self) -> str:
        """Return Galvatron's notation, such as ``1-4*-2f-c``."""
        text = f"{self.pp}-{self.parts}{'*' if self.parts > 1 else ''}-{self.dp}"
        text += "f" if self.zero == 3 else ""
        return text + ("-c" if self.recompute else "") + ("-sp" if self.sp > 1 else "")


@dataclass(frozen=True)
class OutsideMemory:
    """Memory of embedding and head in MiB, by the degree of tp: weights with gradients and moments, and
    activations of a sample."""

    states: Mapping[int, float]
    activations: Mapping[int, float]


@dataclass(frozen=True)
class Profile:
    """Galvatron's measurements of a model with equal layers, in bf16.

    Attributes:
        forward_ms: forward of one layer for a sample.
        outside_ms: forward of embedding and head for a sample.
        activations: MiB that a layer keeps of a sample, by degree of tp or sp.
        recomputed: the same if the layer is recomputed.
        outside: memory without a pipeline, on the first stage, and on the last stage.
        all_reduce: GiB/s, by (number of ranks, whether they are neighbours).
        send: GiB/s, by pipeline degree.
        all_reduce_ms, all_to_all_ms: times of messages, by ranks and MiB.
        overlap: slowdown of computing and an exchange that run at the same time.
    """

    layers: int
    hidden: int
    sequence: int
    forward_ms: float
    outside_ms: float
    parameter_mib: float
    activations: Mapping[int, float]
    recomputed: float
    outside: tuple[OutsideMemory, OutsideMemory, OutsideMemory]
    all_reduce: Mapping[tuple[int, bool], float]
    send: Mapping[int, float]
    all_reduce_ms: Mapping[int, Mapping[int, float]]
    all_to_all_ms: Mapping[int, Mapping[int, float]]
    overlap: float


@dataclass(frozen=True)
class Task:
    """The input of a search: ``batch`` samples per step on ``ranks`` ranks with ``memory_gib`` each, in
    ``chunks`` micro-batches. ``zero``: the stage of plain data parallelism, 0 or 2. ``uniform``: use one
    strategy for all layers."""

    ranks: int
    batch: int
    chunks: int
    memory_gib: int
    zero: int = 2
    uniform: bool = False


@dataclass(frozen=True)
class Optimum:
    """The result of a search. ``outside``: strategy of embedding and head; ``division``: number of layers of
    each stage."""

    samples_per_second: float
    strategies: tuple[ProfiledStrategy, ...]
    outside: ProfiledStrategy
    division: tuple[int, ...]


def quadratic(times: Mapping[int, float], at: int) -> float:
    """Return the time at sequence length ``at``, by a quadratic fit to the times of other lengths."""
    return float(np.polyval(np.polyfit(list(times), list(times.values()), 2), at))


def linear(times: Mapping[int, float], at: float) -> float:
    """Return the time at size ``at``, by a linear fit to the times of other sizes."""
    return float(np.polyval(np.polyfit(list(times), list(times.values()), 1), at))


def strategies(ranks: int, zero: int = 2, *, layers: int = 2**16) -> tuple[ProfiledStrategy, ...]:
    """Return the strategies of a layer, regardless of the order of methods: 50 for 8 ranks."""
    powers = [2**each for each in range(ranks.bit_length())]
    found = {
        ProfiledStrategy(pp, tp, sp, dp := ranks // (pp * tp * sp), kind if dp > 1 else 0, again)
        for pp in powers
        if pp <= layers
        for each in powers
        if pp * each <= ranks
        for tp, sp in ((each, 1), (1, each))
        for kind in (zero, 3)
        for again in (False, True)
    }
    return tuple(sorted(found))


def optimum(profile: Profile, task: Task) -> Optimum | None:
    """Return the plan with the most samples per second; None: none fits.

    Raises:
        ConfigError: the number of ranks is not a power of two, chunks do not divide the batch, or the profile
            has no figures for this number of ranks.
    """
    if task.ranks < 1 or task.ranks & (task.ranks - 1):
        raise ConfigError(f"ranks are {task.ranks}: Galvatron divides powers of two")
    if task.chunks < 1 or task.batch % task.chunks:
        raise ConfigError(f"{task.chunks} chunks do not divide {task.batch} samples")
    found = (each for rest in _spaces(profile, task) for each in _DegreeSearch(profile, task, *rest).found())
    try:
        return max(found, key=lambda each: each.samples_per_second, default=None)
    except KeyError as error:
        raise ConfigError(f"the profile has no figure for {error}, which {task.ranks} ranks need") from error


def _spaces(profile: Profile, task: Task) -> Iterator[tuple[int, tuple[ProfiledStrategy, ...], float]]:
    """Yield (stages, strategies, buffer in MiB) of each space to search: only tp up to some degree, only sp,
    and both."""
    every = strategies(task.ranks, task.zero, layers=profile.layers)
    samples = task.batch // task.chunks
    for pp in sorted({each.pp for each in every}):
        if pp > task.chunks:
            continue
        group = task.ranks // pp
        least = max(group // max(min(samples, group), 1), 1)
        own = [each for each in every if each.pp == pp and each.dp <= max(min(samples, group), 1)]
        for mode in ("tp", "sp", "both"):
            for degree in [group] if mode == "sp" else [each for each in _powers(group) if each >= least]:
                chosen = tuple(
                    each
                    for each in own
                    if each.parts <= degree
                    and (mode == "both" or (each.sp if mode == "tp" else each.tp) == 1)
                )
                if chosen:
                    buffer = 0.0 if mode == "sp" else _message_mib(profile, samples * degree / group)
                    yield pp, chosen, buffer


def _powers(most: int) -> list[int]:
    return [2**each for each in range(most.bit_length())]


def _message_mib(profile: Profile, samples: float) -> float:
    """Return the MiB of the hidden state of ``samples`` samples in bf16."""
    return samples * profile.sequence * profile.hidden * 2 / _MIB


class _Costs:
    """Seconds and MiB of strategies."""

    def __init__(self, profile: Profile, task: Task) -> None:
        self.profile, self.task = profile, task

    def samples(self, each: ProfiledStrategy) -> int:
        return self.task.batch // self.task.chunks // each.dp

    def _per_mib(self, ranks: int, near: bool) -> float:
        if ranks == 1:
            return 0.0
        speeds = self.profile.all_reduce
        return 1 / speeds.get((ranks, near), speeds[ranks, True])

    def _exchange_per_mib(self, each: ProfiledStrategy) -> float:
        return self._per_mib(each.copies, each.tp == 1)

    def _message_ms(self, each: ProfiledStrategy) -> float:
        """Return the milliseconds of one message of tp or sp. tp gathers or scatters, which is half an
        all-reduce."""
        if each.parts == 1:
            return 0.0
        profile, mib = self.profile, _message_mib(self.profile, self.samples(each))
        times = profile.all_reduce_ms[each.tp] if each.tp > 1 else profile.all_to_all_ms[each.sp]
        found = times[int(mib)] if mib in times else linear(times, mib)
        return found / 2 if each.tp > 1 else found

    def _overlapped_ms(self, exchange_mib: float, per_mib: float, backward: float) -> float:
        slow = self.profile.overlap
        exchange, computing = exchange_mib * per_mib * slow, backward * slow
        if exchange > computing:
            return computing + (exchange - computing) / slow
        return exchange + backward - exchange / slow

    def layer_seconds(self, each: ProfiledStrategy, *, exchanges: bool) -> float:
        """Return the seconds of a layer for a micro-batch, with or without its gradient exchange."""
        samples, profile = self.samples(each), self.profile
        forward = profile.forward_ms * samples / each.parts
        backward = forward * (_BACKWARD + each.recompute)
        weights = profile.parameter_mib / each.tp
        mib = (each.copies - 1) / each.copies * weights  # sent in a ring, in bf16
        per_mib = self._exchange_per_mib(each)
        # tp: two gathers and two scatters in forward, two gathers in backward. sp: two messages in each.
        total = forward + self._message_ms(each) * (6 if each.tp > 1 else 4) * (1.5 if each.recompute else 1)
        total += self._overlapped_ms(mib, per_mib, backward) if exchanges and each.dp > 1 else backward
        if each.zero == 3:
            total += mib / 2 * per_mib
        if each.pp > 1:
            total += each.pp * 2 * _message_mib(profile, samples) / profile.send[each.pp]
        return total / 1000

    def layer_mib(self, each: ProfiledStrategy, stage: int) -> float:
        """Return the MiB of a layer on a stage of a 1F1B pipeline."""
        profile, held = self.profile, self.samples(each) * (each.pp - stage if each.pp > 1 else 1)
        kept = profile.recomputed / each.parts if each.recompute else profile.activations[each.parts]
        return 4 * profile.parameter_mib / each.tp * self._left(each) + kept * held

    def _left(self, each: ProfiledStrategy) -> float:
        """Return the share of weights, gradients and moments (in bf16) that remains on a rank with ZeRO."""
        part = 1 / each.copies + 0.003
        several = 5 / 4 if self.task.chunks > 1 else 1.0  # gradients are summed in fp32
        if each.zero == 3:
            return part * several
        return (7 / 8 * part + 1 / 8) * several if each.zero == 2 else 1.0

    def outside_mib(self, each: ProfiledStrategy) -> list[float]:
        """Return the MiB of embedding and head on each stage."""
        found = [float(_CONTEXT_MIB)] * each.pp
        places = ((0, 0, 1),) if each.pp == 1 else ((0, 1, each.pp), (-1, 2, 1))
        for stage, which, held in places:
            memory = self.profile.outside[which]
            found[stage] += memory.states[each.tp] * self._left(each)
            found[stage] += memory.activations[each.parts] * self.samples(each) * held
        return found

    def outside_seconds(self, each: ProfiledStrategy) -> list[float]:
        """Return the seconds of embedding and head for a micro-batch on each stage, without their gradient
        exchange."""
        found = [0.0] * each.pp
        forward = self.profile.outside_ms * self.samples(each) / each.parts
        tensor = self._message_ms(each) if each.tp > 1 else 0.0
        per_mib = self._exchange_per_mib(each) * (each.copies - 1) / each.copies
        places = ((0, 0, 1, 2),) if each.pp == 1 else ((0, 1, 2, 1), (-1, 2, 2, 1))
        for stage, which, halves, messages in places:
            gathered = (
                self.profile.outside[which].states[each.tp] / 8 * per_mib / 2 if each.zero == 3 else 0.0
            )
            ways = (forward / halves, forward / halves * _BACKWARD)
            found[stage] += sum(self._beside(gathered, way) for way in ways) + messages * tensor
        return [each / 1000 for each in found]

    def _beside(self, exchange: float, computing: float) -> float:
        slow = self.profile.overlap
        if computing * slow > exchange:
            return exchange + (computing * slow - exchange) / slow
        return exchange

    def switch_seconds(self, one: ProfiledStrategy, other: ProfiledStrategy) -> float:
        """Return the seconds between two adjacent layers with these strategies."""
        if one.parts != other.parts:
            parts = max(one.parts, other.parts)
            samples = self.task.batch / self.task.chunks / (self.task.ranks // one.pp // parts)
            nbytes = (parts - 1) / parts * _message_mib(self.profile, samples) * _MIB
            return nbytes * self._per_mib(parts, True) * 1e-7
        if (one.tp, one.sp) != (other.tp, other.sp):
            is_same = (one.zero, one.recompute) == (other.zero, other.recompute)
            return _SP_LATER if is_same and one.sp < other.sp else 0.0
        more = (other.zero == 3 and one.zero != 3, other.recompute and not one.recompute)
        if one.zero == 3 and other.zero != 3 and more[1]:
            return 1e-9
        return _LATER.get(more, 0.0)


class _DegreeSearch:
    """The search for one pipeline degree and set of strategies."""

    def __init__(
        self, profile: Profile, task: Task, pp: int, chosen: Sequence[ProfiledStrategy], buffer: float
    ) -> None:
        self._costs, self._task, self._pp, self._chosen, self._buffer = (
            _Costs(profile, task), task, pp, tuple(chosen), buffer,
        )  # fmt: skip
        even = profile.layers // pp
        self._division = (*[even] * (pp - 1), profile.layers - even * (pp - 1))
        mib = task.memory_gib * 1024
        self._limit = mib - int(mib * _RESERVED) if task.memory_gib > _RESERVED_ABOVE_GIB else mib

    def found(self) -> Iterator[Optimum]:
        """Yield the best plan for each strategy of embedding and head."""
        if self._task.uniform:
            yield from self._uniform()
            return
        outsides = sorted({replace(each, recompute=False) for each in self._chosen})
        for outside, *stages in zip(
            outsides, *(self._stage(stage, outsides) for stage in range(self._pp)), strict=True
        ):
            choice = [self._chosen[index] for each in stages if each is not None for index in each.choice]
            if None not in stages:
                yield self._priced(choice, outside)

    def _uniform(self) -> Iterator[Optimum]:
        for each in self._chosen:
            mib = self._costs.outside_mib(each)
            needed = (
                ceil(self._buffer) + ceil(mib[stage]) + count * ceil(self._costs.layer_mib(each, stage))
                for stage, count in enumerate(self._division)
            )
            if all(one <= self._limit for one in needed):
                yield self._priced([each] * sum(self._division), each)

    def _stage(self, stage: int, outsides: Sequence[ProfiledStrategy]) -> list[Cheapest | None]:
        """Return the best layers of a stage for each strategy of embedding and head."""
        count, chosen, costs = self._division[stage], self._chosen, self._costs
        layers = LayerCosts(
            np.array([[costs.layer_seconds(each, exchanges=True) for each in chosen]] * count),
            np.array([[ceil(costs.layer_mib(each, stage)) for each in chosen]] * count),
            np.array([[costs.switch_seconds(one, other) for other in chosen] for one in chosen]),
        )
        beside = (ceil(costs.outside_mib(each)[stage]) + int(self._buffer) for each in outsides)
        return cheapest_each(layers, [self._limit - each for each in beside])

    def _priced(self, plan: Sequence[ProfiledStrategy], outside: ProfiledStrategy) -> Optimum:
        ends = np.cumsum(self._division)

        def by_stage(*, exchanges: bool) -> list[float]:
            takes = [self._costs.layer_seconds(each, exchanges=exchanges) for each in plan]
            parts = zip([0, *ends], ends, strict=False)
            return [sum(takes[first:last]) for first, last in parts]

        computing = [
            a + b
            for a, b in zip(by_stage(exchanges=False), self._costs.outside_seconds(outside), strict=True)
        ]
        seconds = seconds_of_1f1b(computing, by_stage(exchanges=True), self._task.chunks)
        return Optimum(self._task.batch / seconds, tuple(plan), outside, self._division)


def seconds_of_1f1b(computing: Sequence[float], exchanging: Sequence[float], chunks: int) -> float:
    """Return the seconds of a step of a 1F1B pipeline.

    It is the passes of the last stage, or of the first with the other stages' work in between, plus the rest
    of the gradient exchange. ``exchanging``: seconds of a pass including the gradient exchange.
    """
    first, others = computing[0], sum(computing[1:])
    waits = min(len(computing) - 1, chunks - 1) * first
    total = max(
        first + others + computing[-1] * (chunks - 1),
        max(waits / 3, others / 3)
        + max(waits * 2 / 3, others * 2 / 3)
        + first * max(0, chunks + 1 - len(computing)),
    )
    tails = (each - sum(computing[: at + 1]) for at, each in enumerate(exchanging))
    return total + max(0.0, *tails) if len(computing) > 1 else total + max(0.0, exchanging[0] - computing[0])
