"""A lower bound of a steady step, whatever a plan does: the optimum of a fluid linear program.

Moments are gathered in buckets. Chunks are divisible, a transfer flows in as many buckets as it likes, and
within a bucket only what must be there all the time takes room; each of these only lets more plans in, so
no plan that leaves the reserve free takes less time on average (docs/notes/placement.md).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from gemini.placement.intervals import NO_RUN, Intervals, find_intervals
from gemini.placement.iteration import Iteration
from gemini.placement.machine import Machine

NUM_BUCKETS = 64


def lower_bound(iteration: Iteration, machine: Machine, *, buckets: int = NUM_BUCKETS) -> float:
    """Return seconds that no steady step stays below; more ``buckets`` make it tighter and slower to find."""
    compute = sum(iteration.seconds)
    if iteration.total_bytes <= machine.device_bytes - max(iteration.reserve_bytes, default=0):
        return compute
    stall = _Fluid(iteration, machine, min(buckets, iteration.num_moments)).stall_seconds()
    return compute + stall


@dataclass(frozen=True)
class _Span:
    """An interval in buckets: of one use (moment) to the next (its bucket may lie in the next step)."""

    begin: int
    end: int
    use: int
    next_use: int
    dirty: bool
    in_run: bool


class _Rows:
    """Rows ``sum(value * column) <= limit`` of a sparse program, and its columns."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.limits: list[float] = []
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])

    def columns(self, count: int, upper: float = np.inf) -> list[int]:
        """Add columns between 0 and ``upper``."""
        first = len(self.upper)
        self.upper += [upper] * count
        return list(range(first, first + count))

    def add(self, entries: list[tuple[int, float]], limit: float) -> None:
        """Add a row; a column may occur in it several times."""
        rows, columns, values = self._entries
        rows += [len(self.limits)] * len(entries)
        columns += [column for column, _ in entries]
        values += [value for _, value in entries]
        self.limits.append(limit)

    def minimize(self, costs: list[int]) -> float:
        """Return the least sum of the ``costs`` columns; 0, which bounds nothing, if the solver fails."""
        objective = np.zeros(len(self.upper))
        objective[costs] = 1.0
        rows, columns, values = self._entries
        shape = (len(self.limits), len(self.upper))
        matrix = sparse.csr_matrix((values, (rows, columns)), shape=shape)
        bounds = np.stack([np.zeros(len(self.upper)), np.array(self.upper)], axis=1)
        found = linprog(objective, A_ub=matrix, b_ub=self.limits, bounds=bounds, method="highs")
        return max(0.0, float(found.fun)) if found.status == 0 else 0.0


