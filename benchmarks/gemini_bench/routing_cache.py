"""Simulate a cache of experts on recorded routings, under one budget for all layers; and case ``routings``.

A moment per layer and pass. A layer's use set is pinned at its moment; what is missing is read, after as many
experts as do not fit any longer have been evicted, highest score first. Nothing is read ahead. Experts are of
equal size, and clean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gemini_bench import routing, use_rate
from gemini_bench.record import Row
from gemini_bench.routing import Uses
from gemini_bench.session import CaseResult, Session

SHARES = (1 / 8, 1 / 4, 1 / 3, 1 / 2)  # of all experts, on DEVICE
BATCHES = (1, 4, 8)
MOST_OVER_BEST = 1.05

Scores = npt.NDArray[np.int64]  # [layers, experts]


class Policy(Protocol):
    """Ranks victims. ``note`` is called before the victims of the same moment are chosen."""

    def note(self, number: int, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """See the use set of a layer in pass ``number``."""

    def scores(self, number: int, layer: int) -> Scores:
        """Return how much one would like each expert gone, at the moment of a layer."""


class Lru:
    """The one unused for longest goes first."""

    def __init__(self, uses: Uses) -> None:
        _, self._layers, experts = uses.shape
        self._last = np.full((self._layers, experts), -1)

    def note(self, number: int, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """See :class:`Policy`."""
        self._last[layer, used] = number * self._layers + layer

    def scores(self, number: int, layer: int) -> Scores:
        """See :class:`Policy`."""
        scores: npt.NDArray[np.int64] = -self._last
        return scores


class Lfu:
    """The one that was used least often since the start goes first; among equals, unused for longest."""

    def __init__(self, uses: Uses) -> None:
        _, self._layers, experts = uses.shape
        self._last = np.full((self._layers, experts), -1)
        self._count = np.zeros(uses.shape[1:], dtype=np.int64)

    def note(self, number: int, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """See :class:`Policy`."""
        self._last[layer, used] = number * self._layers + layer
        self._count[layer, used] += 1

    def scores(self, number: int, layer: int) -> Scores:
        """See :class:`Policy`."""
        recency: npt.NDArray[np.int64] = -self._last - (self._count << 32)
        return recency


class Exact:
    """Evicts the expert with the furthest next use; needs the future."""

    def __init__(self, uses: Uses) -> None:
        passes, self._layers, _ = uses.shape
        self._next = np.full((passes + 1, *uses.shape[1:]), 1 << 40)
        layers = np.arange(self._layers)[:, None]
        for number in reversed(range(passes)):
            self._next[number] = np.where(
                uses[number], number * self._layers + layers, self._next[number + 1]
            )

    def note(self, number: int, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """See :class:`Policy`."""

    def scores(self, number: int, layer: int) -> Scores:
        """See :class:`Policy`."""
        passed = np.arange(self._layers)[:, None] <= layer
        upcoming: npt.NDArray[np.int64] = np.where(passed, self._next[number + 1], self._next[number])
        return upcoming


class Expected:
    """The product's rule, for all experts at once: the numbers of :class:`~gemini_bench.use_rate.UseRate`.

    ``estimate`` forces one of its estimates, for comparison.
    """

    def __init__(self, uses: Uses, estimate: int | None = None) -> None:
        _, self._layers, self._experts = uses.shape
        self._forced = estimate
        self.counts = np.zeros(len(use_rate.ESTIMATES), dtype=np.int64)
        self._weights = np.array(use_rate.ESTIMATES, dtype=np.int64)
        self._half_lives = np.array(use_rate.HALF_LIVES)[:, None, None]
        self._decay = [np.array(table) for table in use_rate.decay_tables()]
        self._gain = np.array(use_rate.gains())[:, None]
        self._values = np.zeros((len(use_rate.HALF_LIVES), self._layers, self._experts), dtype=np.int64)
        self._last = np.zeros((self._layers, self._experts), dtype=np.int64)
        self._passes = np.zeros((self._layers, 1), dtype=np.int64)
        self._cursor = np.zeros(self._layers, dtype=np.int64)

    def estimates(self, layers: slice = slice(None)) -> npt.NDArray[np.int64]:
        """Return every estimate, ``[estimates, layers, experts]``."""
        rates = self._rates(layers)
        estimates: npt.NDArray[np.int64] = np.tensordot(self._weights, rates, axes=1)
        return estimates

    def note(self, number: int, layer: int, used: npt.NDArray[np.bool_]) -> None:
        """See :class:`Policy`."""
        only = slice(layer, layer + 1)
        experts = np.flatnonzero(used)
        rivals = (self._cursor[layer] + np.arange(len(experts))) % self._experts
        self._cursor[layer] = (self._cursor[layer] + len(experts)) % self._experts
        ranked = self.estimates(only)[:, 0]
        won = np.sign(ranked[:, experts] - ranked[:, rivals]) * ~used[rivals]
        self.counts += use_rate.POINT * won.sum(axis=1)
        self.counts -= self.counts >> use_rate.MEMORY
        self._passes[layer] += 1
        grown = self._rates(only)[:, 0, experts] + self._gain
        self._values[:, layer, experts] = np.minimum(grown, use_rate.ONE - 1)
        self._last[layer, experts] = self._passes[layer]

    def scores(self, number: int, layer: int) -> Scores:
        """See :class:`Policy`."""
        distance = (np.arange(self._layers) - layer)[:, None] % self._layers
        distance[layer] = self._layers
        ranked = self.estimates()[self.counts.argmax() if self._forced is None else self._forced]
        scores: npt.NDArray[np.int64] = (
            self._layers * use_rate.CERTAIN // np.maximum(ranked, 1) - self._layers + distance
        )
        return scores

    def _rates(self, layers: slice) -> npt.NDArray[np.int64]:
        age = self._passes[layers] - self._last[layers]
        halved, rest = np.divmod(age, self._half_lives)
        decay = np.stack([table[part] for table, part in zip(self._decay, rest, strict=True)])
        rates: npt.NDArray[np.int64] = (self._values[:, layers] * decay >> 16) >> np.minimum(halved, 31)
        return rates


POLICIES: Mapping[str, Callable[[Uses], Policy]] = MappingProxyType(
    {
        "LRU": Lru,
        "LFU": Lfu,
        "expected": Expected,
        "recent": lambda uses: Expected(uses, 0),
        "lasting": lambda uses: Expected(uses, 1),
        "exact": Exact,
    }
)


def capacity(uses: Uses, share: float) -> int:
    """Return the number of experts in a share of all, but at least as many as one moment needs."""
    return max(int(share * uses[0].size), int(uses.sum(axis=2).max()))


def reads(uses: Uses, experts_on_device: int, policy: Policy) -> int:
    """Return how many experts are read in all passes."""
    passes, layers, _ = uses.shape
    resident = np.zeros(uses.shape[1:], dtype=np.bool_)
    held = total = 0
    for number in range(passes):
        for layer in range(layers):
            used = uses[number, layer]
            policy.note(number, layer, used)
            missing = int(np.count_nonzero(used & ~resident[layer]))
            if not missing:
                continue
            over = max(0, held + missing - experts_on_device)
            if over:
                evictable = resident.copy()
                evictable[layer] &= ~used
                flat = np.flatnonzero(evictable)
                # Highest score first, the lower expert among equals.
                ranked = np.argsort(-policy.scores(number, layer).ravel()[flat], kind="stable")
                resident.ravel()[flat[ranked[:over]]] = False
            resident[layer] |= used
            held += missing - over
            total += missing
    return total


@dataclass(frozen=True)
class Point:
    """Experts read per layer and pass, by policy."""

    routing: str
    batch: int
    share: float
    used: float
    read: dict[str, float]

    @property
    def over_best(self) -> float:
        """The reads of the rule, over those of the better of LRU and LFU."""
        return self.read["expected"] / min(self.read["LRU"], self.read["LFU"])


def points(
    routings: Mapping[str, routing.Routing], passes: int | None = None, names: tuple[str, ...] | None = None
) -> Iterator[Point]:
    """Simulate every routing, batch and share under the named policies, by default all."""
    for name, recorded in routings.items():
        for batch in BATCHES:
            uses = recorded.uses(batch, passes)
            moments = uses.shape[0] * uses.shape[1]
            for share in SHARES:
                room = capacity(uses, share)
                read = {
                    policy: reads(uses, room, POLICIES[policy](uses)) / moments
                    for policy in names or tuple(POLICIES)
                }
                yield Point(name, batch, share, float(uses.sum()) / moments, read)


def run(session: Session) -> CaseResult:
    """Case ``routings``: the shipped routings under every policy."""
    routings = routing.shipped()
    found = list(points(routings, 16 if session.quick else None))
    rows = [
        Row(
            f"{name}: experts read, rule / better of LRU and LFU, worst",
            max(point.over_best for point in found if point.routing == name),
            "x",
            MOST_OVER_BEST,
        )
        for name in routings
    ]
    return CaseResult(
        rows, {"shares": SHARES, "batches": BATCHES}, {"points": [asdict(point) for point in found]}
    )
