"""UseOrder: in which order an iteration uses gathered chunks, foretold from the one before."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from zlib import crc32

NEVER = 2**62

_DIGEST_MASK = 2**31 - 1  # so that two of them fit an integer of 64 bits


class UseOrder:
    """The uses of one kind of iteration; a use is noted where another chunk was used before it."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._now: list[int] = []
        self._at = 0  # how far in the known order this iteration has come
        self.digest = 0  # of what is foretold: equal for equal orders; 31 bits

    def begin(self) -> None:
        """Start an iteration."""
        self._now = []
        self._at = 0

    def note(self, chunk: int) -> None:
        """``chunk`` is used; the order goes on behind the next place where it was used before."""
        self._now.append(chunk)
        place = self._next_place(chunk)
        if place < NEVER:
            self._at = place + 1

    def end(self) -> None:
        """Take what this iteration did for the order of the next."""
        if self._now and self._now != self._known:
            self._know(self._now)
        self.begin()

    def forget(self) -> None:
        """Foretell nothing, until an iteration has ended."""
        self._know([])
        self.begin()

    def next_use(self, chunk: int) -> int:
        """Return how many uses from now ``chunk`` is used again; NEVER where it is not foretold."""
        place = self._next_place(chunk)
        return place - self._at if place < NEVER else NEVER

    def upcoming(self) -> Iterator[int]:
        """Yield the chunks to come in this iteration."""
        for place in range(self._at, len(self._known)):
            yield self._known[place]

    def _know(self, order: list[int]) -> None:
        self._known = order
        self._places = {}
        for place, chunk in enumerate(order):
            self._places.setdefault(chunk, []).append(place)
        self.digest = crc32(array("q", order).tobytes()) & _DIGEST_MASK

    def _next_place(self, chunk: int) -> int:
        places = self._places.get(chunk)
        if places is None:
            return NEVER
        index = bisect_left(places, self._at)
        return places[index] if index < len(places) else NEVER
