"""Chooses the blocks that recompute their activations in backward instead of keeping them in chunks.

The trace of a step that puts all saved tensors into chunks is transformed into the step that recomputes some
blocks. Both are planned and simulated like any step. See docs/notes/activations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gemini.errors import OutOfBudgetError
from gemini.memstats import Trace
from gemini.memstats.trace import READ, WRITTEN
from gemini.placement.planner import choose_plan
from gemini.placement.problem import Iteration, Machine
from gemini.system.config import format_bytes

_FORWARD, _BACKWARD = "forward", "backward"
_ACTIVATION = "activation"


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in forward: the moments ``[begin, end)`` of the trace, and the bytes of its
    inputs."""

    block: int
    begin: int
    end: int
    input_bytes: int


class Lifetime(NamedTuple):
    """A saved tensor in a chunk: the moment that stores it, the moments that use it, and the period that
    frees it."""

    chunk: int
    stored: int
    uses: tuple[int, ...]
    freed: int


@dataclass(frozen=True)
class BlockSpan:
    """A call with its saved tensors, the first backward moment that uses one of them, their bytes, and the
    computing seconds of the call if it saved nothing.

    ``hindered_seconds``: the rest of the call's time, besides computing and copies into chunks: saved tensors
    had to be evicted, and new memory was touched.
    """

    call: BlockCall
    lifetimes: tuple[Lifetime, ...]
    first_use: int
    saved_bytes: int
    seconds: float
    hindered_seconds: float = 0.0


def spans_of(trace: Trace, calls: Sequence[BlockCall], copy_bytes_per_second: float) -> list[BlockSpan]:
    """Return the calls with saved tensors that are used afterwards.

    The fastest of equal calls gives the computing time of all.
    """
    lifetimes = _lifetimes(trace)
    spans = []
    for call in calls:
        mine = [
            one
            for one in lifetimes
            if call.begin <= one.stored < call.end and any(u >= call.end for u in one.uses)
        ]
        if not mine:
            continue
        nbytes = sum(trace.chunk_bytes[one.chunk] for one in mine)
        seconds = sum(trace.seconds[call.begin : call.end]) - nbytes / copy_bytes_per_second
        first = min(use for one in mine for use in one.uses if use >= call.end)
        spans.append(BlockSpan(call, tuple(mine), first, nbytes, max(0.0, seconds)))
    least: dict[tuple[int, ...], float] = {}
    kinds = [_kind(trace, span) for span in spans]
    for kind, span in zip(kinds, spans, strict=True):
        least[kind] = min(span.seconds, least.get(kind, span.seconds))
    return [
        replace(span, seconds=least[kind], hindered_seconds=span.seconds - least[kind])
        for kind, span in zip(kinds, spans, strict=True)
    ]


def _kind(trace: Trace, span: BlockSpan) -> tuple[int, ...]:
    """Return a key that is equal for equal calls: moments, input bytes, and the bytes of every saved
    tensor."""
    saved = (trace.chunk_bytes[one.chunk] for one in span.lifetimes)
    return span.call.end - span.call.begin, span.call.input_bytes, *saved


def recomputed(trace: Trace, spans: Sequence[BlockSpan], copy_bytes_per_second: float) -> Trace:
    """Return the step in which the calls of ``spans`` save only their inputs, and compute again right before
    the first backward moment that needs their saved tensors.

    Recomputed tensors are non-model memory until backward is done with them. Copies into chunks take no time
    in the result, for these calls and for others: tensors that never leave DEVICE need not be copied. The
    hindered time of ``spans`` is left out, too.
    """
    return _Derivation(trace, spans, copy_bytes_per_second).result()


def activation_bytes(trace: Trace) -> int:
    """Return the bytes that a step puts into chunks of activations."""
    return sum(
        trace.chunk_bytes[chunk]
        for chunks, modes in zip(trace.accesses, trace.modes, strict=True)
        for chunk, mode in zip(chunks, modes, strict=True)
        if mode == WRITTEN and trace.chunk_kinds[chunk] == _ACTIVATION
    )


def _lifetimes(trace: Trace) -> list[Lifetime]:
    """Return the lifetime of every stored tensor that is freed again."""
    found: list[Lifetime] = []
    open_: dict[int, tuple[int, list[int]]] = {}
    for moment, (chunks, modes) in enumerate(zip(trace.accesses, trace.modes, strict=True)):
        for chunk, mode in zip(chunks, modes, strict=True):
            if trace.chunk_kinds[chunk] != _ACTIVATION:
                continue
            if mode == WRITTEN:
                open_[chunk] = (moment, [])
            elif chunk in open_:
                open_[chunk][1].append(moment)
        for chunk in trace.frees[moment]:
            if chunk in open_:
                stored, uses = open_.pop(chunk)
                found.append(Lifetime(chunk, stored, tuple(uses), moment))
    return found


class _Moment(NamedTuple):
    accesses: tuple[int, ...]
    modes: str
    frees: tuple[int, ...]
    seconds: float
    non_model_bytes: int
    phase: str


