"""The chunk table against its reference model, driven by hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from num_examples import num_examples
from reference_table import (
    COMPUTE,
    DEVICE,
    DISK,
    FREE,
    HOLD,
    HOST,
    Chunk,
    Kind,
    ReferenceTable,
    Tensor,
)

from gemini import _C
from gemini.errors import OutOfBudgetError, StateError

TIERS = (DEVICE, HOST, DISK)
LEAVING = {Kind.EVICT, Kind.SPILL}
INDEX = st.integers(0, 11)
PICKS = st.lists(INDEX, max_size=3)
Decision = Callable[[Sequence[int]], tuple[_C.Action, ...] | None]


class TableMachine(RuleBasedStateMachine):
    """Every legal sequence of calls, with transfers ending in any order, well or badly."""

    table: _C.ChunkTable
    model: ReferenceTable

    @initialize(
        device=st.integers(4, 8),
        host=st.integers(0, 8),
        disk=st.sampled_from([0, 4, 24, 24]),
        sizes=st.lists(st.integers(1, 3), min_size=3, max_size=6),
        split=st.integers(0, 2),
    )
    def build(self, device: int, host: int, disk: int, sizes: list[int], split: int) -> None:
        self.table = _C.ChunkTable(device, host, disk)
        self.model = ReferenceTable(device, host, disk)
        self.open: list[tuple[int, ...]] = []  # accesses not yet released
        self.schedule: list[list[int]] | None = None
        self.reserve: list[int] = []
        self.record: list[list[int]] = []
        self.modes: list[dict[int, str]] = []
        self.frees: list[set[int]] = [set()]  # before the first moment, then per moment
        self.soft_limit = device
        self.diverged = self.untraced = False
        for i, nbytes in enumerate(sizes):
            assert self.table.add_chunk(nbytes) == i
            self.model.chunks.append(Chunk(nbytes))
            for _ in range(2 if i < split else 1):
                assert self.table.add_tensor(i) == len(self.model.tensors)
                self.model.tensors.append(Tensor(i))

    # --- the model's view of the step ---
    def limit(self) -> int:
        if self.schedule is None:
            return self.soft_limit
        reserve = max(self.reserve, default=0)
        if self.schedule and not self.diverged and not self.untraced:
            reserve = self.reserve[(len(self.record) - 1) % len(self.schedule)]
        return max(0, min(self.soft_limit, self.model.budgets[DEVICE] - reserve))

    def note_moment(self, chunks: set[int]) -> None:
        moment = len(self.record)
        self.record.append(sorted(chunks))
        self.modes.append({i: "r" if self.model.chunks[i].valid else "w" for i in sorted(chunks)})
        self.frees.append(set())
        if self.schedule is not None and not self.diverged:
            self.diverged = moment >= len(self.schedule) or self.schedule[moment] != sorted(chunks)

    def note_written(self, chunks: set[int]) -> None:
        for chunk in chunks:
            latest = next((modes for modes in reversed(self.modes) if chunk in modes), {chunk: ""})
            latest[chunk] = "m" if latest[chunk] == "r" else latest[chunk]

    def chunks_of(self, tensors: Sequence[int]) -> set[int]:
        return {self.model.tensors[t].chunk for t in tensors}

    def pick_tensors(self, picks: list[int]) -> tuple[int, ...]:
        return tuple(pick % len(self.model.tensors) for pick in picks)

    # --- decisions, judged ---
    def decide(self, call: Decision, tensors: tuple[int, ...]) -> None:
        """Make a call whose tensors the model has in COMPUTE; raises what the table rightly raises."""
        wanted = self.chunks_of(tensors)
        try:
            actions = call(tensors)
            if actions is None:
                assert not self.table.ready(tensors)
                actions = ()
        except OutOfBudgetError:
            assert self.model.must_refuse(wanted) or self.model.may_refuse(wanted)
            raise
        assert not self.model.must_refuse(wanted)
        limit = self.limit()
        for index, action in enumerate(actions):
            if action.kind in LEAVING or (action.kind == Kind.DROP and action.from_tier == DEVICE):
                expected = self.model.usage(DEVICE) + self.model.missing_bytes(wanted)
                assert expected - self.model.coming_free() > limit, "evicted without need"
            self.model.judge(action, actions[index + 1 :])
        for chunk in (self.model.chunks[i] for i in wanted):
            waits = DEVICE not in chunk.valid and chunk.flight is None
            assert not waits or self.model.usage(DEVICE) + chunk.nbytes > limit, "could have started"

    def access_either(self, picks: list[int], *, traced: bool) -> None:
        tensors = self.pick_tensors(picks)
        before = [(t.state, t.uses) for t in self.model.tensors]
        step = (self.diverged, self.untraced, len(self.record))
        self.untraced = not traced
        self.model.access(tensors)
        if traced:
            self.note_moment(self.chunks_of(tensors))
        try:
            self.decide(partial(self.table.access, traced=traced), tensors)
        except OutOfBudgetError:
            for tensor, (state, uses) in zip(self.model.tensors, before, strict=True):
                self.model.chunks[tensor.chunk].pins -= tensor.uses - uses
                tensor.state, tensor.uses = state, uses
            self.diverged, self.untraced, num_moments = step
            del self.record[num_moments:], self.modes[num_moments:], self.frees[num_moments + 1 :]
            return
        self.open.append(tensors)

    @precondition(lambda self: len(self.open) < 2)
    @rule(picks=PICKS)
    def access(self, picks: list[int]) -> None:
        self.access_either(picks, traced=True)

    @precondition(lambda self: len(self.open) < 2)
    @rule(picks=PICKS)
    def access_untraced(self, picks: list[int]) -> None:
        self.access_either(picks, traced=False)

    @precondition(lambda self: self.open)
    @rule(which=INDEX)
    def ensure(self, which: int) -> None:
        try:
            self.decide(self.table.ensure, self.open[which % len(self.open)])
        except OutOfBudgetError:
            return

    def wait_ready(self, tensors: tuple[int, ...], order: random.Random) -> bool:
        """Complete what is in flight until the access is ready; False where it is rightly refused."""
        for _ in range(100):
            if self.table.ready(tensors):
                return True
            if self.model.flights:
                self.end(order.choice(sorted(self.model.flights)), succeeded=True)
            try:
                self.decide(self.table.ensure, tensors)
            except OutOfBudgetError:
                return False
            assert self.model.flights or self.table.ready(tensors), "stuck: nothing to wait for"
        pytest.fail("never ready")

    @precondition(lambda self: self.open)
    @rule(which=INDEX, order=st.randoms(use_true_random=False))
    def progress(self, which: int, order: random.Random) -> None:
        self.wait_ready(self.open[which % len(self.open)], order)

    @rule(
        uses=st.lists(st.tuples(st.lists(INDEX, min_size=1, max_size=2), st.booleans()), max_size=6),
        order=st.randoms(use_true_random=False),
        num_prefetch=st.integers(0, 2),
    )
    def run_operators(
        self, uses: list[tuple[list[int], bool]], order: random.Random, num_prefetch: int
    ) -> None:
        """What an executor does: access, wait, release, with prefetching in between."""
        for picks, dirty in uses:
            num_open = len(self.open)
            self.access_either(picks, traced=True)
            if len(self.open) == num_open:
                continue
            self.prefetch_some(num_prefetch)
            ready = self.wait_ready(self.open[-1], order)
            self.release_one(-1, dirty=dirty and ready)
            self.prefetch_some(num_prefetch)

    @precondition(lambda self: self.open)
    @rule(which=INDEX, dirty=st.booleans())
    def release(self, which: int, dirty: bool) -> None:
        self.release_one(which % len(self.open), dirty=dirty)

    def release_one(self, which: int, *, dirty: bool) -> None:
        tensors = self.open.pop(which)
        resident = all(DEVICE in self.model.chunks[i].valid for i in self.chunks_of(tensors))
        if dirty and not resident:
            with pytest.raises(StateError, match="not on DEVICE"):
                self.table.release(tensors, True)
            dirty = False
        if dirty:
            self.note_written(self.chunks_of(tensors))
        self.expect_drops(self.table.release(tensors, dirty), self.model.release(tensors, dirty=dirty))

    @rule(dirty=st.booleans())
    def release_all(self, dirty: bool) -> None:
        tensors = [t for access in self.open for t in access]
        self.open.clear()
        if dirty:
            self.note_written({i for i in self.chunks_of(tensors) if DEVICE in self.model.chunks[i].valid})
        self.expect_drops(self.table.release_all(dirty=dirty), self.model.release(tensors, dirty=dirty))

    @rule(picks=PICKS)
    def free(self, picks: list[int]) -> None:
        tensors = self.pick_tensors(picks)
        if any(self.model.tensors[t].state == COMPUTE for t in tensors):
            with pytest.raises(StateError, match="COMPUTE to FREE"):
                self.table.free(tensors)
            return
        held = {i for i in self.chunks_of(tensors) if self.model.chunks[i].valid}
        self.expect_drops(self.table.free(tensors), self.model.free(tensors))
        self.frees[-1] |= {i for i in held if not self.model.chunks[i].valid}

    @staticmethod
    def expect_drops(actions: tuple[_C.Action, ...], drops: set[tuple[int, _C.Tier]]) -> None:
        assert all(action.kind == Kind.DROP and action.id == 0 for action in actions)
        assert len(actions) == len(drops)
        assert {(action.chunk, action.from_tier) for action in actions} == drops

    # --- transfers ---
    def end(self, action_id: int, *, succeeded: bool) -> None:
        expected = self.model.end(action_id, succeeded=succeeded)
        completion = (self.table.complete if succeeded else self.table.abort)(action_id)
        assert (completion.source_freed, completion.destination_freed, completion.doomed) == expected

    @precondition(lambda self: self.model.flights)
    @rule(which=INDEX, succeeded=st.booleans())
    def end_one(self, which: int, succeeded: bool) -> None:
        action_id = sorted(self.model.flights)[which % len(self.model.flights)]
        self.end(action_id, succeeded=succeeded)
        with pytest.raises(StateError, match="in flight"):
            self.table.complete(action_id)

    @rule(max_in_flight=st.integers(0, 3))
    def prefetch(self, max_in_flight: int) -> None:
        self.prefetch_some(max_in_flight)

    def prefetch_some(self, max_in_flight: int) -> None:
        actions = self.table.prefetch(max_in_flight)
        assert not actions or (self.schedule and not self.diverged)
        if not actions:
            return
        schedule = _C.Schedule(self.schedule, [], len(self.model.chunks))
        moment = len(self.record)
        uses = [schedule.next_use(i, moment) for i, c in enumerate(self.model.chunks) if c.absent]
        first_use = min(use for use in uses if use is not None)
        for index, action in enumerate(actions):
            assert action.kind != Kind.ALLOCATE
            if action.from_tier == DEVICE:
                next_use = schedule.next_use(action.chunk, moment)
                assert next_use is None or next_use > first_use, "harmed an earlier operator"
            self.model.judge(action, actions[index + 1 :])
            assert action.kind not in (Kind.FETCH, Kind.LOAD) or self.model.usage(DEVICE) <= self.limit()
        started = [action for action in actions if action.to_tier == DEVICE and action.id]
        incoming = [c for c in self.model.chunks if c.flight and c.flight.destination == DEVICE]
        assert not started or len(incoming) <= max_in_flight

    # --- the step ---
    @rule()
    def next_step(self) -> None:
        self.diverged |= self.schedule is not None and len(self.record) != len(self.schedule)
        assert self.table.end_step() == self.diverged
        self.record_agrees()
        self.table.begin_step()
        self.record, self.modes, self.frees = [], [], [set()]
        self.diverged = self.untraced = False

    def record_agrees(self) -> None:
        assert self.table.record() == tuple(map(tuple, self.record))
        assert self.table.record_modes() == ["".join(modes.values()) for modes in self.modes]
        early, *frees = self.frees
        if frees:
            frees[-1] = frees[-1] | early  # the step repeats
        assert self.table.record_frees() == tuple(tuple(sorted(chunks)) for chunks in frees)

    @rule(reserve=st.lists(st.integers(0, 9), min_size=40, max_size=40))
    def plan_the_recorded_step(self, reserve: list[int]) -> None:
        self.schedule = [list(access) for access in self.record[:40]]
        self.reserve = reserve[: len(self.schedule)]
        self.diverged = False
        self.table.set_schedule(_C.Schedule(self.schedule, self.reserve, len(self.model.chunks)))

    @rule()
    def plan_nothing(self) -> None:
        self.schedule, self.diverged = None, False
        self.table.set_schedule(None)

    @rule(nbytes=st.integers(0, 9))
    def set_limit(self, nbytes: int) -> None:
        self.set_soft_limit(nbytes)

    def set_soft_limit(self, nbytes: int) -> None:
        self.soft_limit = min(nbytes, self.model.budgets[DEVICE])
        self.table.set_limit(nbytes)

    @rule()
    def take_all_off_device(self) -> None:
        """Leave many transfers under way, for the other rules to meet."""
        before = self.soft_limit
        self.set_soft_limit(0)
        self.access_either([], traced=False)
        self.open.pop()
        self.set_soft_limit(before)

    # --- what must hold after every call ---
    @invariant()
    def books_agree(self) -> None:
        self.table.check_invariants()
        for tier in TIERS:
            assert self.table.usage(tier) == self.model.usage(tier) <= self.table.budget(tier)
            assert self.table.usage(tier) <= self.table.peak(tier) <= self.table.budget(tier)
        for i, chunk in enumerate(self.model.chunks):
            assert set(self.table.valid_tiers(i)) == chunk.valid
            assert set(self.table.held_tiers(i)) == self.model.held(chunk)
            assert self.table.is_dirty(i) == (chunk.valid == {DEVICE})
            assert self.table.pins(i) == chunk.pins
            assert self.table.in_flight(i) == (chunk.flight is not None)
        for i, tensor in enumerate(self.model.tensors):
            assert self.table.tensor_state(i) == tensor.state
            content = self.model.chunks[tensor.chunk].valid
            assert tensor.state != HOLD or content, "lost content"
        assert self.table.num_in_flight() == len(self.model.flights)

    @invariant()
    def step_agrees(self) -> None:
        assert self.table.moment() == len(self.record)
        assert self.table.diverged() == self.diverged
        assert self.table.limit() == self.limit()
        for tensors in [(), *self.open]:
            assert self.table.ready(tensors) == self.model.ready(tensors, self.limit())


def test_table_agrees_with_the_reference_model() -> None:
    run_state_machine_as_test(
        TableMachine,
        settings=settings(
            max_examples=num_examples(250),
            stateful_step_count=40,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_only_the_seeds_transitions_are_legal() -> None:
    states = (FREE, HOLD, COMPUTE)
    illegal = {(FREE, HOLD), (HOLD, HOLD), (COMPUTE, FREE)}
    assert {(a, b) for a in states for b in states if not _C.ChunkTable.is_legal(a, b)} == illegal


@pytest.mark.parametrize("ids", [3, {0}, "0", None])
def test_ids_are_a_tuple_or_a_list(ids: object) -> None:
    with pytest.raises(TypeError, match="tuple or a list"):
        _C.ChunkTable(1, 0, 0).access(ids)


@pytest.mark.parametrize("item", [-1, 2**31, 2**40])
def test_unknown_tensor_is_refused(item: int) -> None:
    with pytest.raises(StateError, match="no tensor"):
        _C.ChunkTable(1, 0, 0).access((item,))


@pytest.mark.parametrize("item", ["a", 1.5, 2**80])
def test_what_is_no_id_is_refused(item: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        _C.ChunkTable(1, 0, 0).access((item,))


def test_nothing_to_do_is_one_shared_empty_tuple() -> None:
    table = _C.ChunkTable(10, 0, 0)
    tensor = table.add_tensor(table.add_chunk(10))
    table.access((tensor,))
    assert table.ensure([tensor]) is table.release((tensor,), dirty=True) is tuple([])


def test_long_lists_of_tensors_are_taken_whole() -> None:
    table = _C.ChunkTable(100, 0, 0)
    tensors = [table.add_tensor(table.add_chunk(1)) for _ in range(100)]
    assert len(table.access(tensors)) == 100
    assert table.pins(99) == 1
