"""The input of planning: one steady step, the machine that runs it, and the intervals between uses of chunks.
A plan decides for each interval whether its chunk stays on DEVICE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemini.errors import ConfigError
from gemini.memstats.trace import LINKS, LinkSpeed, Trace
from gemini.system.config import format_bytes

_OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Iteration:
    """A steady step: one entry per moment, and one per chunk id in ``chunk_bytes``. The step repeats.

    ``accesses``, ``modes``, ``frees`` and ``seconds``: as in :class:`Trace`. ``reserve_bytes``: the non-model
    bytes on DEVICE in the period.
    """

    chunk_bytes: tuple[int, ...]
    accesses: tuple[tuple[int, ...], ...]
    modes: tuple[str, ...]
    frees: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    reserve_bytes: tuple[int, ...]

    @property
    def num_moments(self) -> int:
        """The number of operators in a step."""
        return len(self.accesses)

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks that the step uses."""
        used = {chunk for chunks in self.accesses for chunk in chunks}
        return sum(self.chunk_bytes[chunk] for chunk in used)

    @classmethod
    def of_order(
        cls, trace: Trace, places: Sequence[tuple[int, int]], reserve_bytes: Sequence[int]
    ) -> Iteration:
        """Return the moments of ``trace`` in another order.

        ``places``: pairs of moments of the trace: the one that runs, and the one that begins the period it
        runs in. ``reserve_bytes``: per moment of the trace, the bytes to keep free in its period; empty for
        none.
        """
        moments = [moment for moment, _ in places]
        return cls(
            chunk_bytes=trace.chunk_bytes,
            accesses=tuple(trace.accesses[moment] for moment in moments),
            modes=tuple(trace.modes[moment] for moment in moments),
            frees=tuple(trace.frees[moment] for moment in moments),
            seconds=tuple(trace.seconds[moment] for moment in moments),
            reserve_bytes=tuple(reserve_bytes[period] if reserve_bytes else 0 for _, period in places),
        )

    @classmethod
    def of_trace(cls, trace: Trace, *, overlap: bool) -> Iteration:
        """Return the step of ``trace``. With ``overlap`` each update runs right before the next use of the
        chunks that it changes, as in the runtime's schedule (docs/notes/overlap.md)."""
        return cls.of_order(trace, order_of(trace, overlap=overlap), trace.reserve_bytes())


def order_of(trace: Trace, *, overlap: bool) -> list[tuple[int, int]]:
    """Return the places for :meth:`Iteration.of_order`: program order, or with ``overlap`` each group's
    update before the first moment that uses its chunks."""
    if not overlap:
        return [(moment, moment) for moment in range(trace.num_moments)]
    updates = update_groups(trace)
    waiting = {
        chunk: group
        for group, moments in enumerate(updates)
        for moment in moments
        for chunk in trace.accesses[moment]
    }
    left = dict(enumerate(updates))
    period = trace.num_moments - 1  # the last period precedes the first moment
    places: list[tuple[int, int]] = []
    for moment, phase in enumerate(trace.phases):
        if phase == _OPTIMIZER:
            continue
        needed = {waiting[chunk] for chunk in trace.accesses[moment] if chunk in waiting}
        for group in sorted(needed & left.keys()):
            places += [(update, period) for update in left.pop(group)]
        places.append((moment, moment))
        period = moment
    return places + [(update, period) for moments in left.values() for update in moments]


def update_groups(trace: Trace) -> list[list[int]]:
    """Return the optimizer's moments by chunk group, in the order of the step.

    The pieces of one group's update share its gradient chunk.
    """
    groups: dict[int, list[int]] = {}
    for moment, phase in enumerate(trace.phases):
        if phase != _OPTIMIZER or not trace.accesses[moment]:
            continue
        of_group = [chunk for chunk in trace.accesses[moment] if trace.chunk_kinds[chunk] == "grad"]
        groups.setdefault(min(of_group or trace.accesses[moment]), []).append(moment)
    return list(groups.values())


# For DEVICE in CPU memory. Measured with GPT-2 124M and a virtual disk on two processors: 0.18 to 0.24.
CPU_TRANSFERS_TAKE = 0.2


