"""PlanProblem: the numbers that every way of planning one iteration on one machine needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemini.placement.intervals import NO_RUN, Flags, Floats, Intervals, Ints, find_intervals
from gemini.placement.iteration import Iteration
from gemini.placement.machine import Machine


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """One iteration on one machine, with its intervals and their prices.

    ``read_seconds``, ``write_seconds``: per interval, what bringing its chunk to DEVICE and copying it below
    takes. ``run_seconds``: the latter per dirty run. ``limit_bytes``: per moment, what model data may take.
    ``starts``: when each moment begins if nothing waits, for three repetitions and the end, seconds.
    """

    iteration: Iteration
    machine: Machine
    intervals: Intervals
    read_seconds: Floats
    write_seconds: Floats
    run_seconds: Floats
    limit_bytes: Ints
    starts: Floats

    @classmethod
    def of(cls, iteration: Iteration, machine: Machine) -> PlanProblem:
        """Find the intervals and price them."""
        intervals = find_intervals(iteration)
        sizes = intervals.nbytes.astype(np.float64)
        per_read, per_write = machine.below(iteration.total_bytes)
        reserve = np.array(iteration.reserve_bytes, dtype=np.int64)
        ends = np.cumsum(np.tile(np.array(iteration.seconds, dtype=np.float64), 3))
        return cls(
            iteration=iteration,
            machine=machine,
            intervals=intervals,
            read_seconds=sizes * per_read,
            write_seconds=sizes * per_write,
            run_seconds=intervals.run_bytes.astype(np.float64) * per_write,
            limit_bytes=np.maximum(machine.device_bytes - reserve, 0),
            starts=np.concatenate([np.zeros(1), ends]),
        )

    @property
    def writes_share_the_link(self) -> bool:
        """Whether what is written takes time from what is read: one disk does both."""
        return self.machine.disk_shared and not self.machine.host_bytes

    @property
    def num_moments(self) -> int:
        """How many operators a step has."""
        return self.iteration.num_moments

    def flushed_at(self, lag: float) -> Ints:
        """Return the moment from which each interval's flush has ended if it takes ``lag`` times its own
        transfer; the one after the use for intervals that write nothing."""
        them, moments = self.intervals, self.num_moments
        ready = self.starts[them.begin + 1 + moments] + lag * self.write_seconds
        at = np.searchsorted(self.starts, ready, side="left") - moments
        ended = np.clip(at, them.begin + 1, them.end)
        return np.where(them.dirty & (lag > 0), ended, them.begin + 1)

    def fetched_from(self, lead: float) -> Ints:
        """Return the moment from which each interval's chunk is on its way back if that begins ``lead`` times
        its own transfer before its use."""
        them, moments = self.intervals, self.num_moments
        late = self.starts[them.end + moments] - lead * self.read_seconds
        at = np.searchsorted(self.starts, late, side="right") - 1 - moments
        begun: Ints = np.clip(at, them.begin + 1, them.end)
        return begun

    def moving_seconds(self, keep: Flags) -> float:
        """Return for how long the links are busy with what is not kept."""
        runs = np.unique(self.intervals.run[~keep])
        written = self.run_seconds[runs[runs != NO_RUN]].sum()
        return float(self.read_seconds[~keep].sum() + written)

    def fits(self, keep: Flags) -> bool:
        """Say whether operands and kept chunks stay within the limit at every moment."""
        return bool((self.intervals.kept_bytes(keep) <= self.limit_bytes).all())

    def pack(self, order: Ints, first: Ints, last: Ints, room: Floats) -> Flags:
        """Return the intervals that fit ``room`` bytes per moment, taken in ``order``.

        An interval needs its bytes at ``first <= moment < last``.
        """
        left = room.copy()
        keep = np.zeros(len(self.intervals), dtype=bool)
        sizes = self.intervals.nbytes
        for i in order.tolist():
            span = np.arange(first[i], last[i]) % self.num_moments
            if (left[span] >= sizes[i]).all():
                left[span] -= sizes[i]
                keep[i] = True
        return keep
