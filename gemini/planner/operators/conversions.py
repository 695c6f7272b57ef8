"""Layouts of tensors on a mesh of ranks, and the cheapest conversion from one layout to another."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

import torch

from gemini.errors import ConfigError
from gemini.memstats.collectives import CollectiveSpeeds

ALL_GATHER, SHARD, ALL_TO_ALL = "all_gather", "shard", "all_to_all"
ALL_REDUCE, REDUCE_SCATTER, MASK = "all_reduce", "reduce_scatter", "mask"
_LOCAL = (SHARD, MASK)  # no rank sends anything
_TEXT = re.compile(r"(?P<dims>(?:R|S[0-9]+)*|\(\))(?:\+P(?P<partial>[0-9]+))?")
_DIM = re.compile(r"R|S[0-9]+")


@dataclass(frozen=True, order=True)
class OperatorLayout:
    """The distribution of a tensor over a mesh.

    ``dims`` has for each dimension the mesh axes that cut it, outermost first. Along the axes of ``partial``,
    ranks hold summands; along all other axes, copies.

    As text, each dimension is ``R`` or ``S`` with its axes: ``S01RR``, ``S0S1R`` or ``R``; ``()`` for a
    tensor without dimensions; ``RR+P0`` with partial sums along axis 0.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()

    @classmethod
    def whole(cls, ndim: int) -> OperatorLayout:
        """Return the layout of a tensor that every rank has whole."""
        return cls(((),) * ndim)

    @classmethod
    def parse(cls, text: str) -> OperatorLayout:
        """Parse the text of a layout. Raises ConfigError."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise ConfigError(
                f"{text[:40]!r} is no layout: write R or S with mesh axes for each dimension, such as S01RR "
                "or S0RR+P1"
            )
        dims = tuple(tuple(map(int, each[1:])) for each in _DIM.findall(found["dims"]))
        partial = tuple(map(int, found["partial"] or ""))
        used = [axis for each in dims for axis in each] + list(partial)
        if len(set(used)) != len(used):
            raise ConfigError(f"{text[:40]!r} uses a mesh axis twice: an axis cuts one dimension, once")
        return cls(dims, tuple(sorted(partial)))

    def __str__(self) -> str:
        dims = "".join(f"S{''.join(map(str, each))}" if each else "R" for each in self.dims)
        return (dims or "()") + (f"+P{''.join(map(str, self.partial))}" if self.partial else "")

    @cached_property
    def cut(self) -> frozenset[int]:
        """The axes that cut a dimension."""
        return frozenset(axis for each in self.dims for axis in each)

    def shards(self, sizes: Sequence[int]) -> int:
        """Return the number of parts into which the tensor is cut."""
        return math.prod(sizes[axis] for axis in self.cut)

    def local_shape(self, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part."""
        return tuple(
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def fits(self, shape: Sequence[int], sizes: Sequence[int]) -> bool:
        """Return whether all parts of a tensor of this shape are equal and none is empty."""
        return all(
            size % (parts := math.prod(sizes[axis] for axis in axes)) == 0 and size >= parts
            for size, axes in zip(shape, self.dims, strict=True)
        )

    def with_dim(self, dim: int, axes: tuple[int, ...]) -> OperatorLayout:
        """Return this layout with other axes for one dimension."""
        return OperatorLayout((*self.dims[:dim], axes, *self.dims[dim + 1 :]), self.partial)

    def without_partial(self, axis: int) -> OperatorLayout:
        """Return this layout after its partial sums along an axis were added up."""
        return OperatorLayout(self.dims, tuple(each for each in self.partial if each != axis))


class Step(NamedTuple):
    """One collective or local operation along a mesh ``axis``. It moves the axis from dimension ``dim`` to
    dimension ``to`` (-1: none)."""

    kind: str
    axis: int
    dim: int = -1
    to: int = -1

    def __str__(self) -> str:
        where = [str(each) for each in (self.dim, self.to) if each >= 0]
        return f"{self.kind}[{self.axis}]({'->'.join(where)})"


def one_step(
    layout: OperatorLayout,
    sizes: Sequence[int],
    shape: Sequence[int] | None = None,
    *,
    source: OperatorLayout | None = None,
) -> dict[OperatorLayout, Step]:
    """Return every layout that is one step from ``layout``, on a mesh of these ``sizes``.

    ``source`` is excluded. With a ``shape``, layouts with unequal parts are excluded.
    """
    found: dict[OperatorLayout, Step] = {}
    for made, step in _changes(layout, len(sizes)):
        if made != source and (shape is None or made.fits(shape, sizes)):
            found.setdefault(made, step)
    return found


def _changes(layout: OperatorLayout, num_axes: int) -> Iterator[tuple[OperatorLayout, Step]]:
    dims = range(len(layout.dims))
    for dim in dims:
        if not layout.dims[dim]:
            continue
        *outer, axis = layout.dims[dim]
        gathered = layout.with_dim(dim, tuple(outer))
        yield gathered, Step(ALL_GATHER, axis, dim)
        for to in dims:
            if to != dim:
                moved = gathered.with_dim(to, (*layout.dims[to], axis))
                yield moved, Step(ALL_TO_ALL, axis, dim, to)
    for axis in layout.partial:
        whole = layout.without_partial(axis)
        yield whole, Step(ALL_REDUCE, axis)
        for to in dims:
            yield whole.with_dim(to, (*layout.dims[to], axis)), Step(REDUCE_SCATTER, axis, to=to)
    for axis in range(num_axes):
        if axis not in layout.cut and axis not in layout.partial:
            for to in dims:
                yield layout.with_dim(to, (*layout.dims[to], axis)), Step(SHARD, axis, to=to)


def difference(layout: OperatorLayout, target: OperatorLayout) -> int:
    """Return the distance between two layouts. An axis that must be gathered counts more than one that must
    be cut."""
    total = 2 * len(set(layout.partial) ^ set(target.partial))
    for own, wanted in zip(layout.dims, target.dims, strict=True):
        common = 0
        while common < min(len(own), len(wanted)) and own[common] == wanted[common]:
            common += 1
        total += 2 * (len(own) - common) + (len(wanted) - common)
    return total


def greedy_path(
    source: OperatorLayout,
    target: OperatorLayout,
    sizes: Sequence[int],
    shape: Sequence[int] | None = None,
) -> list[tuple[Step, OperatorLayout]]:
    """Return the steps from ``source`` to ``target``, each with the layout that it makes.

    The greedy search of the ColossalAI documents: each step goes to the layout that differs least from the
    target.

    Raises:
        ConfigError: the layouts differ in their number of dimensions, or ``target`` has partial sums along an
            axis where ``source`` has none.
    """
    _check_pair(source, target)
    if set(target.partial) - set(source.partial):
        raise ConfigError(f"no collective makes {target} of {source}: only operators make partial sums")
    path: list[tuple[Step, OperatorLayout]] = []
    layout = source
    while layout != target:
        choices = one_step(layout, sizes, shape)
        # A partial sum that the target keeps is never reduced: some other step is always nearer.
        layout = min(choices, key=lambda each: (difference(each, target), str(each)))
        path.append((choices[layout], layout))
    return path


@dataclass(frozen=True)
class Links:
    """The speed of collectives along each axis of a mesh. ``sizes``: ranks along each axis; ``speeds``: one
    entry per axis, or one for all."""

    sizes: tuple[int, ...]
    speeds: tuple[CollectiveSpeeds, ...] = field(default=(CollectiveSpeeds(),))

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) > 4 or any(size < 1 for size in self.sizes):
            raise ConfigError(f"a mesh has one to four axes of at least one rank, and this one {self.sizes}")
        if len(self.speeds) not in (1, len(self.sizes)):
            raise ConfigError(
                f"there are speeds of {len(self.speeds)} axes, and the mesh has {len(self.sizes)}: give one "
                "for all, or one for each"
            )

    @cached_property
    def _lines(self) -> dict[tuple[str, int], tuple[float, float]]:
        """(latency in seconds, seconds per byte) by kind and axis."""
        found = {}
        for axis, size in enumerate(self.sizes):
            for kind in (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, REDUCE_SCATTER):
                if size == 1:
                    found[kind, axis] = (0.0, 0.0)
                    continue
                speed = self.speeds[axis if len(self.speeds) > 1 else 0].speed(kind, size)
                found[kind, axis] = (speed.latency_seconds.value, 1 / speed.bytes_per_second.value)
        return found

    def seconds(self, step: Step, nbytes: float) -> float:
        """Return the seconds of a step to which each rank gives ``nbytes``."""
        if step.kind in _LOCAL:
            return 0.0
        latency, per_byte = self._lines[step.kind, step.axis]
        return latency + nbytes * per_byte

    def sends(self, step: Step) -> bool:
        """Return whether ranks exchange data in a step."""
        return step.kind not in _LOCAL and self.sizes[step.axis] > 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.sizes)


