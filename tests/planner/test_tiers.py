"""Steps of ranks as their chunks see them: what a trace may say of chunks holds for any pipeline."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from planner_models import machine, net, run_of

from gemini.forecast.meter import OperationCosts
from gemini.memstats.trace import BACKWARD, OPTIMIZER, WRITTEN, LinkSpeed, Trace
from gemini.parallel.pipeline.orders import Kind, Order, make_order, simulate_actions
from gemini.planner.chunks import ChunkTable, StageCapacity, chunk_sizes
from gemini.planner.records import CutModel, Part
from gemini.planner.segment_costs import SegmentCosts, Speeds
from gemini.planner.tiers import StagePasses, Transfers, least_busy_seconds, least_device_bytes, trace_of

_INNER = (16, 64, 16, 64)
_CAPACITY = StageCapacity(2**18, 0, 2**24)


class Case:
    """A rank of a pipeline over a net, with chunks that are cut over ``copies`` ranks."""

    def __init__(self, schedule: str, pp: int, rank: int, copies: int, microbatches: int = 4) -> None:
        self.cut = CutModel(net(*_INNER), Part())
        speeds = Speeds(machine(1), OperationCosts(machine(1)))
        self.figures = list(speeds.segment_costs(self.cut.record(run_of(2))))
        stages = 2 if schedule in ("interleaved", "zero_bubble", "zbv") else 1
        self.order: Order = make_order(schedule, pp, microbatches, stages)
        ends = [
            round(i * len(self.figures) / self.order.num_stages) for i in range(self.order.num_stages + 1)
        ]
        self.ranges = tuple(pairwise(ends))
        self.rank, self.copies = rank, copies

    @property
    def segments(self) -> list[SegmentCosts]:
        """What the rank has."""
        own = (self.ranges[stage] for stage in self.order.stages_of(self.rank))
        return [self.figures[at] for first, last in own for at in range(first, last)]

    @property
    def table(self) -> ChunkTable:
        """The chunks of the rank."""
        names = frozenset(each.key for segment in self.segments for each in segment.parameters)
        found = chunk_sizes(self.cut.model, names, self.copies, _CAPACITY).table
        assert found is not None
        return found

    @property
    def kept(self) -> dict[int, int]:
        """What the rank's segments leave of a micro-batch, by segment."""
        own = (self.ranges[stage] for stage in self.order.stages_of(self.rank))
        return {
            at: round(self.figures[at].kept_bytes)
            for first, last in own
            for at in range(first, last)
            if self.figures[at].kept_bytes
        }

    def trace(self, again: frozenset[int] = frozenset(), stored: Mapping[int, int] | None = None) -> Trace:
        """Return the step of the rank; what ``stored`` names is in chunks."""
        stored = stored or {}
        takes = {(kind, stage): 1.0 + stage for kind in Kind for stage in range(self.order.num_stages)}
        clock = simulate_actions(self.order, lambda action: takes[action.kind, action.stage])
        passes = StagePasses(
            self.figures,
            self.ranges,
            again,
            lambda at: self.figures[at].kept_bytes - stored.get(at, 0),
            takes,
            clock,
            stored,
        ).of_rank(self.order, self.rank)
        trace = trace_of(passes, 2.0, self.table, stored)
        assert sum(trace.seconds) == pytest.approx(clock.seconds + 2.0)
        return trace


def contents_of(trace: Trace) -> set[int]:
    """Return which chunks have content behind the step; what has none is written before it is read, and what
    has some is not written anew."""
    content = {
        chunk
        for chunk, kind in enumerate(trace.chunk_kinds)
        if kind not in ("grad", "grad_shard", "exchange", "activation")
        and not (kind == "param" and "shard" in trace.chunk_kinds)
    }
    before = set(content)
    for chunks, modes, frees in zip(trace.accesses, trace.modes, trace.frees, strict=True):
        for chunk, mode in zip(chunks, modes, strict=True):
            assert (chunk in content) == (mode != WRITTEN), (chunk, trace.chunk_kinds[chunk], mode)
            content.add(chunk)
        assert set(frees) <= content
        content -= set(frees)
    assert content == before, "a step does not end as it begins"
    return content


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize(
    ("schedule", "pp"),
    [("1f1b", 1), ("1f1b", 2), ("gpipe", 2), ("interleaved", 2), ("zero_bubble", 2), ("zbv", 2)],
)
def test_chunks_are_written_before_they_are_read_and_given_up_once(
    schedule: str, pp: int, copies: int
) -> None:
    draw = random.Random(f"{schedule} {copies}")
    for rank in range(pp):
        again = frozenset(at for at in range(1, len(_INNER) + 1) if draw.random() < 0.5)
        contents_of(Case(schedule, pp, rank, copies).trace(again))


