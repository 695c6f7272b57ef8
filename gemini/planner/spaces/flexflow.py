"""FlexFlow's search: random changes of the layers' configurations, priced by an execution simulator.

The simulator runs each part of a layer on its rank as soon as its inputs have arrived. Transfers and gradient
exchanges use the rank's link at the same time, so they overlap with computing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, prod

from gemini.errors import ConfigError
from gemini.planner.spaces.graph import own_seconds, share
from gemini.planner.spaces.splits import Chosen, Split, SplitCosts, data_split, one_weird_trick

_ROUNDS = 400  # number of changes to try
_PATIENCE = 0.05  # temperature of the acceptance, as a share of the starting time


def flexflow(costs: SplitCosts, *, seed: int = 0, rounds: int = _ROUNDS) -> Chosen:
    """Return the fastest configurations that were tried.

    The search begins with the best of data parallelism, one weird trick and a single rank, so its result is
    never slower than these. The same seed gives the same result.

    Raises:
        ConfigError: the number of rounds is negative.
    """
    if rounds < 0:
        raise ConfigError(f"rounds are {rounds}; give 0 or more")
    draw = random.Random(seed)
    data = [data_split(layer, costs.ranks) for layer in costs.graph]
    starts: list[list[Split]] = [data, list(one_weird_trick(costs).splits), [()] * len(data)]
    now = min(starts, key=lambda each: simulated(costs, each))
    seconds = simulated(costs, now)
    best, patience = Chosen(seconds, tuple(now)), max(seconds * _PATIENCE, 1e-30)
    for _ in range(rounds):
        at = draw.randrange(len(now))
        change = draw.choice(costs.splits[at])
        tried = [*now[:at], change, *now[at + 1 :]]
        found = simulated(costs, tried)
        if found <= seconds or draw.random() < exp((seconds - found) / patience):
            now, seconds = tried, found
        if seconds < best.seconds:
            best = Chosen(seconds, tuple(now))
    return best


def simulated(costs: SplitCosts, splits: Sequence[Split]) -> float:
    """Return the seconds of a step: forward, backward, gradient exchanges and updates."""
    return _Clock(costs, splits).run()


class _Clock:
    """The simulation of one step."""

    def __init__(self, costs: SplitCosts, splits: Sequence[Split]) -> None:
        self._costs, self._splits, self._graph = costs, splits, costs.graph
        self._free = [0.0] * costs.ranks  # time at which a rank finishes computing
        self._link = [0.0] * costs.ranks  # time at which a rank's link is free
        self._parts = [prod(count for _, count in each) for each in splits]
        self._readers: list[list[int]] = [[] for _ in self._graph]
        for at, layer in enumerate(self._graph):
            for source in layer.inputs:
                self._readers[source].append(at)

    def run(self) -> float:
        """Run all layers forward, then all in reverse, and return the end time."""
        forward: list[list[float]] = []
        for at, layer in enumerate(self._graph):
            ready = [0.0] * self._parts[at]
            for source in layer.inputs:
                self._wait(ready, forward[source], source, at)
            forward.append(self._compute(at, ready, layer.forward))
        backward: list[list[float]] = [[] for _ in self._graph]
        for at in reversed(range(len(self._graph))):
            ready = list(forward[at])
            for reader in self._readers[at]:
                self._back(ready, backward[reader], at, reader)
            backward[at] = self._compute(at, ready, self._graph[at].backward)
            self._exchange(at, backward[at])
        return max(*self._free, *self._link)

    def _compute(self, at: int, ready: list[float], seconds: float) -> list[float]:
        each = seconds * share(self._graph[at], dict(self._splits[at]))
        for rank, since in enumerate(ready):
            self._free[rank] = max(self._free[rank], since) + each
        return self._free[: len(ready)]

    def _wait(self, ready: list[float], ends: list[float], source: int, at: int) -> None:
        """Delay each part of a layer until its input has arrived."""
        takes = self._costs.transfers(source, at, self._splits[source], self._splits[at])
        last = max(ends)
        for rank, seconds in enumerate(takes):
            if seconds:
                self._link[rank] = max(self._link[rank], last) + seconds
                ready[rank] = max(ready[rank], self._link[rank])
            else:
                ready[rank] = max(ready[rank], ends[rank] if rank < len(ends) else last)

    def _back(self, ready: list[float], ends: list[float], source: int, reader: int) -> None:
        """Delay each part of a layer until its readers have sent the gradients of its output."""
        takes = self._costs.transfers(source, reader, self._splits[source], self._splits[reader])
        arrives = 0.0
        for rank, seconds in enumerate(takes):
            if seconds:
                self._link[rank] = max(self._link[rank], ends[rank]) + seconds
                arrives = max(arrives, self._link[rank])
        for rank in range(len(ready)):
            own = ends[rank] if rank < len(ends) else max(ends)
            ready[rank] = max(ready[rank], own, arrives)

    def _exchange(self, at: int, ends: list[float]) -> None:
        layer, parts = self._graph[at], dict(self._splits[at])
        computing = (layer.forward + layer.backward) * share(layer, parts)
        tail = own_seconds(layer, parts, self._costs.speeds) - computing
        if tail > 0:
            begins = max(max(ends), *self._link[: len(ends)])
            for rank in range(len(ends)):
                self._link[rank] = begins + tail
