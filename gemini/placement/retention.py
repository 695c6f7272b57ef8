"""Decides which chunks to keep between uses, by a linear program.

For interval i the share ``x_i`` of its chunk stays on DEVICE. The rest is read back before the next use, and
written below once per dirty run, which costs ``y_r >= 1 - x_i`` of a write for the intervals of the run. Per
moment, operands, kept chunks and chunks in transit must fit. Solved with HiGHS.

Intervals as variables: Albers, Garg and Leonardi (JACM 2000). Why a write is paid once per run, and why the
furthest next use is then no longer optimal: Beckmann et al. (APOCS 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog

from gemini.placement.problem import NO_RUN, Flags, Floats, Ints, PlanProblem

Array = npt.NDArray[Any]

_TIE_BREAK = 1e-3  # weight in the objective: among plans of equal time, prefer the one that moves less


@dataclass(frozen=True, eq=False)
class Retention:
    """A solution: the ``share`` of each interval that stays, the seconds that the busier link needs for the
    rest (a shared disk: both directions together), and the constraints for rounding."""

    share: Floats
    link_seconds: float
    first: Ints
    last: Ints
    room: Floats


def solve_retention(problem: PlanProblem, *, lead: float, lag: float) -> Retention | None:
    """Return the shares that minimize the time of the busier link; None if the solver fails.

    A chunk that leaves occupies room until ``lag`` times its flush time has passed, and from ``lead`` times
    its fetch time before its next use.
    """
    them = problem.intervals
    last = problem.fetched_from(lead)
    first = np.minimum(problem.flushed_at(lag), last)
    transit = them.occupied(them.begin + 1, first) + them.occupied(last, them.end)
    room = np.maximum(problem.limit_bytes - them.operand_bytes - transit, 0).astype(np.float64)
    program = _Program(problem, first, last)
    solution = linprog(
        program.objective,
        A_ub=program.at_most[0],
        b_ub=program.at_most[1],
        A_eq=program.equal[0],
        b_eq=program.equal[1],
        bounds=program.bounds(room),
        method="highs",
    )
    if solution.status != 0:
        return None
    share = solution.x[: len(them)]
    return Retention(share, float(solution.x[-1]), first, last, room)


def round_retention(problem: PlanProblem, found: Retention) -> Flags:
    """Round to whole intervals: the largest shares first, among equals the shorter one, as long as they
    fit."""
    span = problem.intervals.end - problem.intervals.begin
    order = np.lexsort((span, -found.share))
    wanted = order[found.share[order] > _TIE_BREAK]
    return problem.pack(wanted, found.first, found.last, found.room)


class _Program:
    """The matrices of the program. Columns: shares, runs, bytes kept at each moment, and the time of the
    busier link."""

    def __init__(self, problem: PlanProblem, first: Ints, last: Ints) -> None:
        self._problem = problem
        self._first, self._last = first, last
        self._shares = len(problem.intervals)
        self._runs = len(problem.run_seconds)
        self._columns = self._shares + self._runs + problem.num_moments + 1
        self.equal = self._kept_bytes()
        self.at_most = self._writes_and_links()
        self.objective = self._costs()

    def bounds(self, room: Floats) -> Floats:
        """Return (lowest, highest) per column."""
        upper = np.ones(self._columns)
        start = self._shares + self._runs
        upper[start : start + len(room)] = room
        upper[-1] = np.inf
        return np.stack([np.zeros(self._columns), upper], axis=1)

    def _kept_bytes(self) -> tuple[sparse.csr_matrix, Floats]:
        """Bytes kept at a moment are those of the previous one, plus the intervals that begin there, minus
        those that end."""
        moments, sizes = self._problem.num_moments, self._problem.intervals.nbytes
        some = np.nonzero(self._last > self._first)[0]
        start = self._shares + self._runs
        at = np.arange(moments)
        rows = [self._first[some] % moments, self._last[some] % moments, at, at]
        columns = [some, some, start + at, start + (at - 1) % moments]
        values = [-sizes[some], sizes[some], np.ones(moments), -np.ones(moments)]
        matrix = self._matrix(moments, rows, columns, values)
        # One of these rows is redundant; replace it by the bytes kept at moment 0.
        covers = some[self._covers_start(some)]
        anchor = self._matrix(
            1,
            [np.zeros(len(covers) + 1)],
            [np.append(covers, start)],
            [np.append(-sizes[covers], 1.0)],
        )
        return sparse.vstack([matrix[1:], anchor]).tocsr(), np.zeros(moments)

    def _covers_start(self, some: Ints) -> Flags:
        first, last = self._first[some], self._last[some]
        covered = np.zeros(len(some), dtype=bool)
        for turn in (0, 1, 2):
            start = turn * self._problem.num_moments
            covered |= (first <= start) & (start < last)
        return covered

    def _writes_and_links(self) -> tuple[sparse.csr_matrix, Floats]:
        problem = self._problem
        in_run = np.nonzero(problem.intervals.run != NO_RUN)[0]
        at = np.arange(len(in_run))
        columns = [in_run, self._shares + problem.intervals.run[in_run]]
        writes = self._matrix(len(in_run), [at, at], columns, [-np.ones(len(at)), -np.ones(len(at))])
        reads, runs = np.arange(self._shares), self._shares + np.arange(self._runs)
        link_of_writes = 0 if problem.writes_share_the_link else 1
        links = self._matrix(
            2,
            [np.zeros(self._shares), np.full(self._runs, link_of_writes), np.arange(2)],
            [reads, runs, np.full(2, self._columns - 1)],
            [-problem.read_seconds, problem.run_seconds, -np.ones(2)],
        )
        limits = np.append(-np.ones(len(in_run)), [-problem.read_seconds.sum(), 0.0])
        return sparse.vstack([writes, links]).tocsr(), limits

    def _costs(self) -> Floats:
        costs = np.zeros(self._columns)
        costs[: self._shares] = -self._problem.read_seconds
        costs[self._shares : self._shares + self._runs] = self._problem.run_seconds
        costs *= _TIE_BREAK
        costs[-1] = 1.0
        return costs

    def _matrix(
        self, rows: int, row: Sequence[Array], column: Sequence[Array], value: Sequence[Array]
    ) -> sparse.csr_matrix:
        entries = (np.concatenate(value), (np.concatenate(row), np.concatenate(column)))
        return sparse.csr_matrix(entries, shape=(rows, self._columns))
