"""Which segments of a stage run forward again in backward, and how much memory the stage then holds.

Recomputed segments lie in groups (:mod:`gemini.planner.rotor`). A group keeps only its input; a group inside
it is computed once more. All other segments keep everything that backward needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from math import ceil
from typing import NamedTuple

from gemini.parallel.pipeline.orders import Kind, make_order
from gemini.planner.rotor import Chain, ChainBlock, Item, Rotor, blocks_of
from gemini.planner.segment_costs import SegmentCosts

Group = tuple[Item, ...]
Groups = tuple[Group, ...]  # in the order of their segments
OrderOf = tuple[str, int, int, int, tuple[int, ...]]  # the arguments of make_order
_SLOTS = 64


def alone(segments: Iterable[int]) -> Groups:
    """Return groups of one segment each."""
    return tuple((each,) for each in sorted(segments))


@lru_cache(maxsize=4096)
def again(groups: Groups) -> dict[int, int]:
    """Return how many times each segment of ``groups`` runs forward again, by segment."""
    found: Counter[int] = Counter()
    for group in groups:
        found.update(blocks_of(group))
        for item in group:
            if not isinstance(item, int):
                found.update(again((item,)))
    return dict(found)


class Held:
    """The memory of stages for a micro-batch if ``groups`` of segments are recomputed."""

    def __init__(self, costs: Sequence[SegmentCosts], groups: Groups) -> None:
        self._costs, self.groups = costs, groups
        self.times = again(groups)
        self._group_at = {blocks_of(group)[0]: group for group in groups}

    def kept_of(self, at: int) -> float:
        """Return the bytes that forward keeps of a segment. A group keeps only its input, and what code
        behind its blocks makes."""
        own = self._costs[at]
        if at not in self.times:
            return own.kept_bytes
        return own.rest_bytes + (own.input_bytes if at in self._group_at else 0.0)

    def kept(self, first: int, last: int) -> float:
        """Return what a stage leaves of one micro-batch, its input from another rank included."""
        received = self._costs[first].begin_bytes if first else 0
        return received + sum(self.kept_of(at) for at in range(first, last))

    def between_halves(self, first: int, last: int) -> float:
        """Return what a stage holds more than it has kept of a micro-batch when the input's half of backward
        has run: what was computed again, and the gradients with which those of weights begin."""
        whole = sum(self._costs[at].kept_bytes - self.kept_of(at) for at in range(first, last))
        return max(whole, 0.0) + sum(self._costs[at].output_bytes for at in range(first, last))

    def most_of_half(self, first: int, last: int) -> float:
        """Return the peak bytes of a stage while it runs the input's half of backward, without what
        :meth:`between_halves` counts."""
        return self.kept(first, last) + max(self._costs[at].half_bytes for at in range(first, last))

    def most(self, first: int, last: int) -> float:
        """Return the peak bytes of a stage while it runs one micro-batch."""
        items: list[Item] = []
        for at in range(first, last):
            if at not in self.times:
                items.append(at)
            elif at in self._group_at:
                items.append(self._group_at[at])
        received = self._costs[first].begin_bytes if first else 0
        return self._most(items, received, 0.0)

    def _most(self, items: Sequence[Item], held: float, gradient: float) -> float:
        """Return the peak bytes of forward and backward over ``items``. ``held`` bytes exist before, and a
        ``gradient`` of that many bytes waits for backward."""
        costs, most, before = self._costs, 0.0, []
        for item in items:
            before.append(held)
            if isinstance(item, int):
                most = max(most, held + gradient + costs[item].forward_peak_bytes)
                held += costs[item].kept_bytes
                continue
            given = 0.0
            for at in blocks_of(item):
                most = max(most, held + gradient + given + costs[at].forward_peak_bytes)
                given = self._output(at)
            held += costs[blocks_of(item)[0]].input_bytes
            held += sum(costs[at].rest_bytes for at in blocks_of(item))
        for item, under in zip(items, before, strict=True):
            if isinstance(item, int):
                most = max(most, under + costs[item].peak_bytes)
            else:
                most = max(most, self._most(item, under, self._carried(blocks_of(item)[-1])))
        return most

    def _carried(self, at: int) -> float:
        """Return the bytes of gradients when a block begins to recompute: at least that of its output."""
        return max(self._costs[at].carried_bytes, self._output(at))

    def _output(self, at: int) -> float:
        """Return the bytes of a segment's output."""
        return self._costs[at + 1].input_bytes if at + 1 < len(self._costs) else 0.0


