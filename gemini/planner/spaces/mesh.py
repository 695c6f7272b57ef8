"""Tensors over a mesh: Mesh-TensorFlow's layouts and GShard's annotations, and the collectives that follow.

Each layer is a product: every element of its output sums over the channels of its input. If a dimension of
the output is cut, ranks compute parts of it. If the summed channels are cut, ranks add up their partial sums
(an all-reduce). In backward, the channels of output and input exchange roles. Gradients of parameters are
summed over the other cut dimensions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from gemini.errors import ConfigError
from gemini.planner.segment_costs import Speeds
from gemini.planner.spaces.graph import CONTRACTING, Layer, LayerGraph, divisors, own_seconds

_MOST_LAYOUTS = 2**18
Layout = Mapping[str, int]  # named dimension -> index of the mesh dimension that cuts it


class MeshCollective(NamedTuple):
    """A collective over ``ranks`` ranks that each give ``nbytes``; ``why`` is the reason as text."""

    kind: str
    ranks: int
    nbytes: int
    why: str


def collectives_of(layer: Layer, parts: Mapping[str, int], reduced: int) -> list[MeshCollective]:
    """Return the collectives on a layer's activations, if its output is cut into ``parts`` by dimension and
    its input channels into ``reduced`` parts."""
    output = layer.output_bytes // prod(parts.values())
    found = []
    if reduced > 1:
        found.append(MeshCollective("all_reduce", reduced, output, "sums of input channels"))
    channel = parts.get("channel", 1)
    if layer.kind in CONTRACTING and channel > 1 and layer.kind != "embedding":
        rest = prod(parts.values()) // channel
        given = layer.output_bytes // layer.dims["channel"] * max(layer.reduced, 1) // (rest * reduced)
        found.append(MeshCollective("all_reduce", channel, given, "gradients of the input"))
    if layer.kind == "norm" and channel > 1:
        rows = output // (layer.dims["channel"] // channel)
        found.append(MeshCollective("all_reduce", channel, 2 * rows, "statistics"))
    if layer.kind == "attention" and parts.get("length", 1) > 1:
        found += [MeshCollective("all_gather", parts["length"], output, "keys and values")] * 2
    return found


def layer_seconds(layer: Layer, parts: Mapping[str, int], reduced: int, speeds: Speeds) -> float:
    """Return the seconds that a rank spends on a layer that is cut this way."""
    collectives = collectives_of(layer, parts, reduced)
    sent = sum(speeds.collective(each.kind, each.ranks, each.nbytes) for each in collectives)
    return own_seconds(layer, parts, speeds, reduced) + sent


# -- Mesh-TensorFlow -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A graph with names for the dimensions of its tensors.

    Attributes:
        outputs: for each layer, the names of its output's dimensions, by kind.
        reduced: for each layer, the name of the channels that it sums over.
        sizes: for each name, a number that its number of parts must divide.
    """

    graph: LayerGraph
    outputs: tuple[Mapping[str, str], ...]
    reduced: tuple[str | None, ...]
    sizes: Mapping[str, int]


def named(graph: LayerGraph) -> Named:
    """Return a graph with named dimensions.

    Samples, lengths and image sizes have one name each. Channels are named after the layer that makes them,
    without numbers, so that equal blocks share names. Where tensors meet, as in a sum or as queries, keys and
    values, their channel names are unified.
    """
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    made: list[str] = []
    summed: list[str | None] = []
    for at, layer in enumerate(graph):
        sources = [made[source] for source in layer.inputs]
        given = sources[0] if sources else "input channel"
        if layer.kind in CONTRACTING:
            made.append(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.name) or f"layer {at}")
            summed.append(given if layer.inputs else f"{made[-1]} input")
        else:
            made.append(given)
            summed.append(None)
            for other in sources[1:]:
                parent[find(other)] = find(given)
    outputs = tuple(
        {kind: find(made[at]) if kind == "channel" else kind for kind in layer.dims}
        for at, layer in enumerate(graph)
    )
    reduced = tuple(None if name is None else find(name) for name in summed)
    sizes: dict[str, int] = {}
    for at, layer in enumerate(graph):
        pairs = [(outputs[at][kind], size) for kind, size in layer.dims.items()]
        own = reduced[at]
        pairs += [(own, layer.reduced)] if own is not None and layer.reduced else []
        for name, size in pairs:
            sizes[name] = gcd(sizes.get(name, 0), size)
    return Named(graph, outputs, reduced, sizes)


