"""Addresses for windows whose number is not known beforehand."""

from __future__ import annotations

from gemini import _C

_FIRST_BYTES = 256 * 2**20
_CHUNKS_AHEAD = 16


class GrowingSpace:
    """Window spaces, each twice as large as the one before: a few, however many windows they hold."""

    def __init__(self) -> None:
        self._spaces: list[_C.WindowSpace] = []  # keeps their windows
        self._size_bytes = 0  # of the last one, and what is left of it
        self._left_bytes = 0

    def create(self, nbytes: int) -> _C.Window:
        """Return a new window of ``nbytes``, a multiple of 4 KiB, without memory."""
        if nbytes > self._left_bytes:
            self._size_bytes = max(2 * self._size_bytes, _FIRST_BYTES, _CHUNKS_AHEAD * nbytes)
            self._spaces.append(_C.WindowSpace(self._size_bytes))
            self._left_bytes = self._size_bytes
        self._left_bytes -= nbytes
        return self._spaces[-1].create(nbytes)