@pytest.mark.parametrize(
    ("schedule", "pp"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2), ("zero_bubble", 2), ("zbv", 2)]
)
def test_stored_activations_are_chunks_of_each_micro_batch_until_its_backward_pass(
    schedule: str, pp: int
) -> None:
    for rank in range(pp):
        case = Case(schedule, pp, rank, 1)
        plain, stored = case.trace(), case.trace(stored=case.kept)
        contents_of(stored)
        kinds = stored.chunk_kinds
        written = sum(
            stored.chunk_bytes[chunk]
            for chunks, modes in zip(stored.accesses, stored.modes, strict=True)
            for chunk, mode in zip(chunks, modes, strict=True)
            if kinds[chunk] == "activation" and mode == WRITTEN
        )
        block = 4096
        assert written == 4 * sum(-(-nbytes // block) * block for nbytes in case.kept.values())
        assert max(plain.non_model_bytes) > max(stored.non_model_bytes)


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 1), ("zbv", 2)])
@pytest.mark.parametrize("frozen", [True, False])
def test_activations_of_what_has_no_gradients_are_read_and_freed(
    schedule: str, pp: int, frozen: bool
) -> None:
    for rank in range(pp):
        case = Case(schedule, pp, rank, 1)
        for at, each in enumerate(case.figures):
            if at % 2:  # its weights are frozen, or it has none
                uses = each.uses if frozen else tuple(use._replace(keys=()) for use in each.uses)
                case.figures[at] = replace(each, uses=uses, gradients=())
        trace = case.trace(stored=case.kept)
        chunks = {at for at, kind in enumerate(trace.chunk_kinds) if kind == "activation"}
        held, read = set[int](), set[int]()
        for number, accesses in enumerate(trace.accesses):
            held |= chunks.intersection(accesses)
            if trace.phases[number] == BACKWARD:
                read |= chunks.intersection(accesses)
            held -= set(trace.frees[number])
        assert not held
        assert read == chunks
        assert len(chunks) >= len(case.kept) > 0


def test_what_chunks_do_not_take_stays_on_device() -> None:
    case = Case("1f1b", 1, 0, 1)
    assert not any(each.storable_bytes for each in case.figures), "all of its tensors are small"
    wide = Speeds(machine(1), OperationCosts(machine(1))).segment_costs(case.cut.record(run_of(2048)))
    assert all(0 < each.storable_bytes <= each.kept_bytes for each in wide[1:-1])


def test_activations_in_chunks_need_less_of_device() -> None:
    case = Case("gpipe", 1, 0, 1)
    assert least_device_bytes(case.trace(stored=case.kept)) < least_device_bytes(case.trace())


@pytest.mark.parametrize("copies", [2, 4])
def test_over_ranks_no_more_is_whole_than_may_be(copies: int) -> None:
    case = Case("1f1b", 1, 0, copies)
    trace, table = case.trace(), case.table
    whole: set[int] = set()
    for chunks, frees in zip(trace.accesses, trace.frees, strict=True):
        whole |= {chunk for chunk in chunks if trace.chunk_kinds[chunk] == "param"}
        used = sum(trace.chunk_bytes[chunk] for chunk in whole)
        needed = sum(trace.chunk_bytes[c] for c in chunks if trace.chunk_kinds[c] == "param")
        assert used <= max(table.gather_bytes, needed)
        whole -= set(frees)
    assert not whole


def test_every_parameter_that_trains_is_updated_once_with_all_of_its_states() -> None:
    trace = Case("1f1b", 1, 0, 1).trace()
    updated = [
        chunks for chunks, phase in zip(trace.accesses, trace.phases, strict=True) if phase == OPTIMIZER
    ]
    states = [c for chunks in updated for c in chunks if trace.chunk_kinds[c].startswith("exp_avg")]
    assert sorted(states) == [c for c, kind in enumerate(trace.chunk_kinds) if kind.startswith("exp_avg")]


def test_device_must_hold_the_chunks_of_a_moment_beside_its_activations() -> None:
    trace = Case("1f1b", 1, 0, 1).trace()
    least = least_device_bytes(trace)
    total = sum(trace.chunk_bytes)
    assert max(trace.non_model_bytes) < least < max(trace.non_model_bytes) + total


def test_what_fits_waits_for_nothing_and_what_does_not_waits_at_least_for_what_is_below() -> None:
    trace = Case("1f1b", 1, 0, 1).trace()
    peak, total = max(trace.non_model_bytes), sum(trace.chunk_bytes)
    assert Transfers(trace, machine(1), StageCapacity(peak + total)).waits == pytest.approx(0, abs=1e-9)
    kept = sum(
        nbytes for nbytes, kind in zip(trace.chunk_bytes, trace.chunk_kinds, strict=True) if kind != "grad"
    )
    links = tuple(LinkSpeed(name, 2e3, 0.0) for name in ("disk_read", "disk_write"))
    slow, capacity = replace(machine(1), links=links), StageCapacity(least_device_bytes(trace), 0, 2 * total)
    transfers = Transfers(trace, slow, capacity)
    by_order = transfers.waits
    transfers.plan()
    busy = least_busy_seconds(kept - capacity.device_bytes, slow, capacity)
    assert busy > sum(trace.seconds)
    assert busy - sum(trace.seconds) < transfers.waits <= by_order