class _Derivation:
    """Builds the moments of the derived step, in order."""

    def __init__(self, trace: Trace, spans: Sequence[BlockSpan], copy_bytes_per_second: float) -> None:
        self._trace = trace
        self._spans = spans
        self._copy_speed = copy_bytes_per_second
        count = trace.num_moments
        self._dropped: list[set[int]] = [set() for _ in range(count)]  # accesses to leave out
        self._unfreed: list[set[int]] = [set() for _ in range(count)]  # frees to leave out
        self._more_bytes = [0] * count  # non-model memory of recomputed tensors
        self._share = [1.0] * count  # computing share of a moment's seconds
        self._inputs_freed: list[list[int]] = [[] for _ in range(count)]
        for number, span in enumerate(spans):
            self._drop(span, len(trace.chunk_bytes) + number)
        self._moments: list[_Moment] = []

    def result(self) -> Trace:
        """Return the trace of the derived step."""
        trace = self._trace
        first = len(trace.chunk_bytes)
        stored_at = {span.call.begin: first + number for number, span in enumerate(self._spans)}
        again_at: dict[int, list[tuple[BlockSpan, int]]] = {}
        for number, span in enumerate(self._spans):
            again_at.setdefault(span.first_use, []).append((span, first + number))
        for moment in range(trace.num_moments):
            if moment in stored_at:
                self._insert((stored_at[moment],), WRITTEN, _FORWARD, 0.0, trace.non_model_bytes[moment])
            for span, chunk in again_at.get(moment, ()):
                self._compute_again(span, chunk)
            self._copy_moment(moment)
        moments = self._moments
        return replace(
            trace,
            accesses=tuple(one.accesses for one in moments),
            modes=tuple(one.modes for one in moments),
            frees=tuple(one.frees for one in moments),
            seconds=tuple(one.seconds for one in moments),
            non_model_bytes=tuple(one.non_model_bytes for one in moments),
            phases=tuple(one.phase for one in moments),
            chunk_bytes=trace.chunk_bytes + tuple(max(1, span.call.input_bytes) for span in self._spans),
            chunk_kinds=trace.chunk_kinds + (_ACTIVATION,) * len(self._spans),
        )

    def _drop(self, span: BlockSpan, input_chunk: int) -> None:
        last = span.first_use
        if span.hindered_seconds > 0:
            share = span.seconds / (span.seconds + span.hindered_seconds)
            self._share[span.call.begin : span.call.end] = [share] * (span.call.end - span.call.begin)
        for one in span.lifetimes:
            self._dropped[one.stored].add(one.chunk)
            for use in one.uses:
                self._dropped[use].add(one.chunk)
            self._unfreed[one.freed].add(one.chunk)
            for moment in range(span.first_use, one.freed + 1):
                self._more_bytes[moment] += self._trace.chunk_bytes[one.chunk]
            last = max(last, one.freed)
        self._inputs_freed[last].append(input_chunk)

    def _compute_again(self, span: BlockSpan, input_chunk: int) -> None:
        """Insert the moments of the recomputed call, which fetch its input and its weights again."""
        trace, call = self._trace, span.call
        around = self._reserve(span.first_use) - span.saved_bytes
        self._insert((input_chunk,), READ, _BACKWARD, 0.0, around)
        made = 0
        for moment in range(call.begin, call.end):
            made += sum(trace.chunk_bytes[one.chunk] for one in span.lifetimes if one.stored == moment)
            weights = [
                (chunk, mode) for chunk, mode in self._kept(moment) if trace.chunk_kinds[chunk] != _ACTIVATION
            ]
            reserve = max(around, trace.non_model_bytes[moment]) + made
            if weights:
                chunks = tuple(chunk for chunk, _ in weights)
                modes = "".join(mode for _, mode in weights)
                self._insert(chunks, modes, _BACKWARD, self._seconds(moment), reserve)
            else:
                self._lend((), self._seconds(moment), reserve)

    def _copy_moment(self, moment: int) -> None:
        """Copy a moment; if none of its accesses remain, its time is added to the previous moment."""
        trace = self._trace
        kept = self._kept(moment)
        frees = sorted({*trace.frees[moment]} - self._unfreed[moment] | {*self._inputs_freed[moment]})
        reserve = self._reserve(moment)
        if trace.accesses[moment] and not kept and self._moments:
            self._lend(frees, self._seconds(moment), reserve)
            return
        self._moments.append(
            _Moment(
                tuple(chunk for chunk, _ in kept),
                "".join(mode for _, mode in kept),
                tuple(frees),
                self._seconds(moment),
                reserve,
                trace.phases[moment],
            )
        )

    def _lend(self, frees: Sequence[int], seconds: float, reserve: int) -> None:
        """Extend the last moment's period."""
        before = self._moments[-1]
        self._moments[-1] = before._replace(
            frees=tuple(sorted({*before.frees, *frees})),
            seconds=before.seconds + seconds,
            non_model_bytes=max(before.non_model_bytes, reserve),
        )

    def _insert(self, chunks: tuple[int, ...], modes: str, phase: str, seconds: float, reserve: int) -> None:
        self._moments.append(_Moment(chunks, modes, (), seconds, reserve, phase))

    def _kept(self, moment: int) -> list[tuple[int, str]]:
        pairs = zip(self._trace.accesses[moment], self._trace.modes[moment], strict=True)
        return [(chunk, mode) for chunk, mode in pairs if chunk not in self._dropped[moment]]

    def _reserve(self, moment: int) -> int:
        return self._trace.non_model_bytes[moment] + self._more_bytes[moment]

    def _seconds(self, moment: int) -> float:
        """Return the computing time of the period, without copies into chunks and hindered time."""
        trace = self._trace
        copied = sum(
            trace.chunk_bytes[chunk]
            for chunk, mode in zip(trace.accesses[moment], trace.modes[moment], strict=True)
            if mode == WRITTEN and trace.chunk_kinds[chunk] == _ACTIVATION
        )
        return self._share[moment] * max(0.0, trace.seconds[moment] - copied / self._copy_speed)


