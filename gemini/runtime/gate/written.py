"""Which parameters user code has written to since their fp32 masters were made from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gemini.chunk import TensorIds


class WrittenTensors:
    """A set of tensors of the chunk table."""

    def __init__(self) -> None:
        self._tensors: set[int] = set()
        self._times: Counter[int] = Counter()

    def note(self, tensors: TensorIds) -> None:
        """Remember that user code wrote to ``tensors``."""
        self._times.update(tensors)
        self._tensors.update(tensors)

    def times(self, tensors: Iterable[int] | None = None) -> int:
        """Return how often ``tensors``, or any, have been written to."""
        return self._times.total() if tensors is None else sum(self._times[tensor] for tensor in tensors)

    def take(self, tensor: int) -> bool:
        """Say whether user code wrote to ``tensor`` since the last call for it."""
        if tensor in self._tensors:
            self._tensors.discard(tensor)
            return True
        return False