def is_valid(
    layout: Layout, tensors: Sequence[Sequence[str]], sizes: Mapping[str, int], mesh: Sequence[int]
) -> bool:
    """Return whether no tensor has two dimensions on one mesh dimension, and all parts are equal."""
    for dims in tensors:
        places = [layout[name] for name in dims if name in layout]
        if len(set(places)) != len(places):
            return False
    return all(sizes[name] % mesh[place] == 0 for name, place in layout.items())


def tensors_of(graph: Named) -> list[tuple[str, ...]]:
    """Return the dimension names of all tensors: outputs, inputs and parameters."""
    found: dict[tuple[str, ...], None] = {}
    for layer, output, reduced in zip(graph.graph, graph.outputs, graph.reduced, strict=True):
        found[tuple(output.values())] = None
        if reduced is not None and layer.kind in CONTRACTING:
            found[output["channel"], reduced] = None
            rest = [name for kind, name in output.items() if kind != "channel"]
            given = (*rest, reduced)  # the input; for an embedding, its one-hot form
            found[given] = None
    return list(found)


def layouts(graph: Named, mesh: Sequence[int]) -> Iterator[Layout]:
    """Yield all valid layouts.

    Raises:
        ConfigError: there are too many layouts.
    """
    tensors = tensors_of(graph)
    able = {
        name: [at for at, parts in enumerate(mesh) if size % parts == 0] for name, size in graph.sizes.items()
    }
    twice = {name for dims in tensors for name in dims if dims.count(name) > 1}
    names = [name for name, places in able.items() if places and name not in twice]
    if prod(len(able[name]) + 1 for name in names) > _MOST_LAYOUTS:
        raise ConfigError(
            f"{len(names)} dimensions have more layouts than {_MOST_LAYOUTS}, the most looked at"
        )
    for places in product(*([None, *able[name]] for name in names)):
        layout = {name: place for name, place in zip(names, places, strict=True) if place is not None}
        if is_valid(layout, tensors, graph.sizes, mesh):
            yield layout


