"""A link's transfers one after the other, as a track shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gemini.timeline.events import Transfer


def in_turn(transfers: Iterable[Transfer]) -> Iterator[tuple[Transfer, float, float]]:
    """Yield the transfers of one link, each with the span in which it was the link's first in turn.

    A disk link has several at the file at once and reports them in order; the span begins where the one
    before ended. The spans are disjoint and cover what the link was busy.
    """
    last = float("-inf")
    for transfer in sorted(transfers, key=lambda t: (t.end_s, t.begin_s)):
        begin = min(max(last, transfer.begin_s), transfer.end_s)
        yield transfer, begin, transfer.end_s
        last = transfer.end_s
