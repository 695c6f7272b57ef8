"""Which parameters user code has written to since their fp32 masters were made from them."""

from __future__ import annotations

from gemini.chunk import TensorIds


class WrittenTensors:
    """A set of tensors of the chunk table."""

    def __init__(self) -> None:
        self._tensors: set[int] = set()

    def note(self, tensors: TensorIds) -> None:
        """Remember that user code wrote to ``tensors``."""
        self._tensors.update(tensors)

    def take(self, tensor: int) -> bool:
        """Say whether user code wrote to ``tensor`` since the last call for it."""
        if tensor in self._tensors:
            self._tensors.discard(tensor)
            return True
        return False
