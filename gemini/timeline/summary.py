"""Summaries of recorded steps: time spent computing, waiting and in the runtime, and the use of links. Also
the titles of these parts for people.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemini.memstats.trace import BACKWARD, FORWARD, OPTIMIZER
from gemini.timeline.events import LINKS, TIERS, StepSpan, Timeline, Transfer, Wait, computing

PHASES = (FORWARD, BACKWARD, OPTIMIZER)

Span = tuple[float, float]
LINK_TITLES: Mapping[str, str] = {
    "h2d": "HOST to DEVICE",
    "d2h": "DEVICE to HOST",
    "disk_read": "read from DISK",
    "disk_write": "write to DISK",
}
PART_TITLES: Mapping[str, str] = {
    "forward": "computing: forward",
    "backward": "computing: backward",
    "optimizer": "computing: optimizer",
    **{link: f"waiting: {title}" for link, title in LINK_TITLES.items()},
    "memory": "waiting: memory being mapped",
    "runtime": "the runtime itself",
}


@dataclass(frozen=True)
class LinkUse:
    """The use of one link in a step; overlapping transfers count once in ``busy_seconds``.

    ``hidden_seconds``: the busy time in which the training thread did not wait.
    """

    transfers: int
    nbytes: int
    busy_seconds: float
    hidden_seconds: float


@dataclass(frozen=True)
class StepSummary:
    """One step: ``seconds`` = ``compute_seconds`` (per phase) + ``wait_seconds`` + ``runtime_seconds``.

    Computing is everything that the training thread does between an operator's PreOp and the next one's. The
    runtime's own time is that of the PreOps without waits. ``wait_by_link`` and ``wait_by_chunk`` (label to
    seconds, longest first) divide the waits; the remainder was spent on mapping memory. ``overlap_share``:
    the fraction of the links' busy time in which the training thread did not wait; 1 if no link was busy.
    """

    number: int
    complete: bool
    seconds: float
    compute_seconds: Mapping[str, float]
    wait_seconds: float
    runtime_seconds: float
    wait_by_link: Mapping[str, float]
    wait_by_chunk: Mapping[str, float]
    links: Mapping[str, LinkUse]
    overlap_share: float
    num_operators: int
    num_updates: int
    peak_bytes: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain data."""
        return asdict(self)


def summarize(timeline: Timeline) -> list[StepSummary]:
    """Return a summary of each step of ``timeline``, in order."""
    return [_summarize(timeline, step) for step in timeline.steps]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of ``spans`` as disjoint, ordered spans."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def length(spans: Iterable[Span]) -> float:
    """Return the total length of disjoint spans."""
    return sum(end - begin for begin, end in spans)


def common_length(ones: Sequence[Span], others: Sequence[Span]) -> float:
    """Return the length of the intersection of two ordered lists of disjoint spans."""
    total, position = 0.0, 0
    for begin, end in ones:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        for other_begin, other_end in itertools.islice(others, position, None):
            if other_begin >= end:
                break
            total += min(end, other_end) - max(begin, other_begin)
    return total


def _summarize(timeline: Timeline, step: StepSpan) -> StepSummary:
    waits = [wait for wait in timeline.waits if _within(wait.begin_s, step)]
    operators = timeline.operators_of(step)
    transfers = [t for t in timeline.transfers if t.end_s > step.begin_s and t.begin_s < step.end_s]
    wait_seconds = sum(wait.end_s - wait.begin_s for wait in waits)
    prepared = sum(operator.begin_s - operator.asked_s for operator in operators)
    waiting = merged((wait.begin_s, wait.end_s) for wait in waits)
    by_link = {name: [t for t in transfers if t.link == name] for name in LINKS}
    busy = merged(_clip(transfers, step))
    compute = dict.fromkeys(PHASES, 0.0)
    for span in computing(operators, step):
        compute[span.name] += span.end_s - span.begin_s
    fills = [fill for fill in timeline.fills if _within(fill.time_s, step)]
    return StepSummary(
        number=step.number,
        complete=step.complete,
        seconds=step.end_s - step.begin_s,
        compute_seconds=compute,
        wait_seconds=wait_seconds,
        runtime_seconds=max(0.0, prepared - wait_seconds),
        wait_by_link=_longest_first((share.link, share.seconds) for wait in waits for share in wait.shares),
        wait_by_chunk=_wait_by_chunk(timeline, waits),
        links={name: _link_use(ts, waiting, step) for name, ts in by_link.items() if ts},
        overlap_share=1.0 - common_length(busy, waiting) / length(busy) if length(busy) > 0 else 1.0,
        num_operators=len(operators),
        num_updates=sum(_within(update.begin_s, step) for update in timeline.updates),
        peak_bytes={tier: max((getattr(f, f"{tier}_bytes") for f in fills), default=0) for tier in TIERS},
    )


def _within(time_s: float, step: StepSpan) -> bool:
    return step.begin_s <= time_s < step.end_s


def _clip(transfers: Iterable[Transfer], step: StepSpan) -> Iterator[Span]:
    return ((max(t.begin_s, step.begin_s), min(t.end_s, step.end_s)) for t in transfers)


def _link_use(transfers: Sequence[Transfer], waiting: Sequence[Span], step: StepSpan) -> LinkUse:
    """Summarize a link; a transfer's bytes count in the step in which it ended."""
    spans = merged(_clip(transfers, step))
    ended = [t for t in transfers if t.end_s <= step.end_s and t.ok]
    busy = length(spans)
    hidden = busy - common_length(spans, waiting)
    return LinkUse(len(ended), sum(t.nbytes for t in ended), busy, hidden)


def _wait_by_chunk(timeline: Timeline, waits: Iterable[Wait]) -> dict[str, float]:
    shares = (share for wait in waits for share in wait.shares)
    return _longest_first((timeline.chunk_label(share.chunk), share.seconds) for share in shares)


def _longest_first(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for name, part in parts:
        seconds[name] = seconds.get(name, 0.0) + part
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def parts(step: StepSummary) -> dict[str, float]:
    """Return the seconds of a step by part; they add up to its length."""
    unexplained = step.wait_seconds - sum(step.wait_by_link.values())
    found = {
        **step.compute_seconds,
        **step.wait_by_link,
        "memory": max(0.0, unexplained),
        "runtime": step.runtime_seconds,
    }
    return {name: found[name] for name in PART_TITLES if found.get(name, 0.0) > 0}


def seconds_text(seconds: float) -> str:
    """Return a duration with about three digits: ``1.93 s``, ``12.4 ms``, ``85 us``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
