"""Splits of layers: OptCNN's configurations and its exact search, and the rule of one weird trick.

A configuration is the number of parts of each dimension of a layer's output; rank i computes the i-th part.
The cost of a layer is its share of computing, the gradient exchange, and before it the transfer of inputs
that a rank needs but does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from gemini.errors import ConfigError
from gemini.planner.segment_costs import Speeds
from gemini.planner.spaces.graph import CONTRACTING, Layer, LayerGraph, divisors, own_seconds

Split = tuple[tuple[str, int], ...]  # dimensions that are cut, with their parts
_Floats = npt.NDArray[np.float64]
_MOST_FIXED = 3  # layers that may be enumerated by configuration if elimination is stuck


def splits_of(layer: Layer, ranks: int) -> tuple[Split, ...]:
    """Return the configurations of a layer: all ways to cut its dimensions such that the number of parts
    divides ``ranks``. No part is empty."""
    names = list(layer.dims)
    choices = [[each for each in divisors(ranks) if each <= layer.dims[name]] for name in names]
    return tuple(
        tuple((name, count) for name, count in zip(names, counts, strict=True) if count > 1)
        for counts in product(*choices)
        if ranks % prod(counts) == 0
    )


def data_split(layer: Layer, ranks: int) -> Split:
    """Return the configuration of data parallelism, limited by the number of samples."""
    count = max(each for each in divisors(ranks) if each <= layer.dims.get("sample", 1))
    return (("sample", count),) if count > 1 else ()


class SplitCosts:
    """The cost of configurations of a graph's layers on ``ranks`` ranks."""

    def __init__(self, graph: LayerGraph, ranks: int, speeds: Speeds) -> None:
        self.graph, self.ranks, self.speeds = graph, ranks, speeds
        self.splits = [splits_of(layer, ranks) for layer in graph]
        self._seen: dict[tuple[object, ...], tuple[float, ...]] = {}  # shared by equal layers

    def own(self, at: int, split: Split) -> float:
        """Return the seconds of a layer without the transfer of its inputs."""
        return own_seconds(self.graph[at], dict(split), self.speeds)

    def transfer(self, source: int, at: int, one: Split, other: Split) -> float:
        """Return the seconds of transferring an input and, in backward, its gradient."""
        return 2 * max(self.transfers(source, at, one, other))

    def transfers(self, source: int, at: int, one: Split, other: Split) -> tuple[float, ...]:
        """Return the seconds in which each rank receives the input."""
        given, layer = self.graph[source], self.graph[at]
        key = (*_kind(given), *_kind(layer), one, other)
        if key not in self._seen:
            self._seen[key] = self._transfers(given, layer, one, other)
        return self._seen[key]

    def _transfers(self, given: Layer, layer: Layer, one: Split, other: Split) -> tuple[float, ...]:
        found = []
        for rank in range(prod(count for _, count in other)):
            needed = _needed(given, layer, _region(layer, other, rank))
            lacks = _volume(needed)
            if rank < prod(count for _, count in one):
                lacks -= _volume(_overlap(needed, _region(given, one, rank)))
            nbytes = round(lacks * given.output_bytes)
            found.append(self.speeds.collective("all_to_all", self.ranks, nbytes) if nbytes else 0.0)
        return tuple(found)

    def total(self, choice: Sequence[Split]) -> float:
        """Return the seconds of a step with a configuration for each layer, without overlap."""
        edges = ((source, at) for at, layer in enumerate(self.graph) for source in layer.inputs)
        moved = sum(self.transfer(a, b, choice[a], choice[b]) for a, b in edges)
        return moved + sum(self.own(at, split) for at, split in enumerate(choice))


def _kind(layer: Layer) -> tuple[object, ...]:
    """Return a cache key of a layer: equal keys have equal transfers."""
    return (
        layer.kind,
        bool(layer.reduced),
        tuple(layer.dims.items()),
        tuple(layer.halo.items()),
        layer.itemsize,
    )


_Region = Mapping[str, tuple[float, float]]  # (begin, end) of each dimension, as fractions


def _region(layer: Layer, split: Split, rank: int) -> dict[str, tuple[float, float]]:
    """Return the region of a layer's output that a rank computes."""
    found = dict.fromkeys(layer.dims, (0.0, 1.0))
    for name, count in reversed(split):
        rank, place = divmod(rank, count)
        found[name] = place / count, (place + 1) / count
    return found


def _needed(given: Layer, layer: Layer, region: _Region) -> dict[str, tuple[float, float]]:
    """Return the region of an input that a layer needs for a region of its output."""
    found = {}
    for name, size in given.dims.items():
        is_whole = name not in region
        is_whole |= name == "channel" and layer.kind in CONTRACTING and bool(layer.reduced)
        is_whole |= name == "length" and layer.kind == "attention"
        low, high = (0.0, 1.0) if is_whole else region[name]
        more = layer.halo.get(name, 0) / size / 2 if high - low < 1 else 0.0
        found[name] = max(low - more, 0.0), min(high + more, 1.0)
    return found


def _overlap(one: _Region, other: _Region) -> dict[str, tuple[float, float]]:
    return {name: (max(low, other[name][0]), min(high, other[name][1])) for name, (low, high) in one.items()}


def _volume(region: _Region) -> float:
    return prod(max(high - low, 0.0) for low, high in region.values())


