"""Prices a combination: the seconds of a step, and the memory of each rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from math import ceil

from gemini.errors import OutOfBudgetError
from gemini.memstats.trace import Trace
from gemini.parallel.layout_plan import DataCut, model_bytes
from gemini.parallel.pipeline.layers import partition_balanced
from gemini.parallel.pipeline.orders import SCHEDULES, Kind, Order, Simulated, make_order, simulate_actions
from gemini.parallel.zero.reducer import MAX_FLIGHTS
from gemini.planner.chunks import ChunkSizes, ChunkTable, StageCapacity
from gemini.planner.exchanges import (
    Gathers,
    GradientBucket,
    buckets_of,
    chunks_of,
    exchange_seconds,
    kept_share,
    whole_sizes,
)
from gemini.planner.prices import Misfit, Price, RankPrice, is_better
from gemini.planner.recomputation import (
    Groups,
    Held,
    OrderOf,
    UnderWay,
    again,
    alone,
    even_groups,
    groups_of,
    held_at_most,
    least_again,
    passing_bytes,
    rotor_of,
    under_way,
)
from gemini.planner.records import ParameterSize, Part
from gemini.planner.rotor import Rotor, blocks_of
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.planner.space import ALL, AS_NEEDED, FIT, HALF, NONE, ROTOR, Combination
from gemini.planner.stage_cuts import Ranges, StageRooms, fitting_ranges
from gemini.planner.tiers import (
    StagePasses,
    Transfers,
    least_busy_seconds,
    least_device_bytes,
    trace_of,
)
from gemini.runtime.activation.activations import SLACK_SHARE

# (part, names of parameters, number of ranks that divide them) -> sizes of chunks. None: not known, and a
# lower bound of the bytes is assumed.
ChunksOf = Callable[[Part, frozenset[str], int], ChunkSizes | None]
CostsOf = Callable[[Part, int], tuple[SegmentCosts, ...]]
Segments = frozenset[int]


class Pricer:
    """Prices combinations of one model on one machine. Results that several combinations share are computed
    once."""

    def __init__(
        self,
        speeds: Speeds,
        capacity: StageCapacity,
        costs_of: CostsOf,
        chunks_of: ChunksOf = lambda *_: None,
    ) -> None:
        self.speeds, self.capacity = speeds, capacity
        self.chunks_of = cache(chunks_of)
        self.costs_of = cache(costs_of)
        self.ranges = cache(self._ranges)
        self.parameters, self.update = cache(self._parameters), cache(self._update)
        self.model_bytes, self.buckets = cache(self._model_bytes), cache(self._buckets)
        self.activations: dict[Hashable, int] = {}  # bytes of a rank; the same for every ZeRO stage
        self.fitted: dict[tuple[Combination, Ranges], Groups] = {}  # blocks that FIT recomputes
        self.takes, self.clock = cache(self._takes), cache(self._clock)
        self.cuts, self.rotor = cache(self._cuts), cache(self._rotor)
        self.total, self.tail = cache(self._total), cache(self._tail)

    def least_seconds(self, choice: Combination) -> float:
        """Return a lower bound for the seconds of a step: ranks along pp are never idle and have equal
        work."""
        copies, zero, pp = choice.layout.dp * choice.layout.sp, choice.zero_stage, choice.layout.pp
        again = recomputed(choice.recompute, len(self.costs_of(choice.part, choice.microbatch_size)))
        total = self.total(choice.part, choice.microbatch_size, again, zero == 3)
        tail = self.tail(choice.part, choice.microbatch_size, copies, zero)
        return (total * choice.num_microbatches + tail) / pp

    def price(self, choice: Combination) -> Price | Misfit:
        """Return the price of a step, or the reason why the combination does not fit."""
        return _Pricing(self, choice).result()

    def _total(self, part: Part, samples: int, again: Segments, has_chunks: bool) -> float:
        """Return the seconds of computing for one micro-batch, summed over all stages."""
        costs = self.costs_of(part, samples)
        looks = sum(self.look_seconds(costs)) if has_chunks else 0.0
        return looks + sum(_seconds(each, again=at in again) for at, each in enumerate(costs))

    def _tail(self, part: Part, samples: int, copies: int, zero_stage: int) -> float:
        """Return the seconds of exchanging gradients and updating weights, summed over all stages."""
        costs = self.costs_of(part, samples)
        whole = ((0, len(costs)),)
        updating = self.update(part, samples, whole, copies, zero_stage)
        messages = self.buckets(part, samples, whole) if zero_stage < 3 else ()
        return exchange_seconds(messages, copies, zero_stage, self.speeds) + updating

    def _ranges(self, part: Part, samples: int, again: Segments, num_stages: int) -> Ranges:
        """Return the segments of each stage such that the slowest stage is as fast as possible."""
        costs = self.costs_of(part, samples)
        if num_stages == 1:
            return ((0, len(costs)),)
        takes = [_seconds(each, again=at in again) for at, each in enumerate(costs)]
        blocks = takes[1:-1]
        blocks[0] += takes[0]
        blocks[-1] += takes[-1]
        return tuple(
            (0 if a == 0 else a + 1, b + 2 if b == len(blocks) else b + 1)
            for a, b in partition_balanced(blocks, num_stages)
        )

    def _cuts(
        self, part: Part, samples: int, again: Segments, recompute: str, rooms: StageRooms
    ) -> Ranges | None:
        return fitting_ranges(self.costs_of(part, samples), again, recompute, rooms)

    def _rotor(self, part: Part, samples: int, first: int, last: int) -> Rotor:
        return rotor_of(self.costs_of(part, samples), first, last)

    def _takes(
        self,
        part: Part,
        samples: int,
        ranges: Ranges,
        groups: Groups,
        order_of: OrderOf,
        gathers: Gathers | None,
    ) -> dict[tuple[Kind, int], float]:
        """Return the seconds of an action, by its kind and stage. ``gathers`` is None if there are no
        chunks."""
        costs, times = self.costs_of(part, samples), again(groups)
        takes: dict[tuple[Kind, int], float] = {}
        for stage, (first, last) in enumerate(ranges):
            own = costs[first:last]
            gathering = gathers.seconds(stage, order_of[2], self.speeds) if gathers else 0.0
            looks = self.look_seconds(own) if gathers else (0.0, 0.0)
            forward = gathering + looks[0] + sum(each.forward_seconds for each in own)
            backward = gathering + looks[1] + sum(each.backward_seconds for each in own)
            backward += sum(times.get(at, 0) * costs[at].forward_seconds for at in range(first, last))
            # Chunks add every gradient; without chunks the first one of a step becomes .grad without an add.
            added = 1.0 if gathers else 1 - 1 / order_of[2]
            backward += added * self.pass_seconds(_trained(own))
            takes[Kind.FORWARD, stage], takes[Kind.BACKWARD, stage] = forward, backward
            takes[Kind.INPUT, stage] = takes[Kind.WEIGHT, stage] = backward / 2
        return takes

    def _clock(
        self,
        part: Part,
        samples: int,
        ranges: Ranges,
        groups: Groups,
        order_of: OrderOf,
        gathers: Gathers | None,
    ) -> Simulated:
        """Simulate the forward and backward passes of all micro-batches in a step."""
        costs = self.costs_of(part, samples)
        takes = self.takes(part, samples, ranges, groups, order_of, gathers)
        passed = max((costs[first].received_bytes for first, _ in ranges[1:]), default=0)
        transfer = self.speeds.collective("send", 2, passed) if passed else 0.0
        return simulate_actions(
            make_order(*order_of), lambda action: takes[action.kind, action.stage], transfer
        )

    def pass_seconds(self, numel: int) -> float:
        """Return the seconds to copy or add fp32 gradients of ``numel`` elements."""
        return 3 * 4 * numel / self.speeds.machine.memory_bytes_per_second

    def look_seconds(self, costs: Sequence[SegmentCosts]) -> tuple[float, float]:
        """Return the seconds of chunk table calls before operators, in forward and in backward."""
        each = self.speeds.machine.moment_seconds
        forward, backward = zip(*(segment.num_moments for segment in costs), strict=True)
        return each * sum(forward), each * sum(backward)

    def _parameters(self, part: Part, samples: int, ranges: Ranges) -> tuple[ParameterSize, ...]:
        costs = self.costs_of(part, samples)
        own = (costs[at] for first, last in ranges for at in range(first, last))
        return tuple({each.key: each for segment in own for each in segment.parameters}.values())

    def _model_bytes(self, part: Part, samples: int, ranges: Ranges, cut: DataCut) -> tuple[int, int, int]:
        sizes = self.parameters(part, samples, ranges)
        return model_bytes(((each.numel, each.itemsize, each.trains) for each in sizes), cut)

    def _update(self, part: Part, samples: int, ranges: Ranges, copies: int, zero_stage: int) -> float:
        """Return the seconds of Adam for a rank with the segments of ``ranges``."""
        parts, nbytes, numel = 1 if zero_stage == 0 else copies, 0, 0
        for each in self.parameters(part, samples, ranges):
            if each.trains:
                weights = each.itemsize * (2 if each.itemsize < 4 else 1)
                nbytes += ceil(each.numel / parts) * (24 + weights)
                numel += each.numel
        # Over several ranks, gradients of chunks are copied once; those of buckets are copied in and out.
        passes = 0 if copies == 1 else 1 if zero_stage == 3 else 2
        return passes * self.pass_seconds(numel) + nbytes / self.speeds.machine.adam_bytes_per_second

    def _buckets(self, part: Part, samples: int, ranges: Ranges) -> tuple[GradientBucket, ...]:
        return buckets_of(self.parameters(part, samples, ranges))


def _trained(costs: Iterable[SegmentCosts]) -> int:
    """Return the number of elements of trainable parameters."""
    return sum(each.numel for segment in costs for each in segment.parameters if each.trains)


def _seconds(costs: SegmentCosts, *, again: bool) -> float:
    return costs.forward_seconds * (2 if again else 1) + costs.backward_seconds


@cache
def recomputed(recompute: str, num_segments: int) -> Segments:
    """Return the segments that are recomputed in any case; HALF means every second block."""
    steps = {NONE: 0, FIT: 0, ROTOR: 0, HALF: 2, ALL: 1}[recompute]
    return frozenset(range(1, num_segments - 1, steps) if steps else ())


_MOST_CUTS = 3  # cuts by memory that are priced after the cut into equally fast stages


class _Pricing:
    """The state of pricing one combination."""

    def __init__(self, pricer: Pricer, choice: Combination) -> None:
        self._pricer, self._choice = pricer, choice
        key = (choice.part, choice.microbatch_size)
        self._costs = pricer.costs_of(*key)
        self._schedule = choice.schedule, choice.layout.pp, choice.num_microbatches, choice.stages_per_rank
        self._order: Order = make_order(*self._schedule)
        self._anyway = recomputed(choice.recompute, len(self._costs))
        self._copies = choice.layout.dp * choice.layout.sp
        self._take(pricer.ranges(*key, self._anyway, self._order.num_stages))

    def _take(self, ranges: Ranges) -> None:
        """Set the segments of each stage, and reset the groups that are recomputed."""
        self._ranges = ranges
        self._order_of: OrderOf = (*self._schedule, self._whole())
        self._order = make_order(*self._order_of)
        self.__dict__.pop("_gathers", None)
        self._recompute(alone(self._anyway))

    def _whole(self) -> tuple[int, ...]:
        """Return the stages that do not split backward, since their blocks recompute by themselves. The
        first stage has no input's half in any case."""
        if not SCHEDULES[self._choice.schedule].splits:
            return ()
        spans = [self._costs[first:last] for first, last in self._ranges]
        return tuple(at for at, own in enumerate(spans) if at and any(each.recomputes for each in own))

    def _recompute(self, groups: Groups) -> None:
        """Set the groups that are recomputed."""
        choice = self._choice
        self._held, self._traces = Held(self._costs, groups), dict[int, Trace]()
        stages = choice.part, choice.microbatch_size, self._ranges, groups, self._order_of
        self._passes_of = (*stages, self._gathers)

    @cached_property
    def _gathers(self) -> Gathers | None:
        """The gathers of forward and backward passes; None without chunks."""
        if self._choice.zero_stage < 3:
            return None
        if self._copies == 1:
            return Gathers(1)
        tables = [self._table(self._order.rank_of[stage]) for stage in range(len(self._ranges))]
        segments = [self._costs[first:last] for first, last in self._ranges]
        sizes = tuple(
            whole_sizes((p for each in own for p in each.parameters), table)
            for own, table in zip(segments, tables, strict=True)
        )
        return Gathers(self._copies, sizes, min(map(kept_share, tables)))

    def _exchanged(self, rank: int) -> tuple[GradientBucket, ...]:
        """Return the messages in which a rank exchanges gradients."""
        if self._choice.zero_stage < 3:
            return self._pricer.buckets(*self._own(rank))
        return chunks_of(self._parameters(rank), self._table(rank))

    def result(self) -> Price | Misfit:
        """Return the price, or the rank that lacks the most bytes.

        Stages are first cut to take equally long. If these do not fit or recompute, cuts by memory are tried,
        and the best result is returned.
        """
        found = last = self._of_ranges()
        lacks = [0] * self._order.num_stages
        for _ in range(_MOST_CUTS):
            ranges = self._cut_for(lacks) if self._may_be_cut(last) else None
            if ranges is None:
                break
            if ranges != self._ranges:
                self._take(ranges)
                last = self._of_ranges()
                found = last if is_better(last, found) else found
            elif isinstance(last, Misfit):
                lacks[last.rank] += last.missing_bytes
            else:
                break
        return found

    def _of_ranges(self) -> Price | Misfit:
        """Return the price with the current cut into stages."""
        if self._choice.recompute in AS_NEEDED:
            self._fit()
        if self._choice.recompute == ROTOR:
            self._group()
        held = [self._rank(rank) for rank in range(self._choice.layout.pp)]
        misfits = [each for each in held if isinstance(each, Misfit)]
        if misfits:
            return max(misfits, key=lambda each: each.missing_bytes)
        return self._timed([each for each in held if isinstance(each, RankPrice)])

    # -- stages ----------------------------------------------------------------------------------

    def _may_be_cut(self, found: Price | Misfit) -> bool:
        """Return whether a cut by memory could be better: each rank has one stage, and there are more blocks
        than stages."""
        stages, blocks = self._order.num_stages, len(self._costs) - 2
        has_one = stages == self._choice.layout.pp and 1 < stages < blocks
        recomputes = self._choice.recompute in AS_NEEDED and bool(self._held.groups)
        return has_one and not self._choice.uses_lower and (isinstance(found, Misfit) or recomputes)

    def _cut_for(self, lacks: Sequence[int]) -> Ranges | None:
        """Return a cut in which each stage fits with ``lacks`` bytes less room than its rank has; None: there
        is none."""
        choice, pricer = self._choice, self._pricer
        key = choice.part, choice.microbatch_size
        cut = DataCut(self._copies, choice.zero_stage, choice.num_microbatches)
        passing = ceil(passing_bytes(self._costs, self._ranges))
        rooms = StageRooms(
            tuple(pricer.capacity.device_bytes - passing - each for each in lacks),
            tuple(
                max(each.counts[0] for each in under_way(self._order_of, rank))
                for rank in range(choice.layout.pp)
            ),
            tuple(sum(pricer.model_bytes(*key, ((at, at + 1),), cut)) for at in range(len(self._costs))),
            choice.num_microbatches,
        )
        return pricer.cuts(*key, self._anyway, choice.recompute, rooms)

    # -- recomputation ---------------------------------------------------------------------------

    def _fit(self) -> None:
        """Recompute as few blocks of each rank as its memory requires. Blocks that free the most bytes per
        second of computing come first."""

        def freed(at: int) -> float:
            costs = self._costs[at]
            return (costs.kept_bytes - costs.input_bytes) / max(costs.forward_seconds, 1e-12)

        known, key = self._pricer.fitted, (replace(self._choice, recompute=FIT), self._ranges)
        if key in known:
            self._recompute(known[key])
            return
        for rank in range(self._choice.layout.pp):
            self._fit_rank(rank, sorted(self._blocks(rank), key=freed, reverse=True))
        known[key] = self._held.groups

    def _fit_rank(self, rank: int, blocks: Sequence[int]) -> None:
        """Recompute the fewest leading ``blocks`` of a rank that make it fit; all of them if it does not
        fit."""
        others = frozenset(self._held.times)

        def fits(count: int) -> bool:
            self._recompute(alone(others | frozenset(blocks[:count])))
            return isinstance(self._rank(rank), RankPrice)

        count = bisect_left(range(len(blocks)), True, key=fits)
        self._recompute(alone(others | frozenset(blocks[:count])))

    def _group(self) -> None:
        """Recompute blocks in groups on the ranks where that is faster, or where nothing else fits."""
        for rank in range(self._choice.layout.pp):
            self._group_rank(rank)

    def _group_rank(self, rank: int) -> None:
        """Recompute the blocks of a rank in groups.

        If single blocks do not fit, the grouping with the least memory decides whether the rank fits. A
        misfit then states the bytes that this grouping lacks.
        """
        costs, blocks = self._costs, self._blocks(rank)
        own = [group for group in self._held.groups if blocks_of(group)[0] in blocks]
        if not own:
            return
        first, last = self._ranges[rank]
        room = self._pricer.capacity.device_bytes - self._chunks(rank).total_bytes
        room -= ceil(passing_bytes(self._costs, self._ranges))
        others = max(each.counts[0] for each in under_way(self._order_of, rank))
        rotor = self._pricer.rotor(self._choice.part, self._choice.microbatch_size, first, last)
        if isinstance(self._rank(rank), RankPrice):
            took = sum(costs[at].forward_seconds for group in own for at in group if isinstance(at, int))
            lacks = Held(costs, ()).kept(first, last) - room / (others + 1)
            fastest = min(costs[at].forward_seconds for at in blocks)
            if took - least_again(costs, blocks, lacks) < fastest:
                return  # grouping cannot save even the fastest block
        else:
            least = partial(held_at_most, costs, (first, last), others)
            self._regroup(rank, min(even_groups(rotor, blocks, first), key=least))
            if isinstance(self._rank(rank), Misfit):
                return
        found = rotor.spread(room, others)
        if found is None:
            return
        before = self._held.groups
        took = self._again_takes()
        self._regroup(rank, tuple(groups_of(found.items, first)))
        if isinstance(self._rank(rank), Misfit) or self._again_takes() >= took:
            self._recompute(before)

    def _regroup(self, rank: int, groups: Groups) -> None:
        """Set the recomputed groups of one rank; other ranks keep theirs."""
        blocks = self._blocks(rank)
        rest = (group for group in self._held.groups if blocks_of(group)[0] not in blocks)
        self._recompute(tuple(sorted((*rest, *groups), key=blocks_of)))

    def _again_takes(self) -> float:
        return sum(count * self._costs[at].forward_seconds for at, count in self._held.times.items())

    def _blocks(self, rank: int) -> list[int]:
        """Return the segments of a rank that are blocks."""
        return [at for at, _ in self._segments(rank) if 0 < at < len(self._costs) - 1]

    def _segments(self, rank: int) -> Iterator[tuple[int, SegmentCosts]]:
        for stage in self._order.stages_of(rank):
            for at in range(*self._ranges[stage]):
                yield at, self._costs[at]

    def _parameters(self, rank: int) -> tuple[ParameterSize, ...]:
        """Return the parameters of a rank; a tied parameter appears once."""
        return self._pricer.parameters(*self._own(rank))

    def _own(self, rank: int) -> tuple[Part, int, Ranges]:
        """Return the arguments that identify the segments of a rank in calls of the pricer."""
        ranges = tuple(self._ranges[stage] for stage in self._order.stages_of(rank))
        return self._choice.part, self._choice.microbatch_size, ranges

    # -- bytes -----------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankPrice | Misfit:
        """Return the bytes on a rank. Chunks of ZeRO 3 lie below DEVICE only if DEVICE is too small and the
        combination permits it."""
        choice, capacity = self._choice, self._pricer.capacity
        parameters, gradients, states = self._model_bytes(rank)
        activations = self._activations(rank)
        chunks = self._chunks(rank)
        exchanging = self._exchanging(rank)
        # The only bucket of a rank is sent when activations are gone.
        beside = activations + (exchanging if len(self._exchanged(rank)) > 1 else 0)
        needed = least = max(beside, exchanging, self._updating(rank)) + chunks.total_bytes
        device_bytes = self._device_bytes
        if choice.uses_lower and needed > device_bytes:
            least = chunks.working_bytes + (self._working(rank) if choice.offloads else activations)
            if chunks.table is not None and self._copies == 1:
                least = least_device_bytes(self._trace(rank, chunks.table))
        if least > device_bytes:
            least += ceil(least / (SLACK_SHARE - 1)) if choice.offloads else 0
            return Misfit(choice, rank, "DEVICE", least, capacity.device_bytes)
        lower = max(needed - device_bytes, 0)
        missing = max(lower - capacity.lower_bytes, chunks.missing_bytes(capacity))
        if missing > 0:
            return Misfit(choice, rank, "HOST and DISK", capacity.lower_bytes + missing, capacity.lower_bytes)
        slack = capacity.device_bytes - device_bytes
        return RankPrice(needed - lower + slack, lower, parameters, gradients, states, activations)

    @property
    def _device_bytes(self) -> int:
        """What tensors may take of DEVICE. Where activations are stored, the runtime lets freed memory stay
        in the allocator's heap up to a share."""
        given = self._pricer.capacity.device_bytes
        return given - given // SLACK_SHARE if self._choice.offloads else given

    def _exchanging(self, rank: int) -> int:
        """Return what ZeRO 0 to 2 hold besides gradients while these are exchanged: what the buckets under
        way receive. With ZeRO 0 it replaces the means to come, but parts of unequal size or another type are
        copied, and a rank has its part of the sum."""
        choice, ranks = self._choice, self._copies
        if ranks == 1 or choice.zero_stage == 3:
            return 0
        buckets = self._exchanged(rank)
        under_way = min(len(buckets), MAX_FLIGHTS)
        if choice.zero_stage == 0:
            wide = max((each.wide_bytes for each in buckets), default=0)
            narrow = choice.num_microbatches == 1 and any(b.own_bytes < b.wide_bytes for b in buckets)
            copied = narrow or any(each.numel % ranks for each in buckets)
            return under_way * wide * copied + ceil(wide / ranks)
        sent = (b.wide_bytes if choice.num_microbatches > 1 else b.own_bytes for b in buckets)
        return under_way * max(sent, default=0)

    def _updating(self, rank: int) -> int:
        """Return what ZeRO 1 and 2 hold besides at the end of a step, when activations are gone: the weights
        of a bucket as they come back, and the part that this rank has updated."""
        if self._copies == 1 or self._choice.zero_stage not in (1, 2):
            return 0
        largest = max((each.own_bytes for each in self._exchanged(rank)), default=0)
        return largest + ceil(largest / self._copies)

    def _model_bytes(self, rank: int) -> tuple[int, int, int]:
        """Return the bytes of parameters, gradients and states of a rank."""
        cut = DataCut(self._copies, self._choice.zero_stage, self._choice.num_microbatches)
        return self._pricer.model_bytes(*self._own(rank), cut)

    def _chunks(self, rank: int) -> ChunkSizes:
        """Return the bytes of a rank's model data. With ZeRO 3 these are chunks, some of them whole for a
        while. If the chunks are not known, return a lower bound, so that no combination that may fit is
        excluded."""
        return self._laid_out(rank) or ChunkSizes(sum(self._model_bytes(rank)), 0)

    def _laid_out(self, rank: int) -> ChunkSizes | None:
        """Return the chunks of a rank as the runtime lays them out; None if it has no chunks or they are not
        known."""
        if self._choice.zero_stage < 3:
            return None
        names = frozenset(each.key for each in self._parameters(rank))
        return self._pricer.chunks_of(self._choice.part, names, self._copies)

    def _table(self, rank: int) -> ChunkTable | None:
        """Return the chunk table of a rank; None as for :meth:`_laid_out`."""
        laid_out = self._laid_out(rank)
        return None if laid_out is None else laid_out.table

    def _activations(self, rank: int) -> int:
        """Return the peak bytes of non-model data: micro-batches under way, and the segment that runs."""
        known, key = self._pricer.activations, (*self._passes_of[:-1], rank)
        if key not in known:
            known[key] = self._most_activations(rank)
        return known[key]

    def _most_activations(self, rank: int) -> int:
        ranges = [self._ranges[stage] for stage in self._order.stages_of(rank)]
        kept = [self._held.kept(*each) for each in ranges]
        inner = [self._held.most(*each) for each in ranges]
        in_half = [self._held.most_of_half(*each) for each in ranges]
        more = [self._held.between_halves(*each) for each in ranges]

        def most(moment: UnderWay) -> float:
            others = zip(moment.counts, kept, moment.halves, more, strict=True)
            held = sum(count * each + split * half for count, each, split, half in others)
            if not moment.is_half:
                return held + inner[moment.at]
            return held + max(inner[moment.at], in_half[moment.at]) + more[moment.at]

        passing = passing_bytes(self._costs, self._ranges)
        return ceil(passing + max(map(most, under_way(self._order_of, rank))))

    def _working(self, rank: int) -> int:
        """Return the peak bytes of non-model data if all storable activations may be below DEVICE: one
        running segment, plus the bytes that all micro-batches keep on DEVICE in any case."""
        peaks = (max(each.peak_bytes, each.forward_peak_bytes) for _, each in self._segments(rank))
        stay = sum(each.kept_bytes - each.storable_bytes for _, each in self._segments(rank))
        firsts = (self._ranges[stage][0] for stage in self._order.stages_of(rank))
        stay += sum(self._costs[first].begin_bytes for first in firsts if first)  # from another rank
        most = max(sum(each.counts) for each in under_way(self._order_of, rank)) + 1
        halves = max(sum(each.halves) + each.is_half for each in under_way(self._order_of, rank))
        waiting = sum(each.output_bytes for _, each in self._segments(rank))
        passing = passing_bytes(self._costs, self._ranges)
        return ceil(passing + max(peaks) + most * stay + halves * waiting)

    def _stored(self, rank: int) -> dict[int, int]:
        """Return the bytes of activations that may lie below DEVICE, by segment."""
        if not self._choice.offloads:
            return {}
        return {at: size for at, each in self._segments(rank) if (size := int(each.storable_bytes))}

    # -- seconds ---------------------------------------------------------------------------------

    def _timed(self, ranks: Sequence[RankPrice]) -> Price | Misfit:
        choice, pricer = self._choice, self._pricer
        clock = pricer.clock(*self._passes_of)
        updates = [self._update(rank) for rank in range(len(ranks))]
        exchanges = [
            exchange_seconds(self._exchanged(rank), self._copies, choice.zero_stage, pricer.speeds)
            for rank in range(len(ranks))
        ]
        rests = [exchange + update for exchange, update in zip(exchanges, updates, strict=True)]
        waits = self._waits(
            ranks, [busy + update for busy, update in zip(clock.busy, updates, strict=True)], rests
        )
        if isinstance(waits, Misfit):
            return waits
        busiest = max(range(len(ranks)), key=lambda rank: clock.busy[rank])
        groups = self._held.groups
        messages = {axis: self._messages(axis, busiest) for axis in ("tp", "sp")}
        gathers = self._gathering(busiest)
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
            clock.seconds + max(wait + rest for wait, rest in zip(waits, rests, strict=True)),
            {name: value for name, value in seconds.items() if value > 0},
            tuple(ranks),
            tuple(first - 1 for first, _ in self._ranges[1:]),
            self._sent(busiest),
            tuple(group[0] - 1 for group in groups if len(group) == 1 and isinstance(group[0], int)),
            tuple(groups_of((group for group in groups if len(blocks_of(group)) > 1), -1)),
            max(waits),
        )

    def _messages(self, axis: str, rank: int) -> float:
        """Return the seconds of a rank's collectives along ``axis`` (tp or sp) in a step."""
        each = 0.0
        for at, costs in self._segments(rank):
            forward = costs.forward_messages.get(axis, 0.0)
            each += forward * (1 + self._held.times.get(at, 0)) + costs.backward_messages.get(axis, 0.0)
        return each * self._choice.num_microbatches

    def _gathering(self, rank: int) -> float:
        """Return the seconds in which a rank gathers chunks in a step: in every forward and backward pass."""
        count, gathers = self._choice.num_microbatches, self._gathers
        if gathers is None:
            return 0.0
        stages = self._order.stages_of(rank)
        return 2 * count * sum(gathers.seconds(stage, count, self._pricer.speeds) for stage in stages)

    def _waits(
        self, ranks: Sequence[RankPrice], computing: Sequence[float], rests: Sequence[float]
    ) -> list[float] | Misfit:
        """Return how long each rank waits for transfers in a step beyond the seconds of ``computing``:
        simulated where its chunks are known, else the least that it can be. Transfers are planned for the
        ranks that end last with these and the ``rests`` behind all passes."""
        machine = self._pricer.speeds.machine
        capacity = replace(self._pricer.capacity, device_bytes=self._device_bytes)
        waits, transfers = [0.0] * len(ranks), {}
        for rank, each in enumerate(ranks):
            if not each.lower_bytes:
                continue
            table = self._table(rank)
            if table is None:
                below = max(each.parameter_bytes + each.state_bytes - capacity.device_bytes, 0)
                least = least_busy_seconds(below, machine, capacity)
                waits[rank] = max(0.0, least - computing[rank])
                continue
            trace = self._trace(rank, table)
            try:
                transfers[rank] = Transfers(trace, machine, capacity, self._copying(rank, each))
            except OutOfBudgetError:  # the bytes fit in total, but some chunk does not
                given = capacity.lower_bytes
                return Misfit(self._choice, rank, "HOST and DISK", given + max(trace.chunk_bytes), given)
            waits[rank] = transfers[rank].waits
        while True:
            last = max(range(len(ranks)), key=lambda rank: waits[rank] + rests[rank])
            if last not in transfers or transfers[last].is_planned:
                return waits
            transfers[last].plan()
            waits[last] = transfers[last].waits

    def _copying(self, rank: int, price: RankPrice) -> float:
        """Return the seconds in which a step copies activations into chunks. Only chunks that leave DEVICE
        are copied, so at most the bytes that lie below it."""
        stored = sum(self._stored(rank).values()) * self._choice.num_microbatches
        share = min(1.0, price.lower_bytes / max(price.activation_bytes, 1))
        return self._pricer.pass_seconds(ceil(share * stored) // 4)

    def _update(self, rank: int) -> float:
        return self._pricer.update(*self._own(rank), self._copies, self._choice.zero_stage)

    def _trace(self, rank: int, table: ChunkTable) -> Trace:
        """Return the trace of a rank's step: its moments and the chunks that they access."""
        if rank in self._traces:
            return self._traces[rank]
        stored = self._stored(rank)
        stages = StagePasses(
            self._costs,
            self._ranges,
            frozenset(self._held.times),
            lambda at: self._held.kept_of(at) - stored.get(at, 0),
            self._pricer.takes(*self._passes_of),
            self._pricer.clock(*self._passes_of),
            stored,
            self._held.between_halves,
        )
        passes = stages.of_rank(self._order, rank)
        self._traces[rank] = trace_of(passes, self._update(rank), table, stored)
        return self._traces[rank]

    def _sent(self, rank: int) -> dict[str, int]:
        """Return what a rank sends along tp and sp in a step, blocks that run again included."""
        found: Counter[str] = Counter()
        for at, segment in self._segments(rank):
            more, times = segment.forward_sent_bytes, self._held.times.get(at, 0)
            # A block of its own stops where it has saved all, if backward is whole.
            if (at,) in self._held.groups and not SCHEDULES[self._choice.schedule].splits:
                more = segment.again_sent_bytes
            for axis, nbytes in segment.sent_bytes.items():
                found[axis] += round(nbytes + times * more.get(axis, 0.0))
        return {axis: nbytes * self._choice.num_microbatches for axis, nbytes in found.items()}
