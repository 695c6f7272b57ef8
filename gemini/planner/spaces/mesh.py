"""Tensors over a mesh: Mesh-TensorFlow's layouts and GShard's annotations, and the messages they imply.

Each layer is a product: for every element of its output it sums over the channels of its input. Ranks
compute parts of a cut dimension. Where they cut the sum, they add their parts up (an all-reduce). In backward
the channels of output and input change places. Gradients of parameters are added up over the rest.
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
from gemini.planner.figures import Speeds
from gemini.planner.spaces.graph import CONTRACTING, Layer, LayerGraph, divisors, own_seconds

_MOST_LAYOUTS = 2**18
Layout = Mapping[str, int]  # of named dimensions, by the place of a mesh dimension


class Message(NamedTuple):
    """A collective over ``ranks``, to which each gives ``nbytes``; ``why`` in words."""

    kind: str
    ranks: int
    nbytes: int
    why: str


def messages_of(layer: Layer, parts: Mapping[str, int], reduced: int) -> list[Message]:
    """Return the messages of activations of a layer whose output is cut into ``parts`` by dimension, and
    whose input channels into ``reduced``."""
    output = layer.output_bytes // prod(parts.values())
    found = []
    if reduced > 1:
        found.append(Message("all_reduce", reduced, output, "sums of input channels"))
    channel = parts.get("channel", 1)
    if layer.kind in CONTRACTING and channel > 1 and layer.kind != "embedding":
        rest = prod(parts.values()) // channel
        given = layer.output_bytes // layer.dims["channel"] * max(layer.reduced, 1) // (rest * reduced)
        found.append(Message("all_reduce", channel, given, "gradients of the input"))
    if layer.kind == "norm" and channel > 1:
        rows = output // (layer.dims["channel"] // channel)
        found.append(Message("all_reduce", channel, 2 * rows, "statistics"))
    if layer.kind == "attention" and parts.get("length", 1) > 1:
        found += [Message("all_gather", parts["length"], output, "keys and values")] * 2
    return found


def layer_seconds(layer: Layer, parts: Mapping[str, int], reduced: int, speeds: Speeds) -> float:
    """Return what a rank spends on a layer that is cut so."""
    messages = messages_of(layer, parts, reduced)
    sent = sum(speeds.collective(each.kind, each.ranks, each.nbytes) for each in messages)
    return own_seconds(layer, parts, speeds, reduced) + sent


# -- Mesh-TensorFlow -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A graph whose tensors have dimensions with names. ``outputs`` and ``reduced``: of each layer, the names
    of its output's dimensions, by kind, and of the channels that it sums over. ``sizes``: what a name's parts
    must divide."""

    graph: LayerGraph
    outputs: tuple[Mapping[str, str], ...]
    reduced: tuple[str | None, ...]
    sizes: Mapping[str, int]


def named(graph: LayerGraph) -> Named:
    """Return a graph with names: samples, lengths and sizes of images have one each; channels have that of
    the layer that makes them, without numbers, so that equal blocks have equal names; where tensors meet, as
    in a sum or as queries, keys and values, their names are one."""
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
    """Say whether no tensor has two dimensions on one of the mesh, and all parts are of one size."""
    for dims in tensors:
        places = [layout[name] for name in dims if name in layout]
        if len(set(places)) != len(places):
            return False
    return all(sizes[name] % mesh[place] == 0 for name, place in layout.items())


def tensors_of(graph: Named) -> list[tuple[str, ...]]:
    """Return the dimensions of all tensors: outputs, inputs and parameters."""
    found: dict[tuple[str, ...], None] = {}
    for layer, output, reduced in zip(graph.graph, graph.outputs, graph.reduced, strict=True):
        found[tuple(output.values())] = None
        if reduced is not None and layer.kind in CONTRACTING:
            found[output["channel"], reduced] = None
            rest = [name for kind, name in output.items() if kind != "channel"]
            given = (*rest, reduced)  # of an embedding: its input, a one for each word
            found[given] = None
    return list(found)


