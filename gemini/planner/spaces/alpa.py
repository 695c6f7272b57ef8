"""Alpa's two-level search: which layers form a stage and how many devices it gets; within a stage, how its
devices share every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gemini.errors import ConfigError
from gemini.planner.spaces.blocks import Blocks, Unit, UnitPrice
from gemini.planner.spaces.galvatron import Priced
from gemini.planner.spaces.layerwise import LayerwisePlan, Strategy

_MOST_LAYERS, _MOST_DEVICES = 512, 4096
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DividedStage:
    """Layers ``first`` to ``last`` (inclusive) on the submesh with index ``mesh``."""

    first: int
    last: int
    mesh: int


@dataclass(frozen=True)
class Division:
    """The stages in order, and the seconds of a step."""

    seconds: float
    stages: tuple[DividedStage, ...]


def divide(
    costs: npt.ArrayLike,
    sizes: Sequence[int],
    devices: int,
    microbatches: int,
    successors: npt.ArrayLike | None = None,
) -> Division | None:
    """Return the stages with the shortest step; None: nothing fits.

    A step takes the sum of all stages for the first micro-batch, plus the slowest stage for every other one.
    Every device belongs to a stage.

    Args:
        costs: ``costs[i, j, m]`` is the seconds of layers i to j (inclusive) on submesh m of ``sizes[m]``
            devices; infinite if impossible.
        successors: ``successors[i, j, m]`` is the largest number of later stages with which it fits.

    Raises:
        ConfigError: shapes differ, or numbers are not whole numbers above 0.
    """
    table = _checked(costs, sizes, devices, microbatches)
    layers = len(table)
    allowed = np.full(table.shape, layers) if successors is None else np.asarray(successors)
    if allowed.shape != table.shape:
        raise ConfigError(f"successors have the shape {allowed.shape}, and costs {table.shape}")
    slowest = np.unique(table[np.isfinite(table)])
    best: tuple[float, float] | None = None
    for limit in slowest[_first_feasible(table, allowed, sizes, devices, slowest) :]:
        if best is not None and limit * microbatches >= best[0]:
            break
        total = float(_least(table, allowed, sizes, devices, limit)[0][:, 0, devices].min())
        total += (microbatches - 1) * float(limit)
        if best is None or total < best[0]:
            best = total, float(limit)
    if best is None or not np.isfinite(best[0]):
        return None
    stages = _followed(table, allowed, sizes, devices, best[1])
    takes = [float(table[each.first, each.last, each.mesh]) for each in stages]
    return Division(sum(takes) + (microbatches - 1) * max(takes), stages)


def _checked(costs: Any, sizes: Sequence[int], devices: int, microbatches: int) -> _Floats:
    table = np.array(costs, dtype=np.float64)
    numbers = (*sizes, devices, microbatches)
    if any(type(each) is not int or each < 1 for each in numbers) or devices > _MOST_DEVICES or not sizes:
        raise ConfigError(f"sizes, devices and micro-batches must be whole numbers above 0, not {numbers}")
    if (
        table.ndim != 3
        or not 0 < len(table) <= _MOST_LAYERS
        or table.shape != (len(table),) * 2 + (len(sizes),)
    ):
        raise ConfigError(
            f"costs have the shape {table.shape}; give layers x layers x {len(sizes)} submeshes"
        )
    if np.isnan(table).any() or (table < 0).any():
        raise ConfigError("costs are not all numbers from 0 on")
    table[np.tril_indices(len(table), -1)] = np.inf  # last < first is not a stage
    return table


def _first_feasible(
    table: _Floats, allowed: npt.NDArray[Any], sizes: Sequence[int], devices: int, slowest: _Floats
) -> int:
    """Return the index into ``slowest`` of the smallest limit with which every layer and device gets a
    stage."""
    low, high = 0, len(slowest)
    while low < high:
        middle = (low + high) // 2
        if np.isfinite(_least(table, allowed, sizes, devices, slowest[middle])[0][:, 0, devices]).any():
            high = middle
        else:
            low = middle + 1
    return low


def _least(
    table: _Floats, allowed: npt.NDArray[Any], sizes: Sequence[int], devices: int, limit: float
) -> tuple[_Floats, npt.NDArray[np.int64]]:
    """Compute the least sum of stages that each take at most ``limit``.

    Return two tables, indexed by the number of stages, their first layer and the number of their devices: the
    sums, and the first stage as (first layer of the next stage, submesh).
    """
    layers = len(table)
    most = min(layers, devices // min(sizes))
    least = np.full((most + 1, layers + 1, devices + 1), np.inf)
    least[0, layers, 0] = 0.0
    first = np.zeros((most + 1, layers, devices + 1, 2), dtype=np.int64)
    for stages in range(1, most + 1):
        for mesh, size in enumerate(sizes):
            if size > devices:
                continue
            own = np.where(
                (table[:, :, mesh] <= limit) & (allowed[:, :, mesh] >= stages - 1), table[:, :, mesh], np.inf
            )
            sums = own[:, :, None] + least[stages - 1, 1:, : devices + 1 - size][None]
            ends = sums.argmin(axis=1)
            found = np.take_along_axis(sums, ends[:, None], axis=1)[:, 0]
            before = least[stages, :layers, size:]
            better = found < before
            before[better] = found[better]
            first[stages, :, size:][better] = np.stack(
                [ends[better] + 1, np.full(better.sum(), mesh)], axis=1
            )
    return least, first


def _followed(
    table: _Floats, allowed: npt.NDArray[Any], sizes: Sequence[int], devices: int, limit: float
) -> tuple[DividedStage, ...]:
    least, first = _least(table, allowed, sizes, devices, limit)
    at, left, found = 0, devices, []
    for stages in range(int(least[:, 0, devices].argmin()), 0, -1):
        end, mesh = map(int, first[stages, at, left])
        found.append(DividedStage(at, end - 1, mesh))
        at, left = end, left - sizes[mesh]
    return tuple(found)


# -- over the blocks of a model ------------------------------------------------------------------------------


def best_plan(blocks: Blocks, ranks: int, batch: int) -> Priced | None:
    """Return the fastest plan that fits; None: none does.

    The sizes of submeshes are powers of two. Within a stage all blocks are shared in the same way, by data
    and tensor parallelism, with whole or cut (ZeRO 3) weights. Raises ConfigError if the model is not a row
    of blocks.
    """
    blocks.require_row()
    found: list[Priced] = []
    for chunks in (each for each in range(1, batch + 1) if batch % each == 0):
        for recompute in (False, True):
            plan = _Meshes(blocks, ranks, batch, chunks, recompute).plan()
            if plan is not None:
                price = blocks.priced(plan)
                if not price.missing_bytes:
                    found.append(Priced(plan, price))
    return min(found, key=lambda each: each.price.step_seconds, default=None)


def shapes(ranks: int, *, recompute: bool = False) -> tuple[Strategy, ...]:
    """Return the ways in which submeshes of up to ``ranks`` ranks share a layer."""
    sizes = [2**each for each in range(ranks.bit_length())]
    return tuple(
        Strategy(tp, 1, dp, zero, recompute)
        for tp in sizes
        for dp in sizes
        if tp * dp <= ranks
        for zero in ((0, 3) if dp > 1 else (0,))
    )


class _Meshes:
    """The search for one number of micro-batches, with or without recomputation."""

    def __init__(self, blocks: Blocks, ranks: int, batch: int, chunks: int, recompute: bool) -> None:
        self._blocks, self._ranks, self._batch, self._chunks = blocks, ranks, batch, chunks
        self._shapes = [each for each in shapes(ranks, recompute=recompute) if self._goes(each)]

    def _goes(self, strategy: Strategy) -> bool:
        if self._batch % (strategy.dp * self._chunks):
            return False
        try:
            self._unit((1,), strategy)
        except ConfigError:  # the model cannot be cut this way
            return False
        return True

    def _unit(self, unit: Unit, strategy: Strategy) -> UnitPrice:
        # Embedding and head are never recomputed.
        strategy = (
            strategy
            if unit[0] in range(1, len(self._blocks.names) + 1)
            else replace(strategy, recompute=False)
        )
        samples = self._batch // (strategy.dp * self._chunks)
        return self._blocks.price(unit, strategy, samples, self._chunks)

    def plan(self) -> LayerwisePlan | None:
        """Return the plan of the two-level search; None: nothing fits."""
        if not self._shapes:
            return None
        count = len(self._blocks.names)
        costs = np.full((count, count, len(self._shapes)), np.inf)
        successors = np.zeros(costs.shape, dtype=np.int64)
        for mesh, strategy in enumerate(self._shapes):
            for first in range(count):
                for last in range(first, count):
                    costs[first, last, mesh], successors[first, last, mesh] = self._stage(
                        first, last, strategy
                    )
        sizes = [each.ranks for each in self._shapes]
        found = divide(costs, sizes, self._ranks, self._chunks, successors)
        if found is None:
            return None
        own = [self._shapes[stage.mesh] for stage in found.stages]
        lengths = tuple(stage.last - stage.first + 1 for stage in found.stages)
        rows = (strategy for strategy, length in zip(own, lengths, strict=True) for _ in range(length))
        ends = (
            Strategy(own[0].tp, 1, own[0].dp, own[0].zero),
            Strategy(own[-1].tp, 1, own[-1].dp, own[-1].zero),
        )
        return LayerwisePlan(self._batch, self._chunks, tuple(rows), ends, lengths)

    def _stage(self, first: int, last: int, strategy: Strategy) -> tuple[float, int]:
        """Return the seconds of a micro-batch, including its share of exchange and update, and the largest
        number of later stages with which the stage fits."""
        units = self._units(first, last)
        prices = [self._unit(unit, strategy) for unit in units]
        kept = sum(each.kept_bytes for each in prices)
        extra = max(each.extra_bytes for each in prices)
        received = prices[0].input_bytes if first else 0
        left = self._blocks.capacity.device_bytes - extra - sum(each.model_bytes for each in prices)
        flying = left // (kept + received) if kept + received else len(self._blocks.names)
        if flying < 1:
            return np.inf, -1
        takes = sum(each.step_seconds(self._chunks) for each in prices)
        takes += self._blocks.send_seconds(prices[0], self._chunks) if first else 0.0
        return takes / self._chunks, min(flying - 1, self._ranks)

    def _units(self, first: int, last: int) -> list[Unit]:
        is_whole = first == 0 and last == len(self._blocks.names) - 1
        before, behind = self._blocks.outside(1 if is_whole else 2)
        units: list[Unit] = [(at + 1,) for at in range(first, last + 1)]
        units = [before, *units] if first == 0 else units
        return [*units, behind] if behind and last == len(self._blocks.names) - 1 else units
