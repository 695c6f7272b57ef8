"""Galvatron's search over the blocks of a model, with the records and prices of this project.

For each pipeline degree and number of micro-batches, a dynamic program chooses for every block a candidate of
the decision tree, such that each stage takes the least time within its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from gemini.errors import ConfigError
from gemini.planner.spaces.blocks import Blocks, PlanPrice, Unit, UnitPrice, in_flight, pipeline_seconds
from gemini.planner.spaces.costs import LayerCosts, cheapest
from gemini.planner.spaces.layerwise import LayerwisePlan, Strategy
from gemini.planner.spaces.tree import Candidate, candidates

_SLOTS = 4096  # memory of a stage's blocks is counted in this many units


@dataclass(frozen=True)
class Priced:
    """A plan with its price."""

    plan: LayerwisePlan
    price: PlanPrice


def strategies_of(trees: Iterable[Candidate], pp: int) -> tuple[Strategy, ...]:
    """Return the strategies of the candidates with pipeline degree ``pp``.

    The order of a tree's levels is ignored: here the time of an exchange depends on the number of ranks, not
    on which ranks take part. dp combined with sdp is ZeRO 3 over all copies.
    """
    return tuple(sorted({_strategy(each) for each in trees if each.pp == pp}))


def _strategy(each: Candidate) -> Strategy:
    dp, sdp = each.degree("dp"), each.degree("sdp")
    return Strategy(each.degree("tp"), 1, dp * sdp, 3 if sdp > 1 else 0, each.recompute)


def best_plan(blocks: Blocks, ranks: int, batch: int) -> Priced | None:
    """Return the fastest plan that fits; None: none does.

    Raises:
        ConfigError: the number of ranks is not a power of two, or the model is not a row of blocks.
    """
    blocks.require_row()
    trees = candidates(ranks, recompute=True)
    spaces = (
        _Space(blocks, strategies_of(trees, pp), pp, batch, chunks)
        for pp in sorted({each.pp for each in trees})
        for chunks in range(pp, batch + 1)
        if pp <= len(blocks.names) and batch % chunks == 0
    )
    best: Priced | None = None
    cases = sorted((case for space in spaces for case in space.cases()), key=lambda case: case.bound)
    for case in cases:
        if best is not None and case.bound >= best.price.step_seconds:
            break
        plan = case.space.plan(case)
        if plan is not None:
            price = blocks.priced(plan)
            if not price.missing_bytes and (best is None or price.step_seconds < best.price.step_seconds):
                best = Priced(plan, price)
    return best


@dataclass(frozen=True)
class _Case:
    """One subproblem of a space.

    Attributes:
        outside: strategy of embedding and head.
        extra: the most bytes that a running block may hold beyond the bytes that it keeps.
        bound: lower bound for the seconds of a step.
    """

    space: _Space
    outside: Strategy
    extra: int
    bound: float


class _Space:
    """The search for one pipeline degree and number of micro-batches. Stages have equal numbers of blocks;
    the last one also takes the remainder."""

    def __init__(
        self, blocks: Blocks, strategies: Sequence[Strategy], pp: int, batch: int, chunks: int
    ) -> None:
        self._blocks, self._pp, self._batch, self._chunks = blocks, pp, batch, chunks
        self._count = len(blocks.names)
        self._price = cache(self._priced)
        self._strategies = [each for each in strategies if self._goes(each)]
        each = self._count // pp
        self._division = (*[each] * (pp - 1), self._count - each * (pp - 1))

    def _priced(self, unit: Unit, strategy: Strategy) -> UnitPrice:
        return self._blocks.price(unit, strategy, self._batch // (strategy.dp * self._chunks), self._chunks)

    def _goes(self, strategy: Strategy) -> bool:
        if self._batch % (strategy.dp * self._chunks):
            return False
        try:
            self._price((1,), strategy)
        except ConfigError:  # the model cannot be cut this way
            return False
        return True

    def cases(self) -> Iterator[_Case]:
        """Yield all subproblems. Besides the bytes that all blocks keep, the running block holds its peak. A
        smaller allowance for it excludes strategies, but leaves room for more blocks."""
        extras = sorted({self._extra(each) for each in self._strategies})
        for extra in {extras[0], extras[len(extras) // 2], extras[-1]} if extras else ():
            allowed = self._allowed(extra)
            for outside in sorted({replace(each, recompute=False) for each in allowed}):
                stages = []
                for stage in range(self._pp):
                    takes = sum(
                        min(self._step_seconds(unit, each, stage) for each in allowed)
                        for unit in self._units(stage)
                    )
                    stages.append(takes + self._outside(stage, outside)[0])
                yield _Case(self, outside, extra, pipeline_seconds(stages, self._chunks))

    def _allowed(self, extra: int) -> list[Strategy]:
        return [each for each in self._strategies if self._extra(each) <= extra]

    def _extra(self, strategy: Strategy) -> int:
        return max(self._price((at + 1,), strategy).extra_bytes for at in range(self._count))

    def plan(self, case: _Case) -> LayerwisePlan | None:
        """Return the best plan of a case; None: none fits."""
        rows = [self._stage(stage, case) for stage in range(self._pp)]
        own = tuple(each for row in rows if row is not None for each in row)
        if len(own) < self._count:
            return None
        return LayerwisePlan(self._batch, self._chunks, own, (case.outside,) * 2, self._division)

    def _stage(self, stage: int, case: _Case) -> tuple[Strategy, ...] | None:
        """Return the strategies of a stage's blocks; None: none fit."""
        allowed, units = self._allowed(case.extra), self._units(stage)
        held = [[self._held(unit, each, stage) for each in allowed] for unit in units]
        # The unit depends only on the blocks, so a larger budget is never counted more coarsely.
        size = max(sum(map(max, held)) // _SLOTS, 1)
        seconds = np.array([[self._step_seconds(unit, each, stage) for each in allowed] for unit in units])
        if stage == 0:
            seconds[0] += [self._switch(case.outside, each) for each in allowed]
        if stage == self._pp - 1:
            seconds[-1] += [self._switch(each, case.outside) for each in allowed]
        costs = LayerCosts(
            seconds,
            np.array([[-(-each // size) for each in row] for row in held]),
            np.array([[self._switch(one, other) for other in allowed] for one in allowed]),
        )
        left = self._blocks.capacity.device_bytes - case.extra - self._outside(stage, case.outside)[1]
        found = cheapest(costs, left // size)
        return None if found is None else tuple(allowed[at] for at in found.choice)

    def _units(self, stage: int) -> list[Unit]:
        first = sum(self._division[:stage])
        return [(at + 1,) for at in range(first, first + self._division[stage])]

    def _held(self, unit: Unit, strategy: Strategy, stage: int) -> int:
        """Return the bytes of a unit. The first unit of a later stage also holds its received input."""
        price = self._price(unit, strategy)
        received = price.input_bytes if stage and unit == self._units(stage)[0] else 0
        flying = in_flight("1f1b", self._pp, stage, self._chunks)
        return price.model_bytes + (price.kept_bytes + received) * flying

    def _step_seconds(self, unit: Unit, strategy: Strategy, stage: int) -> float:
        price = self._price(unit, strategy)
        is_first = stage and unit == self._units(stage)[0]
        return price.step_seconds(self._chunks) + (
            self._blocks.send_seconds(price, self._chunks) if is_first else 0.0
        )

    def _switch(self, one: Strategy, other: Strategy) -> float:
        return self._blocks.switch_seconds(one, other, self._batch, self._chunks)

    def _outside(self, stage: int, strategy: Strategy) -> tuple[float, int]:
        """Return the seconds and bytes of a stage's segments outside the blocks."""
        before, behind = self._blocks.outside(self._pp)
        units = [before] if stage == 0 else []
        units += [behind] if behind and stage == self._pp - 1 else []
        prices = [self._price(unit, strategy) for unit in units]
        flying = in_flight("1f1b", self._pp, stage, self._chunks)
        nbytes = sum(each.model_bytes + each.kept_bytes * flying + each.extra_bytes for each in prices)
        return sum(each.step_seconds(self._chunks) for each in prices), nbytes
