"""Which blocks compute their activations a second time, in backward, instead of keeping them in chunks.

From the trace of a step that puts everything which autograd saves into chunks, the step is derived that
recomputes some blocks. Both are planned and simulated as steps are. See docs/notes/activations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gemini.errors import OutOfBudgetError
from gemini.memstats import Trace
from gemini.placement.iteration import Iteration
from gemini.placement.machine import Machine
from gemini.placement.planner import choose_plan
from gemini.placement.recomputed_trace import BlockCall, Span, activation_bytes, recomputed, spans_of
from gemini.system.config import format_bytes

_WORTH_IT = 0.02  # the share of a step that recomputing has to save: the times it is judged by are measured
_MOVING = 1e-3  # what a second of a link counts at least, as when plans are compared
_GRID = 4  # numbers of blocks tried at first, besides none
_NEVER = float("inf")


@dataclass(frozen=True)
class RecomputeChoice:
    """The blocks to recompute, and the seconds of a step with and without that, both as planned and with
    the copies into chunks of what leaves DEVICE.

    ``saved_bytes``: what these blocks no longer save in a step; ``computing_seconds``: what computing them
    again takes.
    """

    blocks: frozenset[int]
    seconds: float
    seconds_without: float
    saved_bytes: int
    computing_seconds: float


NOTHING = RecomputeChoice(frozenset(), 0.0, 0.0, 0, 0.0)


@dataclass(frozen=True)
class RecomputeReport:
    """What became of a model's blocks. ``names``: those that are recomputed; ``refused``: name and reason of
    those that cannot be; ``num_blocks``: how many there are; ``choice``: None while steps are still
    watched; ``why_none``: why no block is chosen, where none is."""

    names: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    num_blocks: int
    choice: RecomputeChoice | None
    why_none: str = ""

    def lines(self) -> Iterator[str]:
        """Say it in words that a person reads."""
        if not self.num_blocks:
            yield "No block is recomputed: no list or sequence of the module has members that are alike."
            return
        if self.choice is None:
            yield "Which blocks are recomputed is not chosen yet: that takes five steps that are alike."
        elif self.names:
            chosen = self.choice
            yield (
                f"Of {self.num_blocks} blocks {len(self.names)} compute their activations again in backward "
                f"({', '.join(self.names)}): {format_bytes(chosen.saved_bytes)} less to save for "
                f"{chosen.computing_seconds:.3g} s of computing. The steps that were watched, in which all "
                f"of it went into chunks, would have taken {chosen.seconds:.3g} s with that, "
                f"{chosen.seconds_without:.3g} s without."
            )
        else:
            reason = "none can be" if len(self.refused) == self.num_blocks else self.why_none
            yield f"None of {self.num_blocks} blocks is recomputed: {reason}."
        for name, reason in self.refused:
            yield f"  {name} cannot be recomputed: {reason}."


class Judged(NamedTuple):
    """What simulation says of the step in which some number of blocks is recomputed."""

    cost: float
    seconds: float
    moves: bool  # anything between tiers


def choose_blocks(
    trace: Trace,
    calls: Sequence[BlockCall],
    machine: Machine,
    *,
    overlap: bool,
    copy_bytes_per_second: float,
) -> RecomputeChoice:
    """Return the blocks whose recomputation makes the simulated step the shortest; none where that saves
    less than two hundredths of it, or where nothing is moved: time can be saved on moving alone.

    ``trace``: of a step in which all activations went into chunks; ``calls``: of the blocks that may be
    recomputed. ``copy_bytes_per_second``: how fast that step copied saved tensors into their chunks.
    Blocks are taken in the order of what they free, times how long, per second of computing; for how many of
    them the plan of the step is the shortest, simulation says.
    """
    spans = spans_of(trace, calls, copy_bytes_per_second)
    order = _by_value(trace, spans)

    def judge(count: int) -> Judged:
        derived = recomputed(trace, _of_blocks(spans, order[:count]), copy_bytes_per_second)
        try:
            step = choose_plan(Iteration.of_trace(derived, overlap=overlap), machine).simulation
        except OutOfBudgetError:
            return Judged(_NEVER, _NEVER, moves=True)
        # What is written was copied into its chunk before, as far as it was an activation.
        written = step.link_bytes["d2h"] + step.link_bytes["disk_write"]
        copied = min(written, activation_bytes(derived)) / copy_bytes_per_second
        moving = sum(step.link_seconds.values())
        taken = max(machine.transfers_take, _MOVING) * moving
        return Judged(step.step_seconds + copied + taken, step.step_seconds + copied, moving > 0)

    count, best, without = best_count(judge, len(order))
    worth_it = without.moves and best.cost < (1 - _WORTH_IT) * without.cost and best.seconds < without.seconds
    blocks = frozenset(order[:count]) if worth_it else frozenset()
    taken = _of_blocks(spans, blocks)
    return RecomputeChoice(
        blocks=blocks,
        seconds=best.seconds if blocks else without.seconds,
        seconds_without=without.seconds,
        saved_bytes=sum(span.saved_bytes for span in taken),
        computing_seconds=sum(span.seconds for span in taken),
    )


def _of_blocks(spans: Sequence[Span], blocks: Iterable[int]) -> list[Span]:
    chosen = set(blocks)
    return [span for span in spans if span.call.block in chosen]


def _by_value(trace: Trace, spans: Sequence[Span]) -> list[int]:
    """Return the blocks that would free something, the most bytes times seconds per second of computing
    first."""
    starts = [0.0]
    for seconds in trace.seconds:
        starts.append(starts[-1] + seconds)
    freed: dict[int, float] = {}
    takes: dict[int, float] = {}
    for span in spans:
        block, less = span.call.block, span.saved_bytes - span.call.input_bytes
        freed[block] = freed.get(block, 0.0) + less * (starts[span.first_use] - starts[span.call.end])
        takes[block] = takes.get(block, 0.0) + span.seconds
    worth = [block for block, value in freed.items() if value > 0]
    return sorted(worth, key=lambda block: (-freed[block] / max(takes[block], 1e-9), block))


def best_count(judge: Callable[[int], Judged], most: int) -> tuple[int, Judged, Judged]:
    """Return the best number of blocks, and what was judged of it and of none: some evenly spaced numbers
    first, then those between the neighbours of the best, by halves. Of numbers that are nearly as good it is
    the least: what computing again takes besides, no trace has shown."""
    judged = {count: judge(count) for count in sorted({most * step // _GRID for step in range(_GRID + 1)})}

    def best() -> int:
        return min(judged, key=lambda count: (judged[count].cost, count))

    stride = max(1, most // _GRID)
    while stride:
        before = best()
        for count in (before - stride, before + stride):
            if 0 <= count <= most and count not in judged:
                judged[count] = judge(count)
        if best() == before:  # a better one may have a better neighbour yet
            stride //= 2
    nearly = (1 + _WORTH_IT) * judged[best()].cost
    chosen = min(count for count in judged if judged[count].cost <= nearly)
    return chosen, judged[chosen], judged[0]
