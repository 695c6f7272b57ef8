"""Cuts a model into pipeline stages such that each stage fits its memory and the step is short.

Stages hold different numbers of micro-batches, so the early ones need more memory for equal work. A table of
the time of every stage with every range of blocks goes to :func:`gemini.planner.stages.best_cut`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gemini.planner.recomputation import Held, alone
from gemini.planner.segment_costs import SegmentCosts
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
    costs: Sequence[SegmentCosts], again: frozenset[int], how: str, rooms: StageRooms
) -> Ranges | None:
    """Return the segments of each stage for the shortest step in which all stages fit; None: no cut fits.

    Byte counts are close to those of a price, but only the price decides.

    Args:
        again: segments that are recomputed in any case.
        how: recomputation mode; with FIT or ROTOR more segments are recomputed as memory requires.
    """
    if not _may_fit(costs, again, how, rooms):
        return None
    seconds = [
        each.forward_seconds * (2 if at in again else 1) + each.backward_seconds
        for at, each in enumerate(costs)
    ]
    takes = sums_between(seconds)
    if how in AS_NEEDED:
        table = _as_few(costs, takes, rooms, by_groups=how == ROTOR)
    else:
        table = np.where(_needs(costs, again, rooms) <= 0, takes, np.inf)
    count = len(costs) - 2
    firsts = np.array([0, *range(2, count + 1), count + 1])
    lasts = np.array([0, *range(2, count + 1), count + 2])
    cut = best_cut(table[:, firsts[:, None], lasts[None, :]], rooms.num_microbatches)
    if cut is None:
        return None
    return tuple((int(firsts[a]), int(lasts[b])) for a, b in cut.ranges)


def _may_fit(costs: Sequence[SegmentCosts], again: frozenset[int], how: str, rooms: StageRooms) -> bool:
    """Return False if the stages together need more than their total room, wherever they begin."""
    kept = 0.0
    for at, each in enumerate(costs):
        is_block = 0 < at < len(costs) - 1
        if not is_block or (how not in AS_NEEDED and at not in again):
            kept += each.kept_bytes
        elif how != ROTOR:
            kept += each.input_bytes
    return sum(rooms.model_bytes) + (min(rooms.others) + 1) * kept <= sum(rooms.room_bytes)


def _needs(costs: Sequence[SegmentCosts], again: frozenset[int], rooms: StageRooms) -> Table:
    """Return the bytes that each stage lacks for each range of segments; negative values are spare bytes."""
    held = Held(costs, alone(again))
    kept = sums_between([held.kept_of(at) for at in range(len(costs))])
    received = np.array([0.0, *(each.begin_bytes for each in costs[1:]), 0.0])[:, None]
    # Peak of one running micro-batch: bytes that the segments before keep, plus the segment's own peak.
    count = len(costs)
    peaks = np.full((count + 1, count + 1), -np.inf)
    tops = kept[:count, :count] + np.array([each.peak_bytes for each in costs])[None, :]
    peaks[:count, 1:] = np.where(np.tri(count, k=-1, dtype=bool), -np.inf, tops)
    inner = np.maximum.accumulate(peaks, axis=1)
    own = sums_between(rooms.model_bytes) + inner + received
    others, room = np.array(rooms.others)[:, None, None], np.array(rooms.room_bytes)[:, None, None]
    needs: Table = own[None] + others * (kept + received)[None] - room
    return needs


def _as_few(costs: Sequence[SegmentCosts], takes: Table, rooms: StageRooms, *, by_groups: bool) -> Table:
    """Return the seconds of each stage if it recomputes as few blocks as fit; infinite if it does not fit.

    With ``by_groups``, a range that does not fit is counted as if groups of blocks were recomputed, which
    costs another forward pass.
    """
    lacks = _needs(costs, frozenset(), rooms)
    blocks = range(1, len(costs) - 1)
    fits = _needs(costs, frozenset(blocks), rooms) <= 0
    table = np.repeat(takes[None], len(rooms.room_bytes), axis=0)
    others = np.array(rooms.others)[:, None, None]

    def value(at: int) -> float:
        own = costs[at]
        return (own.kept_bytes - own.input_bytes) / max(own.forward_seconds, 1e-12)

    for at in sorted(blocks, key=value, reverse=True):
        part = np.s_[:, : at + 1, at + 1 :]
        more = lacks[part] > 0
        if not more.any():
            continue
        table[part] += more * costs[at].forward_seconds
        lacks[part] -= more * (others + 1) * (costs[at].kept_bytes - costs[at].input_bytes)
    if not by_groups:
        return np.where(fits, table, np.inf)
    whole = takes + 2 * sums_between([each.forward_seconds for each in costs])
    return np.where(fits, table, whole[None])
