"""Iteration: one steady step as the chunk table sees it, the moments in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.memstats.trace import Trace

_OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Iteration:
    """One entry per moment but for ``chunk_bytes``, which has one per chunk id; it repeats for ever.

    ``accesses``, ``modes``, ``frees`` and ``seconds`` as in :class:`Trace`; ``reserve_bytes``: what non-model
    data takes of DEVICE in the period.
    """

    chunk_bytes: tuple[int, ...]
    accesses: tuple[tuple[int, ...], ...]
    modes: tuple[str, ...]
    frees: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    reserve_bytes: tuple[int, ...]

    @property
    def num_moments(self) -> int:
        """How many operators a step has."""
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

        ``places``: the moment of the trace that runs, and the moment whose period it runs in.
        ``reserve_bytes``: per moment of the trace, what to keep free in its period; empty for nothing.
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
        """Return the step of ``trace``; with ``overlap`` each update runs right before the next use of what
        it changes, as the runtime's schedule has it (docs/notes/overlap.md)."""
        return cls.of_order(trace, order_of(trace, overlap=overlap), trace.reserve_bytes())


def order_of(trace: Trace, *, overlap: bool) -> list[tuple[int, int]]:
    """Return the places of :meth:`Iteration.of_order`: those of the program, or, with ``overlap``, those in
    which each group's update comes before the first moment that uses its chunks."""
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
    period = trace.num_moments - 1  # before the first moment lies the last period
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