def rotor_of(costs: Sequence[SegmentCosts], first: int, last: int) -> Rotor:
    """Return the recomputation schedules of a stage. The segments before and behind all blocks are never
    recomputed."""
    blocks = []
    for at in range(first, last):
        own = costs[at]
        given = costs[at + 1].input_bytes if at + 1 < len(costs) else 0.0
        blocks.append(
            ChainBlock(
                own.forward_seconds,
                own.backward_seconds,
                ceil(given),
                ceil(own.kept_bytes),
                ceil(max(own.forward_peak_bytes - given, 0)),
                ceil(max(own.peak_bytes - own.kept_bytes - given, 0)),
                ceil(max(own.forward_peak_bytes - own.kept_bytes, 0)),
                stays=at in (0, len(costs) - 1),
            )
        )
    received = costs[first].begin_bytes if first else 0.0
    return Rotor(Chain(tuple(blocks), ceil(received)), slots=_SLOTS)


def groups_of(items: Iterable[Item], first: int) -> Iterator[Group]:
    """Yield the groups among the items of a stage. ``first`` is the stage's first segment."""
    for item in items:
        if not isinstance(item, int):
            yield _moved(item, first)


def even_groups(rotor: Rotor, blocks: Sequence[int], first: int) -> Iterator[Groups]:
    """Yield groupings of all ``blocks`` of a stage into groups of equal size, for each size. Every size is
    tried with groups that run again as a whole, and with groups that recompute for the least memory."""
    for size in range(1, len(blocks) + 1):
        starts = range(0, len(blocks), size)
        yield tuple(tuple(blocks[at : at + size]) for at in starts)
        if size > 1:
            yield tuple(
                _moved(rotor.least_items(blocks[at] - first, blocks[at : at + size][-1] + 1 - first), first)
                for at in starts
            )


def held_at_most(costs: Sequence[SegmentCosts], stage: tuple[int, int], others: int, groups: Groups) -> float:
    """Return the peak bytes of a stage that holds ``others`` micro-batches besides the one that runs."""
    held = Held(costs, groups)
    return others * held.kept(*stage) + held.most(*stage)


def _moved(items: Group, by: int) -> Group:
    return tuple(each + by if isinstance(each, int) else _moved(each, by) for each in items)


def least_again(costs: Sequence[SegmentCosts], blocks: Iterable[int], freed_bytes: float) -> float:
    """Return a lower bound for the seconds of recomputation among ``blocks`` that frees ``freed_bytes``.

    The bound assumes that kept inputs take no memory and that a part of a block can be recomputed. It is
    infinite if all blocks together free too little.
    """

    def value(at: int) -> float:
        return costs[at].kept_bytes / max(costs[at].forward_seconds, 1e-12)

    seconds = 0.0
    for at in sorted(blocks, key=value, reverse=True):
        if freed_bytes <= 0:
            return seconds
        share = min(1.0, freed_bytes / max(costs[at].kept_bytes, 1e-12))
        seconds += share * costs[at].forward_seconds
        freed_bytes -= costs[at].kept_bytes
    return seconds if freed_bytes <= 0 else float("inf")


def passing_bytes(costs: Sequence[SegmentCosts], ranges: Sequence[tuple[int, int]]) -> float:
    """Return what is on its way between the stages of a rank and others, at most: what arrives ahead of its
    use, and a gradient that another rank has not taken yet."""
    return 2 * max((costs[first].received_bytes for first, _ in ranges if first), default=0.0)


class UnderWay(NamedTuple):
    """A moment of a rank: its stage ``at`` runs a micro-batch; of others it holds the activations, so many
    ``counts`` by stage. ``halves`` of these have run the input's half of backward. ``is_half``: the one that
    runs is in such a half."""

    at: int
    counts: tuple[int, ...]
    halves: tuple[int, ...]
    is_half: bool

    def is_less(self, other: UnderWay) -> bool:
        """Say whether no less is held at another moment."""
        pairs = zip((*self.counts, *self.halves), (*other.counts, *other.halves), strict=True)
        return self.at == other.at and self.is_half <= other.is_half and all(a <= b for a, b in pairs)


@cache
def under_way(order_of: OrderOf, rank: int) -> tuple[UnderWay, ...]:
    """Return the moments of a rank at which it holds most."""
    order = make_order(*order_of)
    stages = order.stages_of(rank)
    counts, halves = [0] * len(stages), [0] * len(stages)
    seen = set()
    for action in order.by_rank[rank]:
        at = stages.index(action.stage)
        if action.kind is not Kind.FORWARD:
            counts[at] -= 1
        if action.kind is Kind.WEIGHT:
            halves[at] -= 1
        is_half = action.kind in (Kind.INPUT, Kind.WEIGHT)
        seen.add(UnderWay(at, tuple(counts), tuple(halves), is_half))
        if action.kind in (Kind.FORWARD, Kind.INPUT):
            counts[at] += 1
        if action.kind is Kind.INPUT:
            halves[at] += 1
    return tuple(one for one in seen if not any(one != other and one.is_less(other) for other in seen))
