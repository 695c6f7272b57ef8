"""Rotor: the fastest schedule in which a chain of blocks keeps, drops and recomputes activations.

The dynamic program of Rotor (INRIA research report 9302) over Pareto fronts of memory and time. It is optimal
among the schedules that keep a stored tensor until backward uses it.

A schedule is a list of items along the chain. An item is either the number of a block that keeps its
activations, or a group: a list of items that keeps only its input. When backward reaches a group, its blocks
run forward again as its items say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

Item: TypeAlias = Union[int, "tuple[Item, ...]"]
SLOTS = 500  # the most points in the front of a part of the chain
_STEPS = 12  # number of sizes tried for what forward keeps of a micro-batch


@dataclass(frozen=True)
class ChainBlock:
    """The cost of one block of a chain.

    Attributes:
        output_bytes: size of the output; its gradient has the same size.
        kept_bytes: bytes that a forward pass keeps for backward, including the output.
        extra: temporary bytes of a forward pass that keeps nothing, beyond its input and output.
        keep_extra: temporary bytes of a forward pass that keeps everything, beyond ``kept_bytes``; None:
            ``extra``.
        backward_extra: temporary bytes of backward, beyond ``kept_bytes`` and the gradient of the output.
        stays: the block must not be in a group.
    """

    forward_seconds: float
    backward_seconds: float
    output_bytes: int
    kept_bytes: int
    extra: int = 0
    backward_extra: int = 0
    keep_extra: int | None = None
    stays: bool = False

    @property
    def keeping_bytes(self) -> int:
        """Peak bytes of a forward pass that keeps everything."""
        return self.kept_bytes + (self.extra if self.keep_extra is None else self.keep_extra)


@dataclass(frozen=True)
class Chain:
    """Blocks that run one after another. ``input_bytes``: size of the input of the first block."""

    blocks: tuple[ChainBlock, ...]
    input_bytes: int = 0


class Act(Enum):
    """What an action does with a block: forward that drops its input, keeps its input, or keeps everything;
    or backward, which frees all of it."""

    DROP = "F"
    CHECKPOINT = "Fck"
    KEEP = "Fall"
    BACKWARD = "B"


Action = tuple[Act, int]


@dataclass(frozen=True)
class Schedule:
    """The fastest schedule within a budget. ``seconds``: of all passes; ``needed_bytes``: a budget that is
    enough."""

    items: tuple[Item, ...]
    seconds: float
    needed_bytes: int

    def actions(self) -> Iterator[Action]:
        """Yield the actions in the order in which they run."""
        return _actions(self.items)


def blocks_of(item: Item) -> tuple[int, ...]:
    """Return the blocks of an item in order."""
    return (item,) if isinstance(item, int) else tuple(at for each in item for at in blocks_of(each))


def _actions(items: Sequence[Item]) -> Iterator[Action]:
    for item in items:
        if isinstance(item, int):
            yield Act.KEEP, item
            continue
        first, *others = blocks_of(item)
        yield Act.CHECKPOINT, first
        yield from ((Act.DROP, each) for each in others)
    for item in reversed(items):
        if isinstance(item, int):
            yield Act.BACKWARD, item
        else:
            yield from _actions(item)


def replay(chain: Chain, actions: Sequence[Action]) -> tuple[float, int]:
    """Execute the actions in a model of memory. Return their seconds and the peak bytes.

    The input of the chain and the gradient of its last output exist from the beginning.

    Raises:
        ValueError: the input of an action is missing, or a block has no backward pass.
    """
    blocks, count = chain.blocks, len(chain.blocks)
    sizes = [chain.input_bytes, *(each.output_bytes for each in blocks)]  # tensors between blocks
    stored, kept, gradient = {0}, set[int](), count
    seconds, most = 0.0, 0

    def has(place: int) -> bool:
        return place in stored or place - 1 in kept  # kept activations include the block's output

    for act, at in actions:
        block = blocks[at]
        held = sum(sizes[each] for each in stored) + sum(blocks[each].kept_bytes for each in kept)
        held += sizes[gradient]
        if not has(at):
            raise ValueError(f"{act.value} of block {at}, and its input is not there")
        if act is Act.BACKWARD:
            if at not in kept or gradient != at + 1:
                raise ValueError(f"backward of block {at}, and what it needs is not there")
            most = max(most, held + block.backward_extra)
            seconds += block.backward_seconds
            kept.discard(at)
            stored -= {at, at + 1}
            gradient = at
            continue
        made = block.keeping_bytes if act is Act.KEEP else block.output_bytes + block.extra
        most = max(most, held + made)
        seconds += block.forward_seconds
        if act is Act.KEEP:
            kept.add(at)
        else:
            stored.add(at + 1)
            if act is Act.DROP:
                stored.discard(at)
    if gradient:
        raise ValueError(f"block {gradient - 1} has no backward pass")
    return seconds, most


class _Front(NamedTuple):
    """The least seconds for each number of bytes, ascending by bytes. ``choice`` 0: the first block keeps its
    activations; n: the first n blocks are a group."""

    nbytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    choice: NDArray[np.int64]

    def at(self, nbytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds for budgets of ``nbytes``; infinite if a budget is too small."""
        place = np.searchsorted(self.nbytes, nbytes, "right") - 1
        return np.where(place >= 0, self.seconds[np.maximum(place, 0)], np.inf)


