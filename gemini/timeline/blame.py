"""What a wait waited for: the transfers under way meanwhile, the most plausible one at each time."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from gemini.timeline.events import Transfer, Wait, WaitShare

_INCOMING = frozenset(("fetch", "load"))


def explain_waits(waits: Iterable[tuple[Wait, frozenset[int]]], transfers: Sequence[Transfer]) -> list[Wait]:
    """Return the waits, each for certain chunks, with their shares; ``transfers`` in order of submission.

    At each time a wait is put down to the transfer that brings one of its chunks, else to one that makes
    room, else to whatever is under way; among equals to the one that ends first.
    """
    submitted = [transfer.submitted_s for transfer in transfers]
    ended_by = list(itertools.accumulate((transfer.end_s for transfer in transfers), max))
    explained = []
    for wait, chunks in waits:
        first = bisect_right(ended_by, wait.begin_s)  # all before it had ended
        last = bisect_right(submitted, wait.end_s)
        under_way = [t for t in transfers[first:last] if t.end_s > wait.begin_s]
        explained.append(replace(wait, shares=_shares(wait, chunks, under_way)))
    return explained


def _shares(wait: Wait, chunks: frozenset[int], under_way: Sequence[Transfer]) -> tuple[WaitShare, ...]:
    edges = {wait.begin_s, wait.end_s}
    for transfer in under_way:
        edges |= {edge for edge in (transfer.submitted_s, transfer.end_s) if wait.begin_s < edge < wait.end_s}
    seconds: dict[tuple[str, int], float] = {}
    for begin, end in itertools.pairwise(sorted(edges)):
        there = [t for t in under_way if t.submitted_s <= begin and t.end_s >= end]
        if there:
            cause = min(there, key=lambda t: (_rank(t, chunks), t.end_s))
            key = (cause.link, cause.chunk)
            seconds[key] = seconds.get(key, 0.0) + end - begin
    return tuple(WaitShare(link, chunk, share) for (link, chunk), share in seconds.items())


def _rank(transfer: Transfer, chunks: frozenset[int]) -> int:
    if transfer.kind in _INCOMING:
        return 0 if transfer.chunk in chunks else 2
    return 1