class Path(NamedTuple):
    """The cheapest conversion of a layout: its seconds, and its steps with the layouts that they make."""

    seconds: float
    steps: tuple[tuple[Step, OperatorLayout], ...]


class Converter:
    """Finds the cheapest conversions on a mesh, and caches them."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self._known: dict[tuple[object, ...], dict[OperatorLayout, Path]] = {}

    def path(
        self, source: OperatorLayout, target: OperatorLayout, shape: Sequence[int], element_bytes: int
    ) -> Path | None:
        """Return the cheapest path from ``source`` to ``target``; None if there is none (a tensor of this
        shape cannot have the target layout)."""
        if source == target:
            return Path(0.0, ())
        extra = tuple(sorted(set(target.partial) - set(source.partial)))
        key = (source, extra, tuple(shape), element_bytes)
        if key not in self._known:
            self._known[key] = self._paths_from(source, extra, tuple(shape), element_bytes)
        return self._known[key].get(target)

    def seconds(
        self, source: OperatorLayout, target: OperatorLayout, shape: Sequence[int], element_bytes: int
    ) -> float:
        """Return the seconds of the cheapest conversion; infinity if there is none."""
        path = self.path(source, target, shape, element_bytes)
        return math.inf if path is None else path.seconds

    def _paths_from(
        self, source: OperatorLayout, masked: tuple[int, ...], shape: tuple[int, ...], element_bytes: int
    ) -> dict[OperatorLayout, Path]:
        """Return the cheapest path to every layout (Dijkstra). ``masked``: axes along which a MASK step may
        turn copies into a sum of one copy and zeros."""
        sizes = self.links.sizes
        total = math.prod(shape) * element_bytes
        done: dict[OperatorLayout, Path] = {}
        queue: list[tuple[float, int, int, OperatorLayout, tuple[tuple[Step, OperatorLayout], ...]]] = [
            (0.0, 0, 0, source, ())
        ]
        order = 0
        while queue:
            seconds, _, _, layout, steps = heapq.heappop(queue)
            if layout in done:
                continue
            done[layout] = Path(seconds, steps)
            nbytes = total / layout.shards(sizes)
            for made, step in _moves(layout, sizes, shape, masked).items():
                if made not in done:
                    order += 1
                    cost = seconds + self.links.seconds(step, nbytes)
                    heapq.heappush(queue, (cost, len(steps) + 1, order, made, (*steps, (step, made))))
        return done


@lru_cache(maxsize=4096)
def _moves(
    layout: OperatorLayout, sizes: tuple[int, ...], shape: tuple[int, ...], masked: tuple[int, ...]
) -> dict[OperatorLayout, Step]:
    found = one_step(layout, sizes, shape)
    for axis in masked:
        if axis not in layout.cut and axis not in layout.partial:
            summed = OperatorLayout(layout.dims, tuple(sorted((*layout.partial, axis))))
            found.setdefault(summed, Step(MASK, axis))
    return found


def _check_pair(source: OperatorLayout, target: OperatorLayout) -> None:
    if len(source.dims) != len(target.dims):
        raise ConfigError(
            f"{source} is of {len(source.dims)} dimensions and {target} of {len(target.dims)}: conversion "
            "keeps the shape"
        )


# -- on tensors ------------------------------------------------------------------------------------


def coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the coordinates of each rank on the mesh; the last axis varies fastest."""
    return list(product(*map(range, sizes)))