# -- OptCNN --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """A configuration for each layer, and the seconds of a step."""

    seconds: float
    splits: tuple[Split, ...]


def optcnn(costs: SplitCosts) -> Chosen:
    """Return the configurations with the least seconds. The result is exact, by elimination of layers.

    Raises:
        ConfigError: the graph is too densely connected for elimination.
    """
    own = [np.array([costs.own(at, each) for each in splits]) for at, splits in enumerate(costs.splits)]
    between: dict[tuple[int, int], _Floats] = {}
    for at, layer in enumerate(costs.graph):
        for source in layer.inputs:
            table = [
                [costs.transfer(source, at, a, b) for b in costs.splits[at]] for a in costs.splits[source]
            ]
            between[source, at] = np.array(table)
    _, choice = least_choice(own, between)
    found = tuple(costs.splits[at][each] for at, each in enumerate(choice))
    return Chosen(costs.total(found), found)


def least_choice(
    own: Sequence[npt.ArrayLike], between: Mapping[tuple[int, int], npt.ArrayLike]
) -> tuple[float, tuple[int, ...]]:
    """Minimize the sum of the costs of nodes and of pairs of nodes. Return it with the choice of each node.

    A node with at most two neighbours is eliminated into a table of these. If no such node exists, the
    choices of one node are enumerated.

    Raises:
        ConfigError: too many nodes would have to be enumerated.
    """
    nodes = {at: np.asarray(each, dtype=np.float64) for at, each in enumerate(own)}
    edges: dict[int, dict[int, _Floats]] = {at: {} for at in nodes}
    for (a, b), table in between.items():
        _join(edges, a, b, np.asarray(table, dtype=np.float64))
    seconds, choice = _eliminate(nodes, edges, _MOST_FIXED)
    return seconds, tuple(choice[at] for at in range(len(own)))


def _join(edges: dict[int, dict[int, _Floats]], a: int, b: int, table: _Floats) -> None:
    edges[a][b] = edges[a].get(b, 0.0) + table
    edges[b][a] = edges[b].get(a, 0.0) + table.T


def _eliminate(
    nodes: dict[int, _Floats], edges: dict[int, dict[int, _Floats]], most_fixed: int
) -> tuple[float, dict[int, int]]:
    nodes, edges = dict(nodes), {at: dict(own) for at, own in edges.items()}
    order: list[tuple[int, list[int], npt.NDArray[np.int64]]] = []
    constant = 0.0
    while nodes:
        node = min(nodes, key=lambda at: (len(edges[at]), at))
        around = sorted(edges[node])
        if len(around) > 2:
            seconds, choice = _fixed(nodes, edges, most_fixed)
            constant += seconds
            break
        table = nodes.pop(node)
        for place, other in enumerate(around):
            shape = [1] * len(around)
            shape[place] = -1
            own = edges[node][other]
            table = table.reshape(*table.shape, *[1] * (len(around) - table.ndim + 1))
            table = table + own.reshape(own.shape[0], *shape)
            del edges[other][node]
        del edges[node]
        order.append((node, around, table.argmin(axis=0)))
        best = table.min(axis=0)
        if not around:
            constant += float(best)
        elif len(around) == 1:
            nodes[around[0]] = nodes[around[0]] + best
        else:
            _join(edges, around[0], around[1], best)
    else:
        choice = {}
    for node, around, which in reversed(order):
        choice[node] = int(which[tuple(choice[other] for other in around)])
    return constant, choice


def _fixed(
    nodes: dict[int, _Floats], edges: dict[int, dict[int, _Floats]], most_fixed: int
) -> tuple[float, dict[int, int]]:
    """Enumerate the choices of the node with the most neighbours, and return the best result."""
    if most_fixed == 0:
        raise ConfigError("the layers feed each other in too many ways for an exact search")
    node = max(nodes, key=lambda at: (len(edges[at]), -at))
    best: tuple[float, dict[int, int]] | None = None
    for each, cost in enumerate(nodes[node]):
        rest = {at: own for at, own in nodes.items() if at != node}
        for other, table in edges[node].items():
            rest[other] = rest[other] + table[each]
        left = {at: {b: t for b, t in own.items() if b != node} for at, own in edges.items() if at in rest}
        seconds, choice = _eliminate(rest, left, most_fixed - 1)
        if best is None or seconds + cost < best[0]:
            best = seconds + float(cost), {**choice, node: each}
    assert best is not None
    return best


# -- one weird trick -----------------------------------------------------------------------------------------


def one_weird_trick(costs: SplitCosts) -> Chosen:
    """Return data parallelism for layers with more activations than parameters (such as convolutions), and
    model parallelism for the others (such as most linear layers). Layers without contraction follow their
    input."""
    found: list[Split] = []
    for layer in costs.graph:
        if layer.kind not in CONTRACTING and layer.inputs:
            found.append(_like(found[layer.inputs[0]], layer))
        elif layer.kind in CONTRACTING and layer.parameter_bytes > layer.output_bytes:
            count = max(each for each in divisors(costs.ranks) if each <= layer.dims["channel"])
            found.append((("channel", count),) if count > 1 else ())
        else:
            found.append(data_split(layer, costs.ranks))
    return Chosen(costs.total(found), tuple(found))


def _like(split: Split, layer: Layer) -> Split:
    return tuple((name, count) for name, count in split if layer.dims.get(name, 0) >= count)
