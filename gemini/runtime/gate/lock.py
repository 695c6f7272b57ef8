"""TensorLock: tensors that nobody may use for now."""

from __future__ import annotations

from collections.abc import Iterable

from gemini.errors import StateError


class TensorLock:
    """Managed tensors, by id, that are in no state to be used, and why."""

    def __init__(self) -> None:
        self.tensors: set[int] = set()  # the same object for good: every PreOp looks at it
        self._reason = ""

    def add(self, tensors: Iterable[int], reason: str) -> None:
        """Lock ``tensors`` too; ``reason`` says why what is locked is, and what to do."""
        self.tensors.update(tensors)
        self._reason = reason

    def open(self) -> None:
        """Lock nothing any more."""
        self.tensors.clear()

    def refuse(self, tensors: Iterable[int]) -> None:
        """Raise StateError if any of ``tensors`` is locked."""
        if not self.tensors.isdisjoint(tensors):
            raise StateError(self._reason)

    def refuse_all(self) -> None:
        """Raise StateError if anything is locked."""
        if self.tensors:
            raise StateError(self._reason)
