"""Whether the weights of a model belong together, or what failed half-way and left a mixture of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from gemini.errors import StateError

HALF_LOADED = "a load failed half-way and left a mixture of what was there and what was read"


class Mixture:
    """What keeps weights from belonging together, until each of them was loaded anew.

    ``reason`` is what failed half-way, empty where nothing did.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._left: Set[str] | None = None  # what is to be loaded yet; None: everything
        self._is_left: Callable[[str], bool] | None = None  # where writing to it does as well

    def begin(self, reason: str) -> None:
        """Count as a mixture for ``reason`` until :meth:`clear`."""
        self.reason, self._left, self._is_left = reason, None, None

    def await_load(self, reason: str, names: Set[str], is_left: Callable[[str], bool]) -> None:
        """Count as a mixture for ``reason`` until each of ``names`` was loaded, or ``is_left`` of it no
        more."""
        self.reason, self._left, self._is_left = reason, names, is_left

    @contextmanager
    def change(self, reason: str) -> Iterator[None]:
        """Count as a mixture for ``reason`` during the block and, where it raises, from then on."""
        before = self.reason, self._left, self._is_left
        self.begin(reason)
        yield
        self.reason, self._left, self._is_left = before

    @contextmanager
    def load(self, names: Set[str], every: Set[str]) -> Iterator[None]:
        """Count as a mixture during the block, which loads ``names`` of ``every`` weight, and, where it
        raises, from then on. After it, what else is to be loaded is left."""
        left: Set[str] = frozenset()
        if self.reason:
            left = every if self._left is None else self._left
        with self.change(HALF_LOADED):
            self._left = names | left
            yield
        self._left = left - names
        if not self._left:
            self.clear()

    def clear(self) -> None:
        """Everything was loaded, or what was begun is done."""
        self.reason, self._left, self._is_left = "", None, None

    def refuse(self, doing: str) -> None:
        """Raise StateError if weights are a mixture."""
        if self._left is not None and self._is_left is not None:
            self._left = frozenset(filter(self._is_left, self._left))
            if not self._left:
                self.clear()
        if self.reason:
            raise StateError(
                f"{doing}: {self.reason}; load a checkpoint (gemini.checkpoint.load), or all weights "
                "(model.load_state_dict), before going on. What there is, model.module.state_dict() has"
            )
