"""Rules that say how many waiting requests begin before the next pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Literal, get_args

from gemini.errors import ConfigError
from gemini.inference.request import Request

Batching = Literal["continuous", "bucket"]


def continuous(waiting: Iterable[Request], running: int, max_batch: int) -> int:
    """Return how many of ``waiting``, from the front, may begin: as many as there are free places."""
    return sum(1 for _ in islice(waiting, max(0, max_batch - running)))


def bucket(waiting: Iterable[Request], running: int, max_batch: int) -> int:
    """Return how many of ``waiting`` make the next batch: the first one and those right behind it that draw
    in the same way and ask for at most as many tokens. A batch begins when the one before has ended.

    Source: "executor_max_batch_size" in the documentation of EnergonAI's OPT service.
    """
    if running:
        return 0
    count = 0
    head: Request | None = None
    for request in islice(waiting, max_batch):
        head = head or request
        if _draws(request) != _draws(head) or request.max_tokens > head.max_tokens:
            break
        count += 1
    return count


def rule_of(batching: Batching) -> Callable[[Iterable[Request], int, int], int]:
    """Return the rule of a name."""
    if batching not in get_args(Batching):
        raise ConfigError(f"batching is {batching!r}; it must be 'continuous' or 'bucket'")
    return continuous if batching == "continuous" else bucket


def _draws(request: Request) -> tuple[int, float, float]:
    return request.top_k, request.top_p, request.temperature
