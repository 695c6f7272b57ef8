"""Costs of layers by strategy, shared by all spaces, and the cheapest strategies for a row of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gemini.errors import ConfigError

_MOST_CELLS = 2**27  # limit for layers x units x strategies: half a gigabyte


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """The cost of each of L layers with each of S strategies.

    Attributes:
        seconds: L x S; infinite if a layer does not support the strategy.
        units: L x S whole numbers, memory in units.
        transitions: L x S x S, or S x S for all layers; ``[l, a, b]`` is the seconds between layer l - 1 with
            strategy a and layer l with strategy b. May be infinite.

    Raises:
        ConfigError: shapes differ, or a cost is negative or not a number.
    """

    seconds: npt.NDArray[np.float64]
    units: npt.NDArray[np.int64]
    transitions: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        seconds = _floats(self.seconds, "seconds")
        if seconds.ndim != 2 or 0 in seconds.shape:
            raise ConfigError(
                f"seconds have the shape {seconds.shape}; give layers x strategies, of each one or more"
            )
        units = np.asarray(self.units)
        if units.dtype.kind not in "iu" or units.shape != seconds.shape or (units < 0).any():
            raise ConfigError(f"units are no {seconds.shape[0]} x {seconds.shape[1]} whole numbers from 0 on")
        layers, strategies = seconds.shape
        between = _floats(self.transitions, "transitions")
        if between.ndim == 2:
            between = np.broadcast_to(between, (layers, *between.shape))
        if between.shape != (layers, strategies, strategies):
            raise ConfigError(
                f"transitions have the shape {between.shape}; they must have {layers} x {strategies} x "
                f"{strategies}"
            )
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "units", units.astype(np.int64))
        object.__setattr__(self, "transitions", between)


@dataclass(frozen=True)
class Cheapest:
    """The strategies with the least time within a limit. ``choice``: a strategy for each layer."""

    seconds: float
    choice: tuple[int, ...]
    units: int


def cheapest(costs: LayerCosts, limit: int) -> Cheapest | None:
    """Return the strategies with the least time among those that need at most ``limit`` units; None: none
    does. Among equal ones the first strategy wins. Raises the errors of :func:`cheapest_each`."""
    return cheapest_each(costs, [limit])[0]


def cheapest_each(costs: LayerCosts, limits: Sequence[int]) -> list[Cheapest | None]:
    """Return the results of :func:`cheapest` for several limits at once.

    Galvatron's dynamic program: the least seconds of the first layers, by the units that they may take and by
    the strategy of the last one.

    Raises:
        ConfigError: the table of layers, units and strategies is too large.
    """
    layers, strategies = costs.seconds.shape
    most = int(costs.units.max(axis=1).sum())  # no choice needs more units than this
    most = min(most, max(limits, default=0))
    if layers * (most + 1) * strategies > _MOST_CELLS:
        raise ConfigError(
            f"{layers} layers x {most + 1} units x {strategies} strategies are more than the {_MOST_CELLS} "
            "cases that are looked at: give larger units"
        )
    least = np.zeros((max(most, 0) + 1, strategies))
    came_from = np.zeros((layers, *least.shape), dtype=np.int32)
    for layer in range(layers):
        before = least
        if layer:
            before, came_from[layer] = _best_before(least, costs.transitions[layer])
        # A new array: in place, a layer of 0 units would read the values that it has just written.
        least = np.full(before.shape, np.inf)
        for strategy, units in enumerate(costs.units[layer]):
            if units < len(least):
                takes = costs.seconds[layer, strategy]
                least[units:, strategy] = before[: len(least) - units, strategy] + takes
    return [None if each < 0 else _followed(costs, came_from, least, min(each, most)) for each in limits]


def _best_before(
    least: npt.NDArray[np.float64], transitions: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32]]:
    """Return for each strategy of a layer the least seconds before it, and the strategy of the layer
    before."""
    best = least[:, :1] + transitions[0]
    which = np.zeros(best.shape, dtype=np.int32)
    for strategy in range(1, len(transitions)):
        other = least[:, strategy : strategy + 1] + transitions[strategy]
        better = other < best
        best[better], which[better] = other[better], strategy
    return best, which


def _followed(
    costs: LayerCosts, came_from: npt.NDArray[np.int32], least: npt.NDArray[np.float64], limit: int
) -> Cheapest | None:
    """Follow the table from the last layer back, and return the strategies of all layers."""
    last = int(np.argmin(least[limit]))
    seconds = float(least[limit, last])
    if not np.isfinite(seconds):
        return None
    choice, left = [last], limit
    for layer in range(len(costs.seconds) - 1, 0, -1):
        left -= int(costs.units[layer, choice[-1]])
        choice.append(int(came_from[layer, left, choice[-1]]))
    choice.reverse()
    units = sum(int(costs.units[layer, strategy]) for layer, strategy in enumerate(choice))
    return Cheapest(seconds, tuple(choice), units)


def _floats(values: Any, name: str) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if np.isnan(found).any() or (found < 0).any():
        raise ConfigError(f"{name} are not all numbers from 0 on")
    return found