def part_of(
    tensor: torch.Tensor, layout: OperatorLayout, sizes: Sequence[int], place: Sequence[int]
) -> torch.Tensor:
    """Return a view of the part of a whole tensor that belongs to the rank at ``place``."""
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            length = tensor.shape[dim] // sizes[axis]
            tensor = tensor.narrow(dim, place[axis] * length, length)
    return tensor


def convert_parts(
    parts: Sequence[torch.Tensor], steps: Sequence[Step], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Simulate ``steps`` in this process: return the parts of all ranks afterwards, in the order of
    :func:`coordinates`."""
    places = coordinates(sizes)
    now = dict(zip(places, parts, strict=True))
    for step in steps:
        then = {}
        for place in places:
            group = [now[_moved(place, step.axis, number)] for number in range(sizes[step.axis])]
            then[place] = _simulated(step, group, place[step.axis])
        now = then
    return [now[place] for place in places]


def _moved(place: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    """Return the coordinates of another rank along an axis."""
    return (*place[:axis], number, *place[axis + 1 :])


def _simulated(step: Step, group: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Return the part of one rank after a step. ``group``: the parts of all ranks along the axis before
    it."""
    size, own = len(group), group[rank]
    if step.kind == ALL_GATHER:
        return torch.cat(group, step.dim)
    if step.kind == ALL_TO_ALL:
        return torch.cat([each.chunk(size, step.to)[rank] for each in group], step.dim)
    if step.kind == ALL_REDUCE:
        return torch.stack(group).sum(0)
    if step.kind == REDUCE_SCATTER:
        return torch.stack(group).sum(0).chunk(size, step.to)[rank]
    if step.kind == SHARD:
        return own.chunk(size, step.to)[rank]
    return own if rank == 0 else torch.zeros_like(own)
