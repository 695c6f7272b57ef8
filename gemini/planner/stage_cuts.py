"""Cuts a model into pipeline stages such that each stage fits its memory and the step is short.

Stages hold different numbers of micro-batches, so the early ones need more memory for equal work. A table of
the time of every stage with every range of blocks goes to :func:`gemini.planner.stages.best_cut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemini.planner.figures import Figures
from gemini.planner.recomputation import Held, alone
from gemini.planner.space import AS_NEEDED, ROTOR
from gemini.planner.stages import best_cut, sums_between

Ranges = tuple[tuple[int, int], ...]  # the segments of each stage
Table = NDArray[np.float64]  # [stage, first, last], or [first, last]


@dataclass(frozen=True)
class StageRooms:
    """The memory that stages have.

    Attributes:
        room_bytes: budget of each stage.
        others: number of micro-batches that each stage holds besides the one that runs.
        model_bytes: model data of each segment.
    """

    room_bytes: tuple[int, ...]
    others: tuple[int, ...]
    model_bytes: tuple[int, ...]
    num_microbatches: int


def fitting_ranges(
    figures: Sequence[Figures], again: frozenset[int], how: str, rooms: StageRooms
) -> Ranges | None:
    """Return the segments of each stage for the shortest step in which all stages fit; None: no cut fits.

    Byte counts are close to those of a price, but only the price decides.

    Args:
        again: segments that are recomputed in any case.
        how: recomputation mode; with FIT or ROTOR more segments are recomputed as memory requires.
    """
    if not _may_fit(figures, again, how, rooms):
        return None
    seconds = [
        each.forward_seconds * (2 if at in again else 1) + each.backward_seconds
        for at, each in enumerate(figures)
    ]
    takes = sums_between(seconds)
    if how in AS_NEEDED:
        table = _as_few(figures, takes, rooms, by_groups=how == ROTOR)
    else:
        table = np.where(_needs(figures, again, rooms) <= 0, takes, np.inf)
    count = len(figures) - 2
    firsts = np.array([0, *range(2, count + 1), count + 1])
    lasts = np.array([0, *range(2, count + 1), count + 2])
    cut = best_cut(table[:, firsts[:, None], lasts[None, :]], rooms.num_microbatches)
    if cut is None:
        return None
    return tuple((int(firsts[a]), int(lasts[b])) for a, b in cut.ranges)


def _may_fit(figures: Sequence[Figures], again: frozenset[int], how: str, rooms: StageRooms) -> bool:
    """Return False if the stages together need more than their total room, wherever they begin."""
    kept = 0.0
    for at, each in enumerate(figures):
        is_block = 0 < at < len(figures) - 1
        if not is_block or (how not in AS_NEEDED and at not in again):
            kept += each.kept_bytes
        elif how != ROTOR:
            kept += each.input_bytes
    return sum(rooms.model_bytes) + (min(rooms.others) + 1) * kept <= sum(rooms.room_bytes)


def _needs(figures: Sequence[Figures], again: frozenset[int], rooms: StageRooms) -> Table:
    """Return the bytes that each stage lacks for each range of segments; negative values are spare bytes."""
    held = Held(figures, alone(again))
    kept = sums_between([held.kept_of(at) for at in range(len(figures))])
    received = np.array([0.0, *(each.input_bytes for each in figures[1:]), 0.0])[:, None]
    # Peak of one running micro-batch: bytes that the segments before keep, plus the segment's own peak.
    count = len(figures)
    peaks = np.full((count + 1, count + 1), -np.inf)
    tops = kept[:count, :count] + np.array([each.peak_bytes for each in figures])[None, :]
    peaks[:count, 1:] = np.where(np.tri(count, k=-1, dtype=bool), -np.inf, tops)
    inner = np.maximum.accumulate(peaks, axis=1)
    own = sums_between(rooms.model_bytes) + inner + received
    others, room = np.array(rooms.others)[:, None, None], np.array(rooms.room_bytes)[:, None, None]
    needs: Table = own[None] + others * (kept + received)[None] - room
    return needs


def _as_few(figures: Sequence[Figures], takes: Table, rooms: StageRooms, *, by_groups: bool) -> Table:
    """Return the seconds of each stage if it recomputes as few blocks as fit; infinite if it does not fit.

    With ``by_groups``, a range that does not fit is counted as if groups of blocks were recomputed, which
    costs another forward pass.
    """
    lacks = _needs(figures, frozenset(), rooms)
    blocks = range(1, len(figures) - 1)
    fits = _needs(figures, frozenset(blocks), rooms) <= 0
    table = np.repeat(takes[None], len(rooms.room_bytes), axis=0)
    others = np.array(rooms.others)[:, None, None]

    def value(at: int) -> float:
        own = figures[at]
        return (own.kept_bytes - own.input_bytes) / max(own.forward_seconds, 1e-12)

    for at in sorted(blocks, key=value, reverse=True):
        part = np.s_[:, : at + 1, at + 1 :]
        more = lacks[part] > 0
        if not more.any():
            continue
        table[part] += more * figures[at].forward_seconds
        lacks[part] -= more * (others + 1) * (figures[at].kept_bytes - figures[at].input_bytes)
    if not by_groups:
        return np.where(fits, table, np.inf)
    whole = takes + 2 * sums_between([each.forward_seconds for each in figures])
    return np.where(fits, table, whole[None])
