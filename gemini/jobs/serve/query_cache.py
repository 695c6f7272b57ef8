"""QueryCache: answers for repeated queries."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from gemini.errors import ConfigError

T = TypeVar("T")


class QueryCache(Generic[T]):
    """Keeps ``list_size`` answers for each of the ``size`` most recently used queries; 0 keeps none.

    A query is answered from the cache if its list is full, with a random answer of the list. ``hits`` and
    ``misses`` are counted. A key must contain everything that an answer depends on: the prompt and every
    option.

    Source: "cache_size" and "cache_list_size" in the documentation of EnergonAI's OPT service.
    """

    def __init__(self, size: int, list_size: int = 1, *, draw: random.Random | None = None) -> None:
        if size < 0:
            raise ConfigError(f"cache_size is {size}; it must be at least 0 (0: no cache)")
        if list_size < 1:
            raise ConfigError(f"cache_list_size is {list_size}; it must be at least 1")
        self._size, self._list_size = size, list_size
        self._draw = draw or random.Random()
        self._lists: OrderedDict[Hashable, list[T]] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: Hashable) -> T | None:
        """Return an answer, or None if the list of ``key`` is not full."""
        if not self._size:
            return None
        answers = self._lists.get(key)
        if answers is not None:
            self._lists.move_to_end(key)
        if answers is None or len(answers) < self._list_size:
            self.misses += 1
            return None
        self.hits += 1
        return self._draw.choice(answers)

    def add(self, key: Hashable, answer: T) -> None:
        """Keep an answer, unless the list is full."""
        if not self._size:
            return
        answers = self._lists.setdefault(key, [])
        self._lists.move_to_end(key)
        if len(answers) < self._list_size:
            answers.append(answer)
        while len(self._lists) > self._size:
            self._lists.popitem(last=False)
