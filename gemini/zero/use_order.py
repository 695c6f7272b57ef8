"""UseOrder: in which order an iteration uses gathered chunks, foretold from the one before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

NEVER = 2**62


class UseOrder:
    """The uses of one kind of iteration; a use is noted where another chunk was used before it."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._places: dict[int, list[int]] = {}
        self._now: list[int] = []
        self._at = 0  # how far in the known order this iteration has come

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
            self._known = self._now
            self._places = {}
            for place, chunk in enumerate(self._known):
                self._places.setdefault(chunk, []).append(place)
        self.begin()

    def next_use(self, chunk: int) -> int:
        """Return how many uses from now ``chunk`` is used again; NEVER where it is not foretold."""
        place = self._next_place(chunk)
        return place - self._at if place < NEVER else NEVER

    def upcoming(self) -> Iterator[int]:
        """Yield the chunks to come in this iteration."""
        for place in range(self._at, len(self._known)):
            yield self._known[place]

    def _next_place(self, chunk: int) -> int:
        places = self._places.get(chunk)
        if places is None:
            return NEVER
        index = bisect_left(places, self._at)
        return places[index] if index < len(places) else NEVER
