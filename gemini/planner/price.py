"""Price: how long a step of one combination takes, and what each rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from gemini.parallel.layout_plan import DataCut, model_bytes
from gemini.parallel.pipeline.layers import partition_balanced
from gemini.parallel.pipeline.orders import Kind, Order, Simulated, make_order, simulate_actions
from gemini.planner.chunks import Capacity, ChunkSizes
from gemini.planner.figures import Figures, Speeds
from gemini.planner.records import ParameterSize, Part
from gemini.planner.space import Combination

# Of a part and its parameters by name, cut over so many ranks; None: not known yet, and taken for the least.
ChunksOf = Callable[[Part, frozenset[str], int], ChunkSizes | None]
FiguresOf = Callable[[Part, int], tuple[Figures, ...]]
Ranges = tuple[tuple[int, int], ...]  # the segments of each stage


@dataclass(frozen=True)
class RankPrice:
    """A rank along ``pp``. ``device_bytes``: the most at a time; ``lower_bytes``: of model data below
    DEVICE."""

    device_bytes: int
    lower_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class Price:
    """A step of ``step_seconds``. ``seconds``: of the busiest rank, by resource: computing, Adam, idle, each
    axis, transfers. ``begins``: blocks with which stages begin, but the first."""

    combination: Combination
    step_seconds: float
    seconds: dict[str, float]
    ranks: tuple[RankPrice, ...]
    begins: tuple[int, ...]
    sent_bytes: dict[str, int]


@dataclass(frozen=True)
class Misfit:
    """A combination that does not fit: a rank needs ``needed_bytes`` of ``tier``, and has ``given_bytes``."""

    combination: Combination
    rank: int
    tier: str
    needed_bytes: int
    given_bytes: int

    @property
    def missing_bytes(self) -> int:
        """How much more would do."""
        return self.needed_bytes - self.given_bytes


class Pricer:
    """Prices combinations of one model on one machine. What several have in common is computed once."""

    def __init__(
        self,
        speeds: Speeds,
        capacity: Capacity,
        figures_of: FiguresOf,
        chunks_of: ChunksOf = lambda *_: None,
    ) -> None:
        self.speeds, self.capacity = speeds, capacity
        self.chunks_of = cache(chunks_of)
        self.figures_of = cache(figures_of)
        self.ranges = cache(self._ranges)
        self.clock = cache(self._clock)
        self.total = cache(self._total)

    def least_seconds(self, choice: Combination) -> float:
        """Return what a step takes at least: with ranks that are never idle and exchange nothing."""
        recompute = choice.recompute
        total = self.total(choice.part, choice.microbatch_size, recompute)
        return total * choice.num_microbatches / choice.layout.pp

    def price(self, choice: Combination) -> Price | Misfit:
        """Return what a step takes, or why it does not fit."""
        return _Pricing(self, choice).result()

    def _total(self, part: Part, samples: int, recompute: str) -> float:
        figures = self.figures_of(part, samples)
        again = _recomputed(recompute, len(figures))
        return sum(_seconds(each, again=at in again) for at, each in enumerate(figures))

    def _ranges(self, part: Part, samples: int, recompute: str, num_stages: int) -> Ranges:
        """Return the segments of each stage such that the longest takes as little as can be."""
        figures = self.figures_of(part, samples)
        if num_stages == 1:
            return ((0, len(figures)),)
        again = _recomputed(recompute, len(figures))
        takes = [_seconds(each, again=at in again) for at, each in enumerate(figures)]
        blocks = takes[1:-1]
        blocks[0] += takes[0]
        blocks[-1] += takes[-1]
        return tuple(
            (0 if a == 0 else a + 1, b + 2 if b == len(blocks) else b + 1)
            for a, b in partition_balanced(blocks, num_stages)
        )

    def _clock(
        self, part: Part, samples: int, recompute: str, order_of: tuple[str, int, int, int], copies: int
    ) -> Simulated:
        """Simulate the micro-batches. ``copies``: over how many ranks chunks are cut, which every pass
        gathers; 0: there are no chunks."""
        order, figures = make_order(*order_of), self.figures_of(part, samples)
        again, ranges = (
            _recomputed(recompute, len(figures)),
            self.ranges(part, samples, recompute, order_of[1] * order_of[3]),
        )
        takes: dict[tuple[Kind, int], float] = {}
        for stage, (first, last) in enumerate(ranges):
            gathers = _gathered(order_of[2]) * self.gather_seconds(figures[first:last], copies)
            forward = gathers + sum(each.forward_seconds for each in figures[first:last])
            backward = gathers + sum(each.backward_seconds for each in figures[first:last])
            backward += sum(figures[at].forward_seconds for at in range(first, last) if at in again)
            # A chunk takes every gradient; without chunks the first of a step is taken as it is.
            added = 1.0 if copies else 1 - 1 / order_of[2]
            backward += added * self.pass_seconds(_trained(figures[first:last]))
            takes[Kind.FORWARD, stage], takes[Kind.BACKWARD, stage] = forward, backward
            takes[Kind.INPUT, stage] = takes[Kind.WEIGHT, stage] = backward / 2
        passed = max((figures[first].input_bytes for first, _ in ranges[1:]), default=0)
        transfer = self.speeds.collective("send", 2, passed) if passed else 0.0
        return simulate_actions(order, lambda action: takes[action.kind, action.stage], transfer)

    def pass_seconds(self, numel: int) -> float:
        """Return how long it takes to copy, or add, fp32 gradients of so many elements."""
        return 3 * 4 * numel / self.speeds.machine.memory_bytes_per_second

    def gather_seconds(self, figures: Sequence[Figures], copies: int) -> float:
        """Return what a rank loses while chunks become whole once: each is gathered beside operators, after a
        round in which ranks agree."""
        if copies <= 1:
            return 0.0
        sizes = [sum(each.numel * each.itemsize for each in segment.parameters) for segment in figures]
        agreed = self.speeds.collective("all_gather", copies, _ROUND_BYTES)
        beside = self.speeds.beside_computing
        return sum(agreed + beside("all_gather", copies, size / copies) for size in sizes if size)


def _trained(figures: Iterable[Figures]) -> int:
    """Return how many elements of parameters train."""
    return sum(each.numel for segment in figures for each in segment.parameters if each.trains)


_ROUND_BYTES = 64  # about what ranks tell each other before they gather a chunk
_STAY_WHOLE = 0.5  # of the chunks at the end of a pass; the next pass begins with them


def _gathered(num_microbatches: int) -> float:
    """Return how often chunks are gathered in a pass of a step, in which the first one finds none whole."""
    passes = 2 * num_microbatches
    return (1 + (passes - 1) * (1 - _STAY_WHOLE)) / passes


def _seconds(figures: Figures, *, again: bool) -> float:
    return figures.forward_seconds * (2 if again else 1) + figures.backward_seconds


@cache
def _recomputed(recompute: str, num_segments: int) -> frozenset[int]:
    """Return which segments compute their forward again."""
    return frozenset(at + 1 for at in recomputed_blocks(recompute, num_segments - 2))


def recomputed_blocks(recompute: str, count: int) -> tuple[int, ...]:
    """Return which of ``count`` blocks recompute: every second one for a half."""
    steps = {"none": 0, "half": 2, "all": 1}[recompute]
    return tuple(range(0, count, steps)) if steps else ()


@cache
def _under_way(order_of: tuple[str, int, int, int], rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return what a rank holds at the moments at which that is most: which of its stages runs, and of how
    many other micro-batches it holds the activations, by stage."""
    order = make_order(*order_of)
    stages = order.stages_of(rank)
    counts = [0] * len(stages)
    seen = set()
    for action in order.by_rank[rank]:
        at = stages.index(action.stage)
        if action.kind is not Kind.FORWARD:
            counts[at] -= 1
        seen.add((at, tuple(counts)))
        if action.kind in (Kind.FORWARD, Kind.INPUT):
            counts[at] += 1
    return tuple(one for one in seen if not any(one != other and _is_more(other, one) for other in seen))


