"""Batching rules: how many waiting requests begin before the next pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Literal, get_args

from gemini.errors import ConfigError
from gemini.inference.request import Request

Batching = Literal["continuous", "bucket"]


def continuous(waiting: Iterable[Request], running: int, max_batch: int) -> int:
    """Return how many of ``waiting``, from the front, may begin: one for each free place."""
    return sum(1 for _ in islice(waiting, max(0, max_batch - running)))


def bucket(waiting: Iterable[Request], running: int, max_batch: int) -> int:
    """Return how many of ``waiting`` form the next batch: the first request and those right behind it with
    the same sampling settings and at most as many ``max_tokens``. A batch begins when the previous one has
    ended.

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
    """Return the rule with this name. Raises ConfigError if there is none."""
    if batching not in get_args(Batching):
        raise ConfigError(f"batching is {batching!r}; it must be 'continuous' or 'bucket'")
    return continuous if batching == "continuous" else bucket


def _draws(request: Request) -> tuple[int, float, float]:
    return request.top_k, request.top_p, request.temperature