_WORTH_IT = 0.02  # recomputing must save this share of a step, because the times are measured
_MOVING = 1e-3  # least weight of a busy link second, as in planner.py
_GRID = 4  # evenly spaced numbers of blocks to try first, besides 0
_NEVER = float("inf")


@dataclass(frozen=True)
class RecomputeChoice:
    """The blocks to recompute, and the seconds of a step with and without it, both as planned and including
    the copies into chunks of tensors that leave DEVICE.

    ``saved_bytes``: bytes that these blocks no longer save in a step. ``computing_seconds``: the time of
    recomputing them.
    """

    blocks: frozenset[int]
    seconds: float
    seconds_without: float
    saved_bytes: int
    computing_seconds: float


NOTHING = RecomputeChoice(frozenset(), 0.0, 0.0, 0, 0.0)


@dataclass(frozen=True)
class RecomputeReport:
    """The decisions about a model's blocks. ``names``: blocks that are recomputed. ``refused``: name and
    reason of those that cannot be. ``num_blocks``: how many exist. ``choice``: None while steps are still
    watched. ``why_none``: why no block is chosen, if none is."""

    names: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    num_blocks: int
    choice: RecomputeChoice | None
    why_none: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
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
    """The simulated step with some number of recomputed blocks."""

    cost: float
    seconds: float
    moves: bool  # whether any transfer occurs


def choose_blocks(
    trace: Trace,
    calls: Sequence[BlockCall],
    machine: Machine,
    *,
    overlap: bool,
    copy_bytes_per_second: float,
) -> RecomputeChoice:
    """Return the blocks to recompute for the shortest simulated step; none if that saves less than 2 % of it,
    or if nothing is transferred, because only transfers can be saved.

    ``trace``: a step in which all activations went into chunks. ``calls``: of the blocks that may be
    recomputed. ``copy_bytes_per_second``: how fast that step copied saved tensors into chunks. Blocks are
    taken in the order of bytes freed, times their duration, per second of computing. Simulation decides how
    many of them give the shortest planned step.
    """
    spans = spans_of(trace, calls, copy_bytes_per_second)
    order = _by_value(trace, spans)

    def judge(count: int) -> Judged:
        derived = recomputed(trace, _of_blocks(spans, order[:count]), copy_bytes_per_second)
        try:
            step = choose_plan(Iteration.of_trace(derived, overlap=overlap), machine).simulation
        except OutOfBudgetError:
            return Judged(_NEVER, _NEVER, moves=True)
        # Written bytes that are activations were copied into chunks before.
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


def _of_blocks(spans: Sequence[BlockSpan], blocks: Iterable[int]) -> list[BlockSpan]:
    chosen = set(blocks)
    return [span for span in spans if span.call.block in chosen]


def _by_value(trace: Trace, spans: Sequence[BlockSpan]) -> list[int]:
    """Return the blocks that would free memory, by descending bytes times seconds freed per second of
    computing."""
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
    """Return the best number of blocks, its judgement, and that of 0 blocks. Tries some evenly spaced numbers
    first, and then neighbours of the best, with halved distances. Among numbers that are nearly as good the
    smallest is chosen, because recomputing has costs that no trace shows."""
    judged = {count: judge(count) for count in sorted({most * step // _GRID for step in range(_GRID + 1)})}

    def best() -> int:
        return min(judged, key=lambda count: (judged[count].cost, count))

    stride = max(1, most // _GRID)
    while stride:
        before = best()
        for count in (before - stride, before + stride):
            if 0 <= count <= most and count not in judged:
                judged[count] = judge(count)
        if best() == before:  # a new best number may have a better neighbour
            stride //= 2
    nearly = (1 + _WORTH_IT) * judged[best()].cost
    chosen = min(count for count in judged if judged[count].cost <= nearly)
    return chosen, judged[chosen], judged[0]