@dataclass(frozen=True)
class Machine:
    """Hard byte budgets of the tiers (0: absent) and the speeds of the links between them.

    ``disk_shared``: reads and writes of the disk share one channel, so their times add up.
    ``transfers_take``: seconds by which one second of a busy link slows down computing; used to compare
    plans, but not included in the times of steps. Raises ConfigError if a tier has no link to DEVICE.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    links: tuple[LinkSpeed, ...]
    disk_shared: bool = True
    transfers_take: float = 0.0

    def __post_init__(self) -> None:
        known = {link.name for link in self.links}
        for tier, nbytes, names in (
            ("HOST", self.host_bytes, LINKS[:2]),
            ("DISK", self.disk_bytes, LINKS[2:]),
        ):
            missing = [name for name in names if name not in known]
            if nbytes and missing:
                raise ConfigError(
                    f"{tier} has {format_bytes(nbytes)} but the speed of {missing[0]} is unknown"
                )

    @property
    def budgets(self) -> tuple[int, int, int]:
        """The bytes of DEVICE, HOST and DISK."""
        return self.device_bytes, self.host_bytes, self.disk_bytes

    def speed(self, name: str) -> tuple[float, float]:
        """Return bytes per second and latency in seconds of a link; zeros if the link is absent."""
        found = next((link for link in self.links if link.name == name), None)
        return (found.bytes_per_second, found.latency_seconds) if found is not None else (0.0, 0.0)

    def below(self, total_bytes: int) -> tuple[float, float]:
        """Return seconds per byte from and to the tiers below DEVICE, for ``total_bytes`` of model data.

        Data that does not fit on DEVICE is assumed on HOST as far as that goes, the rest on DISK.
        """
        outside = max(1, total_bytes - self.device_bytes)
        on_host = min(1.0, self.host_bytes / outside) if self.disk_bytes else float(self.host_bytes > 0)
        shares = ((on_host, "h2d", "d2h"), (1.0 - on_host, "disk_read", "disk_write"))
        in_use = [
            (share, self.speed(read)[0], self.speed(write)[0]) for share, read, write in shares if share
        ]
        return (
            sum(share / read for share, read, _ in in_use if read),
            sum(share / write for share, _, write in in_use if write),
        )


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NO_RUN = -1


@dataclass(frozen=True, eq=False)
class Intervals:
    """One entry per interval during which a chunk has content; all are arrays.

    ``chunk``: its id. ``access``: the index of the use among the ``num_accesses`` of all moments. ``begin``:
    the moment of the use. ``end``: that of the next use, ``begin < end``, beyond the last moment if the step
    repeats in between. ``nbytes``: of the chunk. ``dirty``: the use writes. ``run``: the dirty run that it
    belongs to (the intervals from one write to the next); NO_RUN for a chunk that is never written. One entry
    per run: ``run_bytes``. One entry per moment: ``operand_bytes``.
    """

    num_moments: int
    num_accesses: int
    chunk: Ints
    access: Ints
    begin: Ints
    end: Ints
    nbytes: Ints
    dirty: Flags
    run: Ints
    run_bytes: Ints
    operand_bytes: Ints

    def __len__(self) -> int:
        return len(self.chunk)

    def occupied(self, first: Ints, last: Ints) -> Ints:
        """Return, per moment, the bytes of intervals with ``first <= moment < last``."""
        moments = self.num_moments
        some = last > first
        begun = np.bincount(first[some], weights=self.nbytes[some], minlength=3 * moments)
        ended = np.bincount(last[some], weights=self.nbytes[some], minlength=3 * moments)
        filled = np.cumsum(begun[: 3 * moments] - ended[: 3 * moments])  # exact: whole numbers below 2**53
        folded: Ints = filled.reshape(3, moments).sum(axis=0).astype(np.int64)
        return folded

    def kept_bytes(self, keep: Flags) -> Ints:
        """Return, per moment, the bytes of operands and of the chunks that stay according to ``keep``."""
        first = np.where(keep, self.begin + 1, self.end)
        return self.operand_bytes + self.occupied(first, self.end)


def find_intervals(iteration: Iteration) -> Intervals:
    """Return every interval of a step, chunk by chunk, each dirty run from its write on."""
    uses: dict[int, list[tuple[int, int, bool]]] = {}
    access = 0
    for moment, (chunks, modes) in enumerate(zip(iteration.accesses, iteration.modes, strict=True)):
        for chunk, mode in zip(chunks, modes, strict=True):
            uses.setdefault(chunk, []).append((moment, access, mode != "r"))
            access += 1
    freed: dict[int, list[int]] = {}
    for moment, chunks in enumerate(iteration.frees):
        for chunk in chunks:
            freed.setdefault(chunk, []).append(moment)
    rows: list[tuple[int, ...]] = []
    run_bytes: list[int] = []
    for chunk, of_chunk in uses.items():
        frees = freed.get(chunk, [])
        rows += _of_chunk(chunk, of_chunk, frees, iteration, run_bytes)
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    operands = [sum(iteration.chunk_bytes[chunk] for chunk in chunks) for chunks in iteration.accesses]
    sizes = np.array(iteration.chunk_bytes, dtype=np.int64)
    return Intervals(
        num_moments=iteration.num_moments,
        num_accesses=access,
        chunk=table[:, 0],
        access=table[:, 1],
        begin=table[:, 2],
        end=table[:, 3],
        nbytes=sizes[table[:, 0]],
        dirty=table[:, 4] != 0,
        run=table[:, 5],
        run_bytes=np.array(run_bytes, dtype=np.int64),
        operand_bytes=np.array(operands, dtype=np.int64),
    )


def _of_chunk(
    chunk: int,
    uses: list[tuple[int, int, bool]],
    frees: list[int],
    iteration: Iteration,
    run_bytes: list[int],
) -> list[tuple[int, ...]]:
    """Return rows (chunk, access, begin, end, dirty, run); add to ``run_bytes`` for each run."""
    moments = iteration.num_moments
    first_write = next((i for i, (_, _, writes) in enumerate(uses) if writes), None)
    start = first_write or 0
    run = NO_RUN
    rows: list[tuple[int, ...]] = []
    for i in (*range(start, len(uses)), *range(start)):
        begin, access, writes = uses[i]
        end = uses[i + 1][0] if i + 1 < len(uses) else uses[0][0] + moments
        if writes:
            run_bytes.append(iteration.chunk_bytes[chunk])
            run = len(run_bytes) - 1
        dead = any(begin <= at < end or begin <= at + moments < end for at in frees)
        if not dead:
            rows.append((chunk, access, begin, end, int(writes), run))
    return rows


@dataclass(frozen=True, eq=False)
class PlanProblem:
    """One iteration on one machine, with its intervals and their prices.

    ``read_seconds``, ``write_seconds``: per interval, the time to bring its chunk to DEVICE and to copy it
    below. ``run_seconds``: the latter per dirty run. ``limit_bytes``: per moment, the limit of model data.
    ``starts``: when each moment begins if nothing waits, in seconds, for three repetitions and the end.
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
        """Whether writes take time from reads: a single disk does both."""
        return self.machine.disk_shared and not self.machine.host_bytes

    @property
    def num_moments(self) -> int:
        """The number of operators in a step."""
        return self.iteration.num_moments

    def flushed_at(self, lag: float) -> Ints:
        """Return, per interval, the moment from which its flush has ended if it takes ``lag`` times its
        transfer; for intervals that write nothing, the moment after the use."""
        them, moments = self.intervals, self.num_moments
        ready = self.starts[them.begin + 1 + moments] + lag * self.write_seconds
        at = np.searchsorted(self.starts, ready, side="left") - moments
        ended = np.clip(at, them.begin + 1, them.end)
        return np.where(them.dirty & (lag > 0), ended, them.begin + 1)

    def fetched_from(self, lead: float) -> Ints:
        """Return, per interval, the moment from which its chunk is being fetched if that begins ``lead``
        times its transfer before the next use."""
        them, moments = self.intervals, self.num_moments
        late = self.starts[them.end + moments] - lead * self.read_seconds
        at = np.searchsorted(self.starts, late, side="right") - 1 - moments
        begun: Ints = np.clip(at, them.begin + 1, them.end)
        return begun

    def moving_seconds(self, keep: Flags) -> float:
        """Return how long the links are busy with the intervals that are not kept."""
        runs = np.unique(self.intervals.run[~keep])
        written = self.run_seconds[runs[runs != NO_RUN]].sum()
        return float(self.read_seconds[~keep].sum() + written)

    def fits(self, keep: Flags) -> bool:
        """Say whether operands and kept chunks stay within the limit at every moment."""
        return bool((self.intervals.kept_bytes(keep) <= self.limit_bytes).all())

    def pack(self, order: Ints, first: Ints, last: Ints, room: Floats) -> Flags:
        """Return the intervals that fit into ``room`` bytes per moment, taken in ``order``.

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