class _Fluid:
    """Builds the program. Chunks that are used alike share their columns."""

    def __init__(self, iteration: Iteration, machine: Machine, buckets: int) -> None:
        moments = iteration.num_moments
        self._iteration, self._machine, self._buckets = iteration, machine, buckets
        self._bucket = [moment * buckets // moments for moment in range(moments)]
        self._rows = _Rows()
        self._stall = self._rows.columns(buckets)
        self._reads: list[list[tuple[int, float]]] = [[] for _ in range(buckets)]
        self._writes: list[list[tuple[int, float]]] = [[] for _ in range(buckets)]
        self._room: list[list[tuple[int, float]]] = [[] for _ in range(buckets)]
        self._due: dict[int, list[tuple[int, float]]] = defaultdict(list)  # per moment of the use
        self._ready: dict[int, list[tuple[int, float]]] = defaultdict(list)

    def stall_seconds(self) -> float:
        """Return the least time that all operators of a step wait."""
        for (nbytes, spans), members in self._classes().items():
            self._add_chunks(nbytes, spans, float(members))
        self._add_links()
        self._add_deadlines()
        self._add_room()
        return self._rows.minimize(self._stall)

    def _classes(self) -> dict[tuple[int, tuple[_Span, ...]], int]:
        """Count the chunks of each size and sequence of intervals."""
        them: Intervals = find_intervals(self._iteration)
        spans: dict[int, list[_Span]] = defaultdict(list)
        moments = self._iteration.num_moments
        for i in range(len(them)):
            begin, end = int(them.begin[i]), int(them.end[i])
            turn, next_use = divmod(end, moments)
            spans[int(them.chunk[i])].append(
                _Span(
                    begin=self._bucket[begin],
                    end=self._bucket[next_use] + turn * self._buckets,
                    use=begin,
                    next_use=next_use,
                    dirty=bool(them.dirty[i]),
                    in_run=int(them.run[i]) != NO_RUN,
                )
            )
        classes: dict[tuple[int, tuple[_Span, ...]], int] = defaultdict(int)
        for chunk, of_chunk in spans.items():
            classes[self._iteration.chunk_bytes[chunk], tuple(of_chunk)] += 1
        return classes

    def _add_chunks(self, nbytes: int, spans: tuple[_Span, ...], members: float) -> None:
        start = 0
        for stop in range(1, len(spans) + 1):
            if stop == len(spans) or spans[stop].dirty:  # the end of a dirty run
                self._add_run(nbytes, spans[start:stop], members)
                start = stop

    def _add_run(self, nbytes: int, spans: tuple[_Span, ...], members: float) -> None:
        """Add the intervals between two writes, or all of a chunk that nothing writes."""
        away = [span for span in spans if span.begin < span.end]
        if not away:
            return
        # A run that goes on past the end of the step has its later intervals in the step after.
        first = spans[0].begin
        written = self._written(nbytes, spans, members) if spans[0].in_run and spans[0].dirty else None
        for span in away:
            shift = self._buckets if span.begin < first else 0
            kept, inner = self._fetched(nbytes, span, members)
            if written is not None:  # what leaves has been written
                self._rows.add([(kept, -1.0), (written[-1], -1.0)], -members)
            for bucket, so_far in inner:
                at = bucket % self._buckets
                if written is None:
                    self._room[at].append((so_far, float(nbytes)))
                    continue
                done = written[min(bucket + shift - first, len(written) - 1)]
                (there,) = self._rows.columns(1)
                self._rows.add([(so_far, 1.0), (there, -1.0)], 0.0)
                self._rows.add(
                    [(so_far, 1.0), (kept, -1.0), (done, -1.0), (there, -1.0)],
                    -members,
                )
                self._room[at].append((there, float(nbytes)))

    def _fetched(self, nbytes: int, span: _Span, members: float) -> tuple[int, list[tuple[int, int]]]:
        """Add one interval: return the column of what stays, and for each bucket between the uses that of
        what stays or has been fetched before it."""
        seconds = self._seconds(nbytes, "h2d", "disk_read")
        count = span.end - span.begin + 1
        (kept,) = self._rows.columns(1, members)
        amounts = [kept, *self._rows.columns(count, members)]
        self._rows.add([(amounts[-1], -1.0)], -members)
        for i in range(count):
            flow = [(amounts[i + 1], seconds), (amounts[i], -seconds)]
            self._rows.add([(column, -value) for column, value in flow], 0.0)
            self._reads[(span.begin + i) % self._buckets] += flow
        self._due[span.next_use] += [(amounts[-1], seconds), (amounts[-2], -seconds)]
        return kept, [(span.begin + i, amounts[i]) for i in range(1, count - 1)]

    def _written(self, nbytes: int, spans: tuple[_Span, ...], members: float) -> list[int]:
        """Add the copying below of what the first use of a run wrote: columns of what has been copied by the
        end of each bucket from that of the use on."""
        seconds = self._seconds(nbytes, "d2h", "disk_write")
        first = spans[0].begin
        last = spans[-1].end + (self._buckets if spans[-1].begin < first else 0)
        amounts = self._rows.columns(min(last - first, self._buckets) + 1, members)
        before: list[tuple[int, float]] = []
        for i, amount in enumerate(amounts):
            flow = [(amount, seconds), *before]
            self._rows.add([(column, -value) for column, value in flow], 0.0)
            self._writes[(first + i) % self._buckets] += flow
            before = [(amount, -seconds)]
        self._ready[spans[0].use].append((amounts[0], seconds))
        return amounts

    def _seconds(self, nbytes: int, *links: str) -> float:
        """Return how long a transfer takes at least; links of two tiers work at the same time."""
        machine = self._machine
        tiers = zip((machine.host_bytes, machine.disk_bytes), links, strict=True)
        speeds = [machine.speed(link) for present, link in tiers if present]
        rate = sum(1.0 / (latency + nbytes / speed) for speed, latency in speeds)
        return 1.0 / rate

    def _add_links(self) -> None:
        """In a bucket, a link works as long as operators compute or wait."""
        compute = np.bincount(self._bucket, weights=self._iteration.seconds, minlength=self._buckets)
        shared = self._machine.disk_shared and not self._machine.host_bytes
        for bucket, stall in enumerate(self._stall):
            flows = (self._reads[bucket], self._writes[bucket])
            for flow in [flows[0] + flows[1]] if shared else flows:
                self._rows.add([*flow, (stall, -1.0)], float(compute[bucket]))

    def _add_deadlines(self) -> None:
        """What is fetched in the bucket of its use is there before it; what is copied was written first."""
        moments = range(self._iteration.num_moments)
        for order, flows in ((moments, self._due), (reversed(moments), self._ready)):
            bucket, passed, due = -1, 0.0, list[tuple[int, float]]()
            for moment in order:
                if self._bucket[moment] != bucket:
                    bucket, passed, due = self._bucket[moment], 0.0, []
                if moment in flows:
                    due = due + flows[moment]
                    self._rows.add([*due, (self._stall[bucket], -1.0)], passed)
                passed += self._iteration.seconds[moment]

    def _add_room(self) -> None:
        """What is there all through a bucket fits beside the operands of each of its moments."""
        room = [np.inf] * self._buckets
        sizes = self._iteration.chunk_bytes
        for moment, chunks in enumerate(self._iteration.accesses):
            limit = self._machine.device_bytes - self._iteration.reserve_bytes[moment]
            free = limit - sum(sizes[chunk] for chunk in chunks)
            bucket = self._bucket[moment]
            room[bucket] = min(room[bucket], max(free, 0))
        for entries, nbytes in zip(self._room, room, strict=True):
            self._rows.add(entries, float(nbytes))
