"""Addresses for windows whose number is not known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_FIRST_BYTES = 256 * 2**20
_CHUNKS_AHEAD = 16


W = TypeVar("W", covariant=True)


class Space(Protocol[W]):
    """A reservation of addresses, cut into windows."""

    def create(self, nbytes: int) -> W: ...


class GrowingSpace(Generic[W]):
    """Window spaces, each twice as large as the one before: a few, however many windows they hold."""

    def __init__(self, reserve: Callable[[int], Space[W]]) -> None:
        """``reserve`` makes one of so many bytes."""
        self._reserve = reserve
        self._spaces: list[Space[W]] = []  # keeps their windows
        self._size_bytes = 0  # of the last one, and what is left of it
        self._left_bytes = 0

    def create(self, nbytes: int) -> W:
        """Return a new window of ``nbytes``, whole blocks of the device, without memory."""
        if nbytes > self._left_bytes:
            self._size_bytes = max(2 * self._size_bytes, _FIRST_BYTES, _CHUNKS_AHEAD * nbytes)
            self._spaces.append(self._reserve(self._size_bytes))
            self._left_bytes = self._size_bytes
        self._left_bytes -= nbytes
        return self._spaces[-1].create(nbytes)
