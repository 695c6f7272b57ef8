"""Builds a Timeline from the events of a recorder, and attributes each wait to the transfers that ran
meanwhile.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemini.memstats.trace import FORWARD, OPTIMIZER
from gemini.timeline.events import (
    Fill,
    Names,
    Operator,
    Phase,
    StepSpan,
    Timeline,
    Transfer,
    Update,
    Wait,
    WaitShare,
)

# Raw events, the kind first. "fill" is two values: the bytes on the three tiers, and the limit of model data
# on DEVICE.
# ("acquired", asked_s, ready_s, tensors, phase, late, traced, fill), ("prefetched", begin_s, end_s),
# ("released", time_s, tensors), ("waited", begin_s, end_s, tensors), ("submitted", time_s, id, fill),
# ("ended", time_s, id, (kind, link, chunk, nbytes), (begin_s, end_s), ok, fill),
# ("updated", begin_s, end_s, tensors), ("step begins", time_s, number), ("step ended", time_s)
RawEvent = tuple[Any, ...]
_INCOMING = frozenset(("fetch", "load"))


@dataclass(frozen=True)
class Context:
    """Data of a recording beside its events. ``origin_s``: its start, on the clock of the events."""

    origin_s: float = 0.0
    names: Names = field(default_factory=Names)
    budget_bytes: Mapping[str, int] = field(default_factory=dict)
    model_data_bytes: int = 0


def build_timeline(raw: Sequence[RawEvent], context: Context) -> Timeline:
    """Return the timeline of ``raw``. Spans that were still open end with the recording."""
    builder = _Builder(context)
    for event in raw:
        builder.add(event)
    return builder.finish()


@dataclass
class _Open:
    """An operator that has not ended yet."""

    index: int
    tensors: tuple[int, ...]


class _Builder:
    """Assembles a timeline in one pass over the events."""

    def __init__(self, context: Context) -> None:
        self._names = context.names
        self._context = context
        self._origin = context.origin_s
        self._now = 0.0
        self._operators: list[Operator] = []
        self._open: list[_Open] = []  # outermost first
        self._waits: list[tuple[Wait, frozenset[int]]] = []
        self._submitted: dict[int, float] = {}
        self._transfers: list[Transfer] = []
        self._updates: list[Update] = []
        self._fills: list[Fill] = []
        self._steps: list[StepSpan] = []
        self._in_step = False
        self._moment = -1

    def add(self, event: RawEvent) -> None:
        """Process the next event."""
        match event:
            case ("acquired", asked, ready, tensors, phase, late, traced, *fill):
                times = (self._at(asked), self._at(ready), self._at(ready))
                what = (OPTIMIZER if late else phase, self._names.operator(tensors))
                moment = self._next_moment() if traced else -1
                self._opened(Operator(*what, *times, moment, late, len(self._open)), tensors)
                self._filled(*fill)
            case ("prefetched", _, end):
                if self._open and self._open[-1].index == len(self._operators) - 1:
                    self._operators[-1] = replace(self._operators[-1], begin_s=self._at(end))
            case ("released", time, tensors):
                self._released(self._at(time), tensors)
            case ("waited", begin, end, tensors):
                wait = Wait(self._names.operator(tensors), begin - self._origin, self._at(end))
                self._waits.append((wait, self._names.chunk_ids(tensors)))
            case ("submitted", time, number, *fill):
                self._submitted[number] = self._at(time)
                self._filled(*fill)
            case ("ended", time, number, what, times, ok, *fill):
                self._at(time)
                self._ended(number, what, times, ok)
                self._filled(*fill)
            case ("updated", begin, end, tensors):
                label = self._names.operator(tensors)
                self._updates.append(Update(label, begin - self._origin, self._at(end)))
            case ("step begins", time, number):
                self._close_step(complete=False)
                self._steps.append(StepSpan(number, self._at(time), self._now))
                self._in_step, self._moment = True, -1
            case ("step ended", time):
                self._at(time)
                self._close_step(complete=True)

    def finish(self) -> Timeline:
        """Return the timeline."""
        self._close_operators(self._now)
        self._close_step(complete=False)
        transfers = sorted(self._transfers, key=lambda transfer: transfer.submitted_s)
        return Timeline(
            steps=tuple(self._steps),
            phases=tuple(phases_of(self._steps, self._operators)),
            operators=tuple(self._operators),
            waits=tuple(explain_waits(self._waits, transfers)),
            transfers=tuple(transfers),
            updates=tuple(sorted(self._updates, key=lambda update: update.begin_s)),
            fills=tuple(self._fills),
            chunk_labels=self._names.chunks,
            budget_bytes=dict(self._context.budget_bytes),
            model_data_bytes=self._context.model_data_bytes,
        )

    def _at(self, time_s: float) -> float:
        """Return a time relative to the start of the recording, and advance the current time to it."""
        since = time_s - self._origin
        self._now = max(self._now, since)
        return since

    def _next_moment(self) -> int:
        """Return the next index in the order of the current step."""
        self._moment += self._in_step
        return self._moment if self._in_step else -1

    def _opened(self, operator: Operator, tensors: tuple[int, ...]) -> None:
        self._open.append(_Open(len(self._operators), tensors))
        self._operators.append(operator)

    def _released(self, time: float, tensors: tuple[int, ...]) -> None:
        """Close the innermost operator that uses one of ``tensors``; its other tensors may be
        released later.
        """
        for place in reversed(range(len(self._open))):
            if not set(tensors).isdisjoint(self._open[place].tensors):
                index = self._open.pop(place).index
                self._operators[index] = replace(self._operators[index], end_s=time)
                return

    def _close_operators(self, time: float) -> None:
        for opened in self._open:
            self._operators[opened.index] = replace(self._operators[opened.index], end_s=time)
        self._open.clear()

    def _ended(
        self, number: int, what: tuple[str, str, int, int], times: tuple[float, float], ok: bool
    ) -> None:
        begin, end = (time - self._origin for time in times)
        submitted = min(self._submitted.pop(number, begin), begin)
        kind, link, chunk, nbytes = what
        self._transfers.append(Transfer(kind, link, chunk, nbytes, submitted, begin, end, ok))

    def _filled(self, usages: tuple[int, int, int], limit: int) -> None:
        fill = Fill(self._now, *usages, limit)
        if not self._fills or replace(fill, time_s=0) != replace(self._fills[-1], time_s=0):
            self._fills.append(fill)

    def _close_step(self, *, complete: bool) -> None:
        if self._in_step:
            self._in_step = False
            self._close_operators(self._now)
            self._steps[-1] = replace(self._steps[-1], end_s=self._now, complete=complete)


def phases_of(steps: Sequence[StepSpan], operators: Sequence[Operator]) -> list[Phase]:
    """Return the consecutive phases of each step; they cover the step completely."""
    phases: list[Phase] = []
    position = 0
    for step in steps:
        name, begin = FORWARD, step.begin_s
        while position < len(operators) and operators[position].asked_s < step.end_s:
            operator = operators[position]
            position += 1
            if operator.asked_s >= step.begin_s and operator.phase != name and not operator.late:
                phases.append(Phase(name, begin, operator.asked_s))
                name, begin = operator.phase, operator.asked_s
        phases.append(Phase(name, begin, step.end_s))
    return phases


def explain_waits(waits: Iterable[tuple[Wait, frozenset[int]]], transfers: Sequence[Transfer]) -> list[Wait]:
    """Return the waits with their shares. ``waits``: each with its chunks. ``transfers``: in order of
    submission.

    At each time a wait is attributed to the transfer that brings one of its chunks, else to one that frees
    memory, else to any running transfer; among equals to the one that ends first.
    """
    submitted = [transfer.submitted_s for transfer in transfers]
    ended_by = list(itertools.accumulate((transfer.end_s for transfer in transfers), max))
    explained = []
    for wait, chunks in waits:
        first = bisect_right(ended_by, wait.begin_s)  # all transfers before this one had ended
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
