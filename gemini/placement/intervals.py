"""Intervals: the times from one use of a chunk to its next one, which a plan decides about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemini.placement.iteration import Iteration

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NO_RUN = -1


@dataclass(frozen=True, eq=False)
class Intervals:
    """One entry per interval during which a chunk has content.

    ``chunk``; ``access``: the place of the use among the ``num_accesses`` of all moments; ``begin``: the
    moment of the use; ``end``: that of the next use, ``begin < end``, past the last moment where the step
    repeats first;
    ``nbytes``; ``dirty``: the use writes. ``run``: which dirty run it belongs to, the intervals from one
    write to the next, NO_RUN for a chunk that nothing writes. One entry per run: ``run_bytes``.
    One entry per moment: ``operand_bytes``.
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
        """Return, per moment, the bytes of intervals that take part in ``first <= moment < last``."""
        moments = self.num_moments
        some = last > first
        begun = np.bincount(first[some], weights=self.nbytes[some], minlength=3 * moments)
        ended = np.bincount(last[some], weights=self.nbytes[some], minlength=3 * moments)
        filled = np.cumsum(begun[: 3 * moments] - ended[: 3 * moments])  # exact: whole numbers below 2**53
        folded: Ints = filled.reshape(3, moments).sum(axis=0).astype(np.int64)
        return folded

    def kept_bytes(self, keep: Flags) -> Ints:
        """Return, per moment, the bytes of operands and of chunks that ``keep`` says stay."""
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
