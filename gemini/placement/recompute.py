"""Which blocks compute their activations a second time, in backward, instead of keeping them in chunks.

From the trace of a step that puts everything which autograd saves into chunks, the step is derived that
recomputes some blocks. Both are planned and simulated as steps are. See docs/notes/activations.md.
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
    """A saved tensor in a chunk: the moment that stores it, those that use it, the period that frees it."""

    chunk: int
    stored: int
    uses: tuple[int, ...]
    freed: int


@dataclass(frozen=True)
class BlockSpan:
    """A call, what it saves, the first moment of backward that uses any of it, and the seconds that the
    call computes where it saves nothing.

    ``hindered_seconds``: what the call took beyond that and beyond copying into chunks, for what it saved had
    to leave memory, and fresh memory to come.
    """

    call: BlockCall
    lifetimes: tuple[Lifetime, ...]
    first_use: int
    saved_bytes: int
    seconds: float
    hindered_seconds: float = 0.0


def spans_of(trace: Trace, calls: Sequence[BlockCall], copy_bytes_per_second: float) -> list[BlockSpan]:
    """Return the calls that save something which is used afterwards.

    Of calls that are alike the fastest says what they all compute.
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
    """Return what is equal for calls that are alike: moments, input, and every saved tensor's bytes."""
    saved = (trace.chunk_bytes[one.chunk] for one in span.lifetimes)
    return span.call.end - span.call.begin, span.call.input_bytes, *saved


def recomputed(trace: Trace, spans: Sequence[BlockSpan], copy_bytes_per_second: float) -> Trace:
    """Return the step in which the calls of ``spans`` save nothing but their inputs, and compute again right
    before backward first needs what they would have saved.

    What was computed again is non-model memory until backward is done with it. Copies into chunks take no
    time in the result, be they of these calls or of others: what never leaves DEVICE need not be copied. Nor
    does what hindered the calls of ``spans``.
    """
    return _Derivation(trace, spans, copy_bytes_per_second).result()


def activation_bytes(trace: Trace) -> int:
    """Return what a step puts into chunks of activations."""
    return sum(
        trace.chunk_bytes[chunk]
        for chunks, modes in zip(trace.accesses, trace.modes, strict=True)
        for chunk, mode in zip(chunks, modes, strict=True)
        if mode == WRITTEN and trace.chunk_kinds[chunk] == _ACTIVATION
    )


def _lifetimes(trace: Trace) -> list[Lifetime]:
    """Return every stretch from a store to the period that frees the chunk again."""
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
    """Makes the moments of the derived step, in order."""

    def __init__(self, trace: Trace, spans: Sequence[BlockSpan], copy_bytes_per_second: float) -> None:
        self._trace = trace
        self._spans = spans
        self._copy_speed = copy_bytes_per_second
        count = trace.num_moments
        self._dropped: list[set[int]] = [set() for _ in range(count)]  # accesses that do not occur
        self._unfreed: list[set[int]] = [set() for _ in range(count)]  # frees that do not
        self._more_bytes = [0] * count  # non-model memory that was computed again
        self._share = [1.0] * count  # of its seconds that a moment computes
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
        """Insert the moments of the call, which fetch its input and its weights again."""
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
        """Take over a moment; one whose accesses are all gone lends its time to the one before."""
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
        """Make the last moment's period longer."""
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
        """Return what the period computes, without what it copies into chunks and what hinders it."""
        trace = self._trace
        copied = sum(
            trace.chunk_bytes[chunk]
            for chunk, mode in zip(trace.accesses[moment], trace.modes[moment], strict=True)
            if mode == WRITTEN and trace.chunk_kinds[chunk] == _ACTIVATION
        )
        return self._share[moment] * max(0.0, trace.seconds[moment] - copied / self._copy_speed)


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
    """What happened to a model's blocks. ``names``: those that are recomputed; ``refused``: name and
    reason of those that cannot be; ``num_blocks``: how many there are; ``choice``: None while steps are still
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


def _of_blocks(spans: Sequence[BlockSpan], blocks: Iterable[int]) -> list[BlockSpan]:
    chosen = set(blocks)
    return [span for span in spans if span.call.block in chosen]


def _by_value(trace: Trace, spans: Sequence[BlockSpan]) -> list[int]:
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