def _is_more(one: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> bool:
    return one[0] == other[0] and all(a >= b for a, b in zip(one[1], other[1], strict=True))


class _Pricing:
    """One combination while it is priced."""

    def __init__(self, pricer: Pricer, choice: Combination) -> None:
        self._pricer, self._choice = pricer, choice
        key = (choice.part, choice.microbatch_size)
        self._figures = pricer.figures_of(*key)
        self._order_of = choice.schedule, choice.layout.pp, choice.num_microbatches, choice.stages_per_rank
        self._order: Order = make_order(*self._order_of)
        self._ranges = pricer.ranges(*key, choice.recompute, self._order.num_stages)
        self._again = _recomputed(choice.recompute, len(self._figures))
        self._copies = choice.layout.dp * choice.layout.sp

    def result(self) -> Price | Misfit:
        """Return the price, or the rank that lacks most."""
        held = [self._rank(rank) for rank in range(self._choice.layout.pp)]
        misfits = [each for each in held if isinstance(each, Misfit)]
        if misfits:
            return max(misfits, key=lambda each: each.missing_bytes)
        return self._timed([each for each in held if isinstance(each, RankPrice)])

    def _segments(self, rank: int) -> Iterator[tuple[int, Figures]]:
        for stage in self._order.stages_of(rank):
            for at in range(*self._ranges[stage]):
                yield at, self._figures[at]

    def _parameters(self, rank: int) -> list[ParameterSize]:
        """Return the parameters of a rank, tied ones once."""
        return list({p.key: p for _, segment in self._segments(rank) for p in segment.parameters}.values())

    # -- bytes -----------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankPrice | Misfit:
        """Return what a rank holds. Chunks of ZeRO 3 lie below DEVICE as far as they must and may."""
        choice, capacity = self._choice, self._pricer.capacity
        sizes = ((each.numel, each.itemsize, each.trains) for each in self._parameters(rank))
        cut = DataCut(self._copies, choice.zero_stage, choice.num_microbatches)
        parameters, gradients, states = model_bytes(sizes, cut)
        activations = self._activations(rank)
        chunks = self._chunks(rank, parameters + gradients + states)
        needed, lower = activations + chunks.total_bytes, 0
        if choice.uses_lower:
            most = max(chunks.total_bytes - chunks.working_bytes, 0)
            lower = max(min(needed - capacity.device_bytes, most), 0)
            if lower > capacity.lower_bytes:
                return Misfit(choice, rank, "HOST and DISK", lower, capacity.lower_bytes)
        if needed - lower > capacity.device_bytes:
            return Misfit(choice, rank, "DEVICE", needed - lower, capacity.device_bytes)
        return RankPrice(needed - lower, lower, parameters, gradients, states, activations)

    def _chunks(self, rank: int, model_bytes: int) -> ChunkSizes:
        """Return what a rank holds of model data: with ZeRO 3 in chunks, some of which are whole at times."""
        found = None
        if self._choice.zero_stage == 3:
            names = frozenset(each.key for each in self._parameters(rank))
            found = self._pricer.chunks_of(self._choice.part, names, self._copies)
        return found or ChunkSizes(model_bytes, self._working_bytes(rank))

    def _working_bytes(self, rank: int) -> int:
        """Return the most model data that an operator, or the update of its weights, has on DEVICE at once:
        weight, gradient and two moments of the largest parameter."""
        return max((4 * each.numel * max(each.itemsize, 4) for each in self._parameters(rank)), default=0)

    def _activations(self, rank: int) -> int:
        """Return the most non-model data: of micro-batches under way, and of what runs."""
        ranges = [self._ranges[stage] for stage in self._order.stages_of(rank)]
        kept = [self._kept(*each) for each in ranges]
        inner = [self._inner(*each) for each in ranges]
        return ceil(
            max(
                inner[at] + sum(a * b for a, b in zip(counts, kept, strict=True))
                for at, counts in _under_way(self._order_of, rank)
            )
        )

    def _kept_of(self, at: int) -> float:
        return self._figures[at].input_bytes if at in self._again else self._figures[at].kept_bytes

    def _kept(self, first: int, last: int) -> float:
        """Return what a stage leaves of one micro-batch, its input from another rank included."""
        received = self._figures[first].input_bytes if first else 0
        return received + sum(self._kept_of(at) for at in range(first, last))

    def _inner(self, first: int, last: int) -> float:
        """Return the most that a stage holds while it runs one micro-batch."""
        held, most = self._figures[first].input_bytes if first else 0, 0.0
        for at in range(first, last):
            most = max(most, held + self._figures[at].peak_bytes)
            held += self._kept_of(at)
        return most

    # -- seconds ---------------------------------------------------------------------------------

    def _timed(self, ranks: Sequence[RankPrice]) -> Price:
        choice, pricer = self._choice, self._pricer
        gathered = self._copies if choice.zero_stage == 3 else 0
        clock = pricer.clock(choice.part, choice.microbatch_size, choice.recompute, self._order_of, gathered)
        exchanges, updates = zip(
            *((self._exchange(r), self._update(r)) for r in range(len(ranks))), strict=True
        )
        waits = [self._transfers(each, clock.busy[rank] + updates[rank]) for rank, each in enumerate(ranks)]
        tails = [sum(each) for each in zip(exchanges, updates, waits, strict=True)]
        busiest = max(range(len(ranks)), key=lambda rank: clock.busy[rank])
        messages = {axis: self._messages(axis, busiest) for axis in ("tp", "sp")}
        gathers = self._gathers(busiest)
        seconds = {
            "compute": clock.busy[busiest] - sum(messages.values()) - gathers,
            **messages,
            "dp": exchanges[busiest] + gathers,
            "Adam": updates[busiest],
            "transfers": waits[busiest],
            "idle": clock.seconds - clock.busy[busiest],
        }
        return Price(
            choice,
            clock.seconds + max(tails),
            {name: value for name, value in seconds.items() if value > 0},
            tuple(ranks),
            tuple(first - 1 for first, _ in self._ranges[1:]),
            self._sent(busiest),
        )

    def _messages(self, axis: str, rank: int) -> float:
        """Return how long a rank spends on messages of tp or sp in a step."""
        each = 0.0
        for at, figures in self._segments(rank):
            forward = figures.forward_messages.get(axis, 0.0)
            each += forward * (2 if at in self._again else 1) + figures.backward_messages.get(axis, 0.0)
        return each * self._choice.num_microbatches

    def _gathers(self, rank: int) -> float:
        """Return how long a rank gathers chunks in a step: for every forward and backward pass."""
        copies = self._copies if self._choice.zero_stage == 3 else 0
        once = self._pricer.gather_seconds([each for _, each in self._segments(rank)], copies)
        passes = 2 * self._choice.num_microbatches
        return passes * _gathered(self._choice.num_microbatches) * once

    def _exchange(self, rank: int) -> float:
        """Return how long gradients, and updated weights, take among data ranks at the end of a step."""
        if self._copies == 1:
            return 0.0
        speeds, stage, total = self._pricer.speeds, self._choice.zero_stage, 0.0
        for _, segment in self._segments(rank):
            trained = [each for each in segment.parameters if each.trains]
            wide = sum(each.numel * max(each.itemsize, 4) for each in trained)
            if not wide:
                continue
            # Gradients go while backward computes more of them; weights come when nothing is computed.
            total += speeds.beside_computing("all_to_all", self._copies, wide)
            if stage < 3:
                own = wide if stage == 0 else sum(each.numel * each.itemsize for each in trained)
                total += speeds.collective("all_gather", self._copies, own / self._copies)
        return total

    def _update(self, rank: int) -> float:
        """Return how long Adam takes over a rank's states."""
        copies = 1 if self._choice.zero_stage == 0 else self._copies
        nbytes = 0
        for each in self._parameters(rank):
            if each.trains:
                weights = each.itemsize * (2 if each.itemsize < 4 else 1)
                nbytes += ceil(each.numel / copies) * (24 + weights)
        # Chunks hand their gradients over once; buckets are filled, and what comes back is copied.
        passes = 1 if self._choice.zero_stage == 3 else 2 if self._copies > 1 else 0
        copied = passes * self._pricer.pass_seconds(_trained(each for _, each in self._segments(rank)))
        return copied + nbytes / self._pricer.speeds.machine.adam_bytes_per_second

    def _transfers(self, rank: RankPrice, hidden: float) -> float:
        """Return how long transfers take beyond the ``hidden`` seconds in which a rank computes. Weights come
        for every pass; states and gradients come and go once. The busiest link counts."""
        if rank.lower_bytes == 0:
            return 0.0
        links = {each.name: each for each in self._pricer.speeds.machine.links}
        once = rank.state_bytes + rank.gradient_bytes
        share = rank.lower_bytes / (rank.parameter_bytes + once)
        up = share * (2 * self._choice.num_microbatches * rank.parameter_bytes + once)
        down = share * (rank.parameter_bytes + once)
        on_disk = max(rank.lower_bytes - self._pricer.capacity.host_bytes, 0) / rank.lower_bytes
        moved = {
            "h2d": up * (1 - on_disk),
            "d2h": down * (1 - on_disk),
            "disk_read": up * on_disk,
            "disk_write": down * on_disk,
        }
        busy = [links[name].seconds(ceil(nbytes)) for name, nbytes in moved.items() if nbytes]
        return max(0.0, max(busy) - hidden)

    def _sent(self, rank: int) -> dict[str, int]:
        """Return what a rank sends along tp and sp in a step."""
        found: Counter[str] = Counter()
        for _, segment in self._segments(rank):
            found.update({axis: round(nbytes) for axis, nbytes in segment.sent_bytes.items()})
        return {axis: nbytes * self._choice.num_microbatches for axis, nbytes in found.items()}
