"""A lower bound on the time of a steady step under any plan: the optimum of a fluid linear program.

Chunks are divisible, and early reads and late writes are counted in sums over all chunks, moment by moment.
Each of these only admits more plans, so no plan that leaves the reserve free takes less time on average
(docs/notes/placement.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from gemini.placement.problem import NO_RUN, Floats, Intervals, Ints, Iteration, Machine, find_intervals

# Transfers are counted in seconds, their room in bytes. No transfer is assumed to be slower than this share
# of the bandwidth (short ones are, because of latency), so that seconds determine bytes.
_RATE = 0.95

_Entries = Iterable[tuple[int, float]]


def lower_bound(iteration: Iteration, machine: Machine) -> float:
    """Return a time in seconds that no steady step falls below."""
    compute = sum(iteration.seconds)
    if iteration.total_bytes <= machine.device_bytes - max(iteration.reserve_bytes, default=0):
        return compute
    return compute + _Fluid(iteration, machine).stall_seconds()


class _ProgramRows:
    """The rows and columns of a sparse linear program."""

    def __init__(self) -> None:
        self._bounds: list[tuple[float, float]] = []
        self._entries: dict[bool, tuple[list[int], list[int], list[float]]] = {}
        self._limits: dict[bool, list[float]] = {}
        for is_equal in (False, True):
            self._entries[is_equal] = ([], [], [])
            self._limits[is_equal] = []

    def columns(self, count: int, lowest: float = 0.0, highest: float = np.inf) -> list[int]:
        """Add columns with these bounds; return their indices."""
        first = len(self._bounds)
        self._bounds += [(lowest, highest)] * count
        return list(range(first, first + count))

    def at_most(self, entries: _Entries, limit: float) -> None:
        """Add the row ``sum(value * column) <= limit``; a column may occur several times."""
        self._add(entries, limit, is_equal=False)

    def equal(self, entries: _Entries, value: float) -> None:
        """Add the row ``sum(value * column) == value``."""
        self._add(entries, value, is_equal=True)

    def minimize(self, costs: list[int]) -> float:
        """Return the least sum of the ``costs`` columns; 0, which is no bound, if the solver fails."""
        objective = np.zeros(len(self._bounds))
        objective[costs] = 1.0
        found = linprog(
            objective,
            A_ub=self._matrix(is_equal=False),
            b_ub=self._limits[False],
            A_eq=self._matrix(is_equal=True),
            b_eq=self._limits[True],
            bounds=np.array(self._bounds),
            method="highs-ipm",
        )
        return max(0.0, float(found.fun)) if found.status == 0 else 0.0

    def _add(self, entries: _Entries, limit: float, *, is_equal: bool) -> None:
        rows, columns, values = self._entries[is_equal]
        for column, value in entries:
            rows.append(len(self._limits[is_equal]))
            columns.append(column)
            values.append(value)
        self._limits[is_equal].append(limit)

    def _matrix(self, *, is_equal: bool) -> sparse.csr_matrix:
        rows, columns, values = self._entries[is_equal]
        shape = (len(self._limits[is_equal]), len(self._bounds))
        return sparse.csr_matrix((values, (rows, columns)), shape=shape)


@dataclass(frozen=True, eq=False)
class _Prices:
    """``seconds``: of one transfer, per interval or run. ``bytes_per_second``: a rate that no transfer falls
    below."""

    seconds: Floats
    bytes_per_second: float

    @classmethod
    def of(cls, nbytes: Ints, machine: Machine, *links: str) -> _Prices:
        """Price transfers; the links of two tiers share one transfer at the same time."""
        tiers = zip((machine.host_bytes, machine.disk_bytes), links, strict=True)
        speeds = [machine.speed(link) for present, link in tiers if present]
        if not speeds:
            return cls(np.full(len(nbytes), np.inf), 0.0)
        sizes = nbytes.astype(np.float64)
        per_second = np.zeros(len(sizes))
        for speed, latency in speeds:
            per_second += 1.0 / (latency + sizes / speed)
        alone: Floats = 1.0 / per_second
        slowest = float((sizes / alone).min(initial=np.inf))
        rate = max(slowest, _RATE * sum(speed for speed, _ in speeds)) if len(sizes) else 0.0
        return cls(np.minimum(alone, sizes / rate) if rate else alone, rate)


class _Fluid:
    """Builds the program.

    Time is divided into points: the begin and the end of each operator. A *point* is twice the moment, plus
    one for the end. Seconds are those of a link; bytes are divided by the DEVICE budget.
    """

    def __init__(self, iteration: Iteration, machine: Machine) -> None:
        self._iteration, self._machine = iteration, machine
        self._moments = moments = iteration.num_moments
        self._them: Intervals = find_intervals(iteration)
        self._scale = 1.0 / machine.device_bytes
        self._reads = _Prices.of(self._them.nbytes, machine, "h2d", "disk_read")
        self._writes = _Prices.of(self._them.run_bytes, machine, "d2h", "disk_write")
        self._rows = rows = _ProgramRows()
        self._kept = rows.columns(len(self._them), highest=1.0)  # share of each interval that stays
        self._left = rows.columns(len(self._them.run_bytes), highest=1.0)  # share of each run that is written
        # The share of a kept interval that is written at some time of its run, not necessarily before the
        # interval.
        self._later = rows.columns(len(self._them), highest=1.0)
        self._stall = rows.columns(moments)
        # Sums since the step began. Per moment: seconds of reads that were due, and of writes of content that
        # was made. Per point: seconds of reads and writes that were done. Writes left from the previous step
        # make the last one negative.
        self._due = rows.columns(moments)
        self._made = rows.columns(moments)
        self._read = rows.columns(2 * moments)
        self._written = rows.columns(2 * moments, lowest=-np.inf)
        # Bytes that stay, and seconds of `_later` among them; per point, bytes that leave when they are
        # written.
        self._stay = rows.columns(moments)
        self._stay_later = rows.columns(moments)
        self._leaving = rows.columns(2 * moments)

    def stall_seconds(self) -> float:
        """Return the least time that all operators of a step wait."""
        self._add_runs()
        self._add_spans(self._stay, self._kept, self._them.nbytes.astype(np.float64) * self._scale)
        self._add_spans(self._stay_later, self._later, self._write_seconds())
        self._add_sums()
        self._add_links()
        self._add_room()
        return self._rows.minimize(self._stall)

    def _write_seconds(self) -> Floats:
        """Return, per interval, the seconds of writing its run; 0 if nothing is written."""
        seconds = np.zeros(len(self._them))
        in_run = self._them.run != NO_RUN
        seconds[in_run] = self._writes.seconds[self._them.run[in_run]]
        return seconds

    def _add_runs(self) -> None:
        """Constrain writes: content that does not stay is written, once per run."""
        of_run = self._them.run[self._them.run != NO_RUN]
        lengths = np.bincount(of_run, minlength=len(self._left))
        for i, run in enumerate(self._them.run.tolist()):
            if run == NO_RUN or lengths[run] == 1:  # an only interval that stays is not written
                self._rows.equal([(self._later[i], 1.0)], 0.0)
            if run == NO_RUN:
                continue
            if lengths[run] == 1:
                self._rows.equal([(self._kept[i], 1.0), (self._left[run], 1.0)], 1.0)
                continue
            self._rows.at_most([(self._kept[i], -1.0), (self._left[run], -1.0)], -1.0)
            self._rows.at_most([(self._later[i], 1.0), (self._kept[i], -1.0)], 0.0)
            self._rows.at_most([(self._later[i], 1.0), (self._left[run], -1.0)], 0.0)

    def _add_spans(self, sums: list[int], shares: list[int], weights: Floats) -> None:
        """Define ``sums``: per moment, the weighted sum of the shares of all intervals around it."""
        moments = self._moments
        changes: list[list[tuple[int, float]]] = [[] for _ in range(moments)]
        at_start: list[tuple[int, float]] = []
        for i, weight in enumerate(weights.tolist()):
            first, last = int(self._them.begin[i]) + 1, int(self._them.end[i])
            if last <= first:
                continue
            changes[first % moments].append((shares[i], -weight))
            changes[last % moments].append((shares[i], weight))
            if first <= moments < last:
                at_start.append((shares[i], -weight))
        self._rows.equal([(sums[0], 1.0), *at_start], 0.0)
        for moment in range(1, moments):
            self._rows.equal([(sums[moment], 1.0), (sums[moment - 1], -1.0), *changes[moment]], 0.0)

    def _add_sums(self) -> None:
        """Define, per moment, the reads that are due when its operator begins, and the content that was made
        before it."""
        ends: list[list[int]] = [[] for _ in range(self._moments)]
        self._makes: list[list[tuple[int, float]]] = [[] for _ in range(self._moments)]
        for i, end in enumerate(self._them.end.tolist()):
            ends[end % self._moments].append(i)
            if self._them.dirty[i]:
                run = int(self._them.run[i])
                makes = (self._left[run], float(self._writes.seconds[run]))
                self._makes[int(self._them.begin[i])].append(makes)
        seconds = self._reads.seconds
        for moment in range(self._moments):
            due = [(self._due[moment], 1.0), *((self._kept[i], float(seconds[i])) for i in ends[moment])]
            made = [(self._made[moment], 1.0)]
            if moment:
                due.append((self._due[moment - 1], -1.0))
                made.append((self._made[moment - 1], -1.0))
                made += [(column, -value) for column, value in self._makes[moment - 1]]
            self._rows.equal(due, float(sum(seconds[i] for i in ends[moment])))
            self._rows.equal(made, 0.0)

    def _add_links(self) -> None:
        """Constrain links: reads and writes between two points take at most the time between them."""
        shared = self._machine.disk_shared and not self._machine.host_bytes
        last = self._moments - 1
        for point in range(2 * self._moments):
            moment, is_end = divmod(point, 2)
            read = [(self._read[point], 1.0), (self._read[point - 1], -1.0)]
            written = [(self._written[point], 1.0), (self._written[point - 1], -1.0)]
            if point == 0:  # the previous step counted from its own beginning
                read.append((self._due[last], 1.0))
                written += [(self._made[last], 1.0), *self._makes[last]]
            for flow in (read, written):
                self._rows.at_most([(column, -value) for column, value in flow], 0.0)
            stall = [] if is_end else [(self._stall[moment], -1.0)]
            limit = self._iteration.seconds[moment] if is_end else 0.0
            for flow in [read + written] if shared else [read, written]:
                self._rows.at_most([*flow, *stall], limit)
            if not is_end:
                self._rows.at_most([(self._due[moment], 1.0), (self._read[point], -1.0)], 0.0)
            self._rows.at_most([(self._written[point], 1.0), (self._made[moment], -1.0)], 0.0)

    def _add_room(self) -> None:
        """Constrain memory: during an operator, chunks besides its operands must fit: chunks that stay,
        chunks that were read early, and chunks that leave but are not written yet. An interval is only one of
        these."""
        leaves = self._scale * self._writes.bytes_per_second
        early = self._scale * self._reads.bytes_per_second
        unwritten = self._unwritten_operands()
        around = self._them.occupied(self._them.begin + 1, self._them.end) * self._scale
        for moment in range(self._moments):
            reserve = self._iteration.reserve_bytes[moment]
            free = self._machine.device_bytes - reserve - int(self._them.operand_bytes[moment])
            for point in (2 * moment, 2 * moment + 1):
                waiting = [(self._made[moment], leaves), (self._written[point], -leaves)]
                waiting += [(self._stay_later[moment], -leaves), (self._leaving[point], -1.0)]
                waiting += [(column, -leaves * seconds) for column, seconds in unwritten[moment]]
                self._rows.at_most(waiting, 0.0)
                there = [(self._stay[moment], 1.0), (self._leaving[point], 1.0)]
                there += [(self._read[point], early), (self._due[moment], -early)]
                self._rows.at_most(there, min(max(free, 0) * self._scale, float(around[moment])))

    def _unwritten_operands(self) -> list[list[tuple[int, float]]]:
        """Return, per moment, which operands may have content that was made earlier and is written later."""
        found: list[list[tuple[int, float]]] = [[] for _ in range(self._moments)]
        uses = set(zip(self._them.chunk.tolist(), self._them.begin.tolist(), strict=True))
        for i, run in enumerate(self._them.run.tolist()):
            if run == NO_RUN:
                continue
            share = (self._left[run], float(self._writes.seconds[run]))
            if not self._them.dirty[i]:
                found[int(self._them.begin[i])].append(share)
            next_use = int(self._them.end[i]) % self._moments
            if (int(self._them.chunk[i]), next_use) not in uses:  # this use ends the content
                found[next_use].append(share)
        return found