class Rotor:
    """All schedules of a chain, by budget. Parts of the chain with equal blocks are computed once.

    A front has at most ``slots`` points and begins at the least memory that is enough. The points do not
    depend on the budget, so a larger budget never gives a slower schedule. A front that needs fewer points is
    exact.
    """

    def __init__(self, chain: Chain, *, slots: int = SLOTS) -> None:
        self.chain, self._slots = chain, slots
        numbers: dict[ChainBlock, int] = {}
        self._kinds = tuple(numbers.setdefault(each, len(numbers)) for each in chain.blocks)
        self._fronts: dict[tuple[int, ...], _Front] = {}

    def schedule(self, budget_bytes: int) -> Schedule | None:
        """Return the fastest schedule within a budget that includes the input; None: none fits."""
        count, given = len(self.chain.blocks), budget_bytes - self.chain.input_bytes
        front = self._front(0, count)
        place = int(np.searchsorted(front.nbytes, given, "right")) - 1
        if place < 0:
            return None
        needed = int(front.nbytes[place])
        items = self._items(0, count, needed)
        return Schedule(items, float(front.seconds[place]), needed + self.chain.input_bytes)

    def least_bytes(self) -> int:
        """Return the smallest budget for which a schedule exists."""
        return int(self._front(0, len(self.chain.blocks)).nbytes[0]) + self.chain.input_bytes

    def least_items(self, first: int, last: int) -> tuple[Item, ...]:
        """Return the items for the blocks ``[first, last)`` that need the least memory. Their input is not
        counted."""
        return self._items(first, last, int(self._front(first, last).nbytes[0]))

    def _front(self, first: int, last: int) -> _Front:
        if self._kinds[first:last] not in self._fronts:
            for length in range(1, last - first + 1):  # shortest parts first: _made() needs them
                for begin in range(first, last - length + 1):
                    key = self._kinds[begin : begin + length]
                    if key not in self._fronts:
                        self._fronts[key] = self._made(begin, begin + length)
        return self._fronts[self._kinds[first:last]]

    def _made(self, first: int, last: int) -> _Front:
        """Compute the front of the blocks ``[first, last)`` from the fronts of shorter parts."""
        blocks = self.chain.blocks
        own, gradient = blocks[first], blocks[last - 1].output_bytes
        least = max(gradient + own.keeping_bytes, own.output_bytes + own.kept_bytes + own.backward_extra)
        took = own.forward_seconds + own.backward_seconds
        if last - first == 1:
            return _Front(np.array([least]), np.array([took]), np.array([0]))
        rest = self._front(first + 1, last)
        found = [(np.maximum(least, own.kept_bytes + rest.nbytes), took + rest.seconds)]
        needed, forward, given = 0, 0.0, 0
        for count, block in enumerate(blocks[first : last - 1], 1):
            if block.stays:
                break
            needed = max(needed, gradient + given + block.output_bytes + block.extra)
            forward, given = forward + block.forward_seconds, block.output_bytes
            again, behind = self._front(first, first + count), self._front(first + count, last)
            behind = behind._replace(nbytes=behind.nbytes + given)
            least = max(needed, int(again.nbytes[0]), int(behind.nbytes[0]))
            nbytes = np.maximum(np.concatenate((again.nbytes, behind.nbytes)), least)
            found.append((nbytes, forward + again.at(nbytes) + behind.at(nbytes)))
        return self._thinned(found)

    def _thinned(self, found: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> _Front:
        """Return the Pareto front of ``found`` (one entry per choice), reduced to ``slots`` points."""
        nbytes = np.concatenate([each for each, _ in found])
        seconds = np.concatenate([each for _, each in found])
        choice = np.repeat(np.arange(len(found)), [len(each) for each, _ in found])
        order = np.lexsort((seconds, nbytes))
        best = np.minimum.accumulate(seconds[order])
        order = order[np.concatenate(([True], best[1:] < best[:-1]))]
        if len(order) > self._slots:
            given = nbytes[order]
            grid = np.linspace(float(given[0]), float(given[-1]), self._slots)
            grid[0], grid[-1] = given[0], given[-1]
            order = order[np.unique(np.searchsorted(given, grid, "right") - 1)]
        return _Front(nbytes[order], seconds[order], choice[order])

    def _items(self, first: int, last: int, budget_bytes: int) -> tuple[Item, ...]:
        items: list[Item] = []
        while first < last:
            front = self._front(first, last)
            place = int(np.searchsorted(front.nbytes, budget_bytes, "right")) - 1
            needed, count = int(front.nbytes[place]), int(front.choice[place])
            if count == 0:
                items.append(first)
                budget_bytes, first = needed - self.chain.blocks[first].kept_bytes, first + 1
                continue
            items.append(self._items(first, first + count, needed))
            first += count
            budget_bytes = needed - self.chain.blocks[first - 1].output_bytes
        return tuple(items)

    # -- several micro-batches -------------------------------------------------------------------

    def spread(self, budget_bytes: int, others: int) -> Schedule | None:
        """Return the fastest schedule of a stage that holds the kept activations of ``others`` micro-batches
        while it runs one. None: none fits.

        The gradient of its output arrives when forward is over. With several micro-batches, the size of what
        forward keeps is tried in even steps, so the result is not an exact optimum.
        """
        given = budget_bytes - (others + 1) * self.chain.input_bytes
        total = sum(each.kept_bytes for each in self.chain.blocks)
        if others == 0:
            return self._spread(given, total, budget_bytes)
        most = min(total, given // (others + 1))
        found: Schedule | None = None
        for step in range(1, _STEPS + 1):
            left = most * step // _STEPS
            one = self._spread(given - others * left, left, budget_bytes)
            if one is not None and (found is None or one.seconds < found.seconds):
                found = one
        return found

    def _spread(self, room: int, left: int, needed: int) -> Schedule | None:
        """Return the fastest schedule within ``room`` in which forward keeps at most ``left`` bytes of one
        micro-batch."""
        count = len(self.chain.blocks)
        # By the number of blocks covered: bytes kept, seconds, size of the last item, label before it.
        labels: list[list[tuple[NDArray[np.int64], NDArray[np.float64], int, NDArray[np.int64]]]]
        labels = [[] for _ in range(count + 1)]
        labels[0].append((np.array([0]), np.array([0.0]), 0, np.array([0])))
        known: list[_Labels] = []
        for first in range(count + 1):
            at = _Labels.of(labels[first], left, self._slots)
            known.append(at)
            if not len(at.nbytes) or first == count:
                continue
            for size, nbytes, takes in self._extended(first, room - at.nbytes):
                which = np.flatnonzero(np.isfinite(takes))
                labels[first + max(size, 1)].append(
                    (at.nbytes[which] + nbytes, at.seconds[which] + takes[which], size, which)
                )
        if not len(known[count].nbytes):
            return None
        place = int(np.argmin(known[count].seconds))
        seconds, items, last = float(known[count].seconds[place]), list[Item](), count
        while last:
            at = known[last]
            size, place = int(at.size[place]), int(at.before[place])
            last -= max(size, 1)
            if size == 0:
                items.append(last)
            else:
                items.append(self._items(last, last + size, room - int(known[last].nbytes[place])))
        return Schedule(tuple(reversed(items)), seconds, needed)

    def _extended(
        self, first: int, room: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, NDArray[np.float64]]]:
        """Yield each item that may begin with block ``first``: (choice, bytes that it keeps, seconds for each
        ``room``). The seconds are infinite if the room is too small."""
        blocks = self.chain.blocks
        own = blocks[first]
        least = max(own.keeping_bytes, own.output_bytes + own.kept_bytes + own.backward_extra)
        took = own.forward_seconds + own.backward_seconds
        yield 0, own.kept_bytes, np.where(room >= least, took, np.inf)
        needed, forward, given = 0, 0.0, 0
        for size, block in enumerate(blocks[first:], 1):
            if block.stays:
                break
            needed = max(needed, given + block.output_bytes + block.extra)
            forward, given = forward + block.forward_seconds, block.output_bytes
            again = self._front(first, first + size).at(room)
            yield size, given, np.where(room >= needed, forward + again, np.inf)


class _Labels(NamedTuple):
    """Ways to cover the first blocks of the chain: bytes kept, ascending, and seconds, descending."""

    nbytes: NDArray[np.int64]
    seconds: NDArray[np.float64]
    size: NDArray[np.int64]
    before: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        found: Sequence[tuple[NDArray[np.int64], NDArray[np.float64], int, NDArray[np.int64]]],
        most: int,
        slots: int,
    ) -> _Labels:
        """Return the Pareto front of the ways that keep at most ``most`` bytes, reduced to ``slots``."""
        nbytes = np.concatenate([np.empty(0, np.int64), *(each[0] for each in found)])
        seconds = np.concatenate([np.empty(0), *(each[1] for each in found)])
        size = np.repeat(np.array([each[2] for each in found], np.int64), [len(each[0]) for each in found])
        before = np.concatenate([np.empty(0, np.int64), *(each[3] for each in found)])
        order = np.lexsort((seconds, nbytes))
        order = order[nbytes[order] <= most]
        if len(order):
            best = np.minimum.accumulate(seconds[order])
            order = order[np.concatenate(([True], best[1:] < best[:-1]))]
        if len(order) > slots:
            order = order[np.unique(np.linspace(0, len(order) - 1, slots).astype(np.int64))]
        return cls(nbytes[order], seconds[order], size[order], before[order])
