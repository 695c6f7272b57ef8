"""From what an iteration did, in whatever order, to a trace, which is in the order of the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median

from gemini.memstats import Trace
from gemini.memstats.trace import OPTIMIZER
from gemini.runtime.step.recorder import Accesses, Recorded


def steady_modes(modes: Sequence[str], accesses: Accesses, frees: Accesses) -> tuple[str, ...]:
    """Return the modes of the next iteration, of one whose chunks were used for the first time.

    A chunk that nothing frees is allocated once: the next time it has content and is modified.
    """
    freed = {chunk for chunks in frees for chunk in chunks}

    @cache
    def steady(moment: str, chunks: tuple[int, ...]) -> str:
        letters = zip(moment, chunks, strict=True)
        return "".join("m" if mode == "w" and chunk not in freed else mode for mode, chunk in letters)

    return tuple(map(steady, modes, accesses))


def typical_seconds(iterations: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the times of periods, of those of some iterations.

    They add up to the iteration in the middle. Each period has the share that its middle time gives it: what
    interrupts a single one does not make it look long for good.
    """
    middle = [median(periods) for periods in zip(*iterations, strict=True)]
    total = sum(middle)
    scale = median(sum(seconds) for seconds in iterations) / total if total > 0 else 0.0
    return tuple(scale * seconds for seconds in middle)


def program_order(trace: Trace, recorded: Recorded) -> list[int] | None:
    """Return, per moment of ``trace``, which moment of ``recorded`` was it; None where one did not occur.

    ``recorded`` has the moments of forward and backward in the order of the trace, and updates anywhere.
    """
    updates: dict[tuple[int, ...], list[int]] = {}
    core = []
    for index, (chunks, phase) in enumerate(zip(recorded.accesses, recorded.phases, strict=True)):
        if phase == OPTIMIZER:
            updates.setdefault(chunks, []).append(index)
        else:
            core.append(index)
    rest, used = iter(core), Counter[tuple[int, ...]]()
    order = []
    for chunks, phase in zip(trace.accesses, trace.phases, strict=True):
        if phase == OPTIMIZER:
            same = updates.get(chunks, [])
            found = same[used[chunks]] if used[chunks] < len(same) else None
            used[chunks] += 1
        else:
            found = next(rest, None)
        if found is None:
            return None
        order.append(found)
    return order


def completed(trace: Trace, recorded: Recorded) -> Trace | None:
    """Return ``trace`` with modes, frees and times of an iteration that followed it; None where parts of it
    did not occur."""
    order = program_order(trace, recorded)
    if order is None:
        return None
    found = recorded.moments(order)
    return replace(
        trace,
        modes=steady_modes(found.modes, found.accesses, found.frees),
        frees=found.frees,
        seconds=found.seconds,
    )


def reordered(trace: Trace, recorded: Recorded, *, keep_reserve: bool) -> Trace:
    """Return the trace of an iteration that left ``trace``.

    What was not measured is taken from the moment of ``trace`` that accessed the same chunks in the same
    phase, or guessed: an average time, a modification. ``keep_reserve``: forward and backward are those of
    ``trace``, so their periods need the memory they needed; otherwise every period is given the most.
    """
    known = {key: index for index, key in enumerate(zip(trace.phases, trace.accesses, strict=True))}
    likes = [known.get(key) for key in zip(recorded.phases, recorded.accesses, strict=True)]
    average = sum(trace.seconds) / max(1, len(trace.seconds))
    return replace(
        trace,
        accesses=recorded.accesses,
        modes=steady_modes(recorded.modes, recorded.accesses, recorded.frees),
        frees=recorded.frees,
        phases=recorded.phases,
        seconds=tuple(average if like is None else trace.seconds[like] for like in likes),
        non_model_bytes=_reserve(trace, recorded.phases, keep=keep_reserve),
    )


def _reserve(trace: Trace, phases: Sequence[str], *, keep: bool) -> tuple[int, ...]:
    non_model = trace.non_model_bytes
    if not keep:
        return (max(non_model, default=0),) * len(phases)
    kept = [n for n, phase in zip(non_model, trace.phases, strict=True) if phase != OPTIMIZER]
    kept += kept[-1:] * (len(phases) - len(kept))
    return tuple(kept)