def meshes(ranks: int) -> list[tuple[int, ...]]:
    """Return the shapes of meshes with ``ranks`` ranks and one or two dimensions."""
    return [(ranks,), *((each, ranks // each) for each in divisors(ranks) if 1 < each <= ranks // each)]


@dataclass(frozen=True)
class BestLayout:
    """A mesh, a layout, and the seconds of a step."""

    seconds: float
    mesh: tuple[int, ...]
    layout: Layout


class LayoutCosts:
    """The cost of layouts of a graph. Equal layers are priced once."""

    def __init__(self, graph: Named, speeds: Speeds) -> None:
        self.graph, self._speeds = graph, speeds
        self._layers: dict[tuple[object, ...], Layer] = {}
        self._rows: dict[tuple[object, ...], tuple[Mapping[str, str], str | None]] = {}
        self._seen: dict[tuple[object, ...], float] = {}
        self._counts: Counter[tuple[object, ...]] = Counter()
        for layer, output, reduced in zip(graph.graph, graph.outputs, graph.reduced, strict=True):
            key = (layer.kind, tuple(layer.dims.items()), tuple(output.values()), reduced, layer.numel,
                   round(layer.forward, 12), round(layer.backward, 12))  # fmt: skip
            self._layers.setdefault(key, layer)
            self._rows.setdefault(key, (output, reduced))
            self._counts[key] += 1

    def seconds(self, mesh: Sequence[int], layout: Layout) -> float:
        """Return the seconds of a step with a layout."""
        total = 0.0
        for key, count in self._counts.items():
            output, reduced = self._rows[key]
            parts = tuple((kind, mesh[layout[name]]) for kind, name in output.items() if name in layout)
            summed = mesh[layout[reduced]] if reduced is not None and reduced in layout else 1
            place = (key, parts, summed)
            if place not in self._seen:
                self._seen[place] = layer_seconds(self._layers[key], dict(parts), summed, self._speeds)
            total += count * self._seen[place]
        return total


def mesh_tensorflow(costs: LayoutCosts, ranks: int) -> BestLayout:
    """Return the fastest valid layout over all meshes. Raises the errors of :func:`layouts`."""
    found = (
        BestLayout(costs.seconds(mesh, layout), mesh, layout)
        for mesh in meshes(ranks)
        for layout in layouts(costs.graph, mesh)
    )
    return min(found, key=lambda each: each.seconds)


# -- GShard --------------------------------------------------------------------------------------------------

Sharding = Mapping[str, int]  # number of parts by dimension; empty: every rank has the whole tensor


@dataclass(frozen=True)
class Sharded:
    """A layer with shardings. ``weight``: how its parameters are cut, by ``channel`` and ``reduced``;
    ``collectives``: the collectives in a step that follow."""

    output: Sharding
    weight: Sharding
    collectives: tuple[MeshCollective, ...]


def parse_annotation(text: str, ranks: int) -> Sharding:
    """Parse an annotation: ``replicate``, ``split:DIM`` over all ranks, or ``shard:DIM=N,...``.

    Raises:
        ConfigError: the text is not an annotation, or its number of parts is not the number of ranks.
    """
    word, _, rest = text.partition(":")
    found: dict[str, int] = {}
    if word == "split" and rest:
        found = {rest: ranks}
    elif word == "shard" and rest:
        for each in rest.split(","):
            name, _, count = each.partition("=")
            if not name or not count.isascii() or not count.isdecimal() or len(count) > 6 or int(count) < 1:
                raise ConfigError(f"annotation {text!r}: write shard:DIM=PARTS,DIM=PARTS")
            found[name] = int(count)
        if prod(found.values()) != ranks:
            parts = prod(found.values())
            raise ConfigError(f"annotation {text!r} has {parts} parts, and there are {ranks} ranks")
    elif text != "replicate":
        raise ConfigError(f"annotation {text!r}: give replicate, split:DIM or shard:DIM=PARTS,DIM=PARTS")
    return {name: count for name, count in found.items() if count > 1}


def gshard(graph: LayerGraph, annotations: Mapping[str, str], ranks: int) -> tuple[Sharded, ...]:
    """Return the sharding of each layer, propagated from annotated tensors.

    The keys of ``annotations`` are ``inputs``, the name of a layer for its output, or ``NAME.weight`` for its
    parameters, with the dimensions ``channel`` and ``reduced``. Other outputs follow from inputs and
    parameters; other parameters are whole.

    Raises:
        ConfigError: an annotation names no tensor, or cuts a dimension that cannot be cut.
    """
    weights = (f"{layer.name}.weight" for layer in graph if layer.numel)
    known = {"inputs", *(layer.name for layer in graph), *weights}
    if unknown := [name for name in annotations if name not in known]:
        raise ConfigError(f"annotation of {unknown[0]!r}: the model has no such tensor")
    said = {name: parse_annotation(text, ranks) for name, text in annotations.items()}
    found: list[Sharded] = []
    for layer in graph:
        found.append(_propagated(layer, [found[at] for at in layer.inputs], graph, said))
    return tuple(found)


def _propagated(
    layer: Layer, given: Sequence[Sharded], graph: LayerGraph, said: Mapping[str, Sharding]
) -> Sharded:
    weight = dict(said.get(f"{layer.name}.weight", {}))
    _check(f"{layer.name}.weight", weight, {"channel": layer.dims["channel"], "reduced": layer.reduced})
    source = given[0].output if given else said.get("inputs", {})
    is_contracting = layer.kind in CONTRACTING and bool(layer.reduced)
    inferred = {name: count for name, count in source.items() if name in layer.dims and name != "channel"}
    channel = weight.get("channel", 1) if is_contracting else source.get("channel", weight.get("channel", 1))
    if channel > 1 and layer.dims["channel"] % channel == 0:
        inferred["channel"] = channel
    inferred = {name: count for name, count in inferred.items() if layer.dims[name] % count == 0}
    reduced = weight.get("reduced", 1) if is_contracting else 1
    collectives: list[MeshCollective] = []
    whole = source.get("channel", 1)
    if is_contracting and given and whole > 1 and whole != reduced:
        nbytes = graph[layer.inputs[0]].output_bytes // prod(source.values())
        collectives.append(MeshCollective("all_gather", whole, nbytes, "the input"))
        collectives.append(
            MeshCollective("reduce_scatter", whole, nbytes * whole, "the gradient of the input")
        )
    for other in given[1:]:
        if dict(other.output) != dict(source):
            collectives += _resharded(layer, other.output, source)
    collectives += collectives_of(layer, inferred, reduced)
    if (copies := prod(count for name, count in inferred.items() if name != "channel")) > 1 and layer.numel:
        part = 4 * layer.numel // (inferred.get("channel", 1) * reduced)
        collectives.append(MeshCollective("all_reduce", copies, part, "gradients of parameters"))
    output = said.get(layer.name, inferred)
    _check(layer.name, output, layer.dims)
    if dict(output) != inferred:
        collectives += _resharded(layer, inferred, output)
    return Sharded(output, weight, tuple(collectives))


def _resharded(layer: Layer, one: Sharding, other: Sharding) -> list[MeshCollective]:
    """Return the collectives that convert a layer's output from one sharding to another, and its gradient
    back. If one sharding is finer in every dimension, ranks gather in one direction; otherwise they exchange
    in both."""
    fine, coarse = (one, other) if prod(one.values()) >= prod(other.values()) else (other, one)
    ranks = prod(fine.values()) // max(prod(coarse.values()), 1)
    nbytes = layer.output_bytes // prod(fine.values())
    if ranks > 1 and all(fine.get(name, 1) % count == 0 for name, count in coarse.items()):
        return [MeshCollective("all_gather", ranks, nbytes, "another sharding")]
    return [MeshCollective("all_to_all", max(prod(fine.values()), 2), nbytes, "another sharding")] * 2


def _check(name: str, sharding: Sharding, dims: Mapping[str, int]) -> None:
    for dim, count in sharding.items():
        if dim not in dims or dims[dim] == 0:
            raise ConfigError(f"annotation of {name!r}: it has no dimension {dim!r}, but {', '.join(dims)}")
        if dims[dim] % count:
            raise ConfigError(f"annotation of {name!r}: {dim} {dims[dim]} does not divide into {count} parts")


def gshard_seconds(graph: LayerGraph, sharded: Sequence[Sharded], speeds: Speeds) -> float:
    """Return the seconds of a step with these shardings."""
    total = 0.0
    for layer, each in zip(graph, sharded, strict=True):
        cut = each.weight.get("reduced", 1)
        computing = (layer.forward + layer.backward) / (prod(each.output.values()) * cut)
        held = -(-layer.numel // (each.output.get("channel", 1) * cut))
        update = held * (24 + layer.itemsize) / speeds.machine.adam_bytes_per_second
        total += (
            computing + update + sum(speeds.collective(m.kind, m.ranks, m.nbytes) for m in each.collectives)
        )
    return total