def layouts(graph: Named, mesh: Sequence[int]) -> Iterator[Layout]:
    """Yield all valid layouts: each gives dimensions of tensors their axes of the mesh.

    Raises:
        ConfigError: they are too many.
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
    """Return the shapes of meshes with so many ranks, of one or two dimensions."""
    return [(ranks,), *((each, ranks // each) for each in divisors(ranks) if 1 < each <= ranks // each)]


@dataclass(frozen=True)
class BestLayout:
    """A mesh, a layout, and the seconds of a step."""

    seconds: float
    mesh: tuple[int, ...]
    layout: Layout


class LayoutCosts:
    """What layouts of a graph cost. Equal layers are priced once."""

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
    """Return the fastest of all valid layouts over all meshes. Raises as :func:`layouts`."""
    found = (
        BestLayout(costs.seconds(mesh, layout), mesh, layout)
        for mesh in meshes(ranks)
        for layout in layouts(costs.graph, mesh)
    )
    return min(found, key=lambda each: each.seconds)


# -- GShard --------------------------------------------------------------------------------------------------

Sharding = Mapping[str, int]  # parts by dimension; nothing: every rank has the whole tensor


@dataclass(frozen=True)
class Sharded:
    """A layer as annotations have it. ``weight``: how its parameters are cut, by ``channel`` and
    ``reduced``; ``messages``: what that implies, in a step."""

    output: Sharding
    weight: Sharding
    messages: tuple[Message, ...]


def parse_annotation(text: str, ranks: int) -> Sharding:
    """Return what an annotation says: ``replicate``, ``split:DIM`` over all ranks, or ``shard:DIM=N,...``.

    Raises:
        ConfigError: it says something else, or parts that are not as many as the ranks.
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
    """Return how each layer is cut if some tensors are annotated: ``inputs``, a layer by its name for its
    output, and ``NAME.weight`` for its parameters, with the dimensions ``channel`` and ``reduced``. Other
    outputs follow from inputs and parameters; other parameters are whole.

    Raises:
        ConfigError: an annotation names no tensor, or cuts what it cannot.
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
    messages: list[Message] = []
    whole = source.get("channel", 1)
    if is_contracting and given and whole > 1 and whole != reduced:
        nbytes = graph[layer.inputs[0]].output_bytes // prod(source.values())
        messages.append(Message("all_gather", whole, nbytes, "the input"))
        messages.append(Message("reduce_scatter", whole, nbytes * whole, "the gradient of the input"))
    for other in given[1:]:
        if dict(other.output) != dict(source):
            messages += _resharded(layer, other.output, source)
    messages += messages_of(layer, inferred, reduced)
    if (copies := prod(count for name, count in inferred.items() if name != "channel")) > 1 and layer.numel:
        part = 4 * layer.numel // (inferred.get("channel", 1) * reduced)
        messages.append(Message("all_reduce", copies, part, "gradients of parameters"))
    output = said.get(layer.name, inferred)
    _check(layer.name, output, layer.dims)
    if dict(output) != inferred:
        messages += _resharded(layer, inferred, output)
    return Sharded(output, weight, tuple(messages))


def _resharded(layer: Layer, one: Sharding, other: Sharding) -> list[Message]:
    """Return the messages that turn one sharding of a layer's output into another, and back in backward: if
    one is finer in every dimension, ranks gather in one direction; else all exchange in both."""
    fine, coarse = (one, other) if prod(one.values()) >= prod(other.values()) else (other, one)
    ranks = prod(fine.values()) // max(prod(coarse.values()), 1)
    nbytes = layer.output_bytes // prod(fine.values())
    if ranks > 1 and all(fine.get(name, 1) % count == 0 for name, count in coarse.items()):
        return [Message("all_gather", ranks, nbytes, "another sharding")]
    return [Message("all_to_all", max(prod(fine.values()), 2), nbytes, "another sharding")] * 2


def _check(name: str, sharding: Sharding, dims: Mapping[str, int]) -> None:
    for dim, count in sharding.items():
        if dim not in dims or dims[dim] == 0:
            raise ConfigError(f"annotation of {name!r}: it has no dimension {dim!r}, but {', '.join(dims)}")
        if dims[dim] % count:
            raise ConfigError(f"annotation of {name!r}: {dim} {dims[dim]} does not divide into {count} parts")


def gshard_seconds(graph: LayerGraph, sharded: Sequence[Sharded], speeds: Speeds) -> float:
    """Return what a step takes with these shardings."""
    total = 0.0
    for layer, each in zip(graph, sharded, strict=True):
        cut = each.weight.get("reduced", 1)
        computing = (layer.forward + layer.backward) / (prod(each.output.values()) * cut)
        held = -(-layer.numel // (each.output.get("channel", 1) * cut))
        update = held * (24 + layer.itemsize) / speeds.machine.adam_bytes_per_second
        total += computing + update + sum(speeds.collective(m.kind, m.ranks, m.nbytes) for m in each.messages)
    return total
