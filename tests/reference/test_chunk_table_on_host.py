"""The chunk table against its reference model where some operators use their chunks on HOST."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from num_examples import num_examples
from reference_table import COMPUTE, DEVICE, FREE, HOLD, HOST, Flight, Kind
from test_chunk_table import INDEX, TableMachine

from gemini import _C
from gemini.errors import OutOfBudgetError, StateError


class HostMachine(TableMachine):
    """Operators of the CPU come in between those of DEVICE, one at a time."""

    @rule(
        picks=st.lists(INDEX, min_size=1, max_size=3),
        traced=st.booleans(),
        dirty=st.booleans(),
        order=st.randoms(use_true_random=False),
        num_prefetch=st.integers(0, 2),
    )
    def use_on_host(
        self, picks: list[int], traced: bool, dirty: bool, order: random.Random, num_prefetch: int
    ) -> None:
        tensors = self.pick_tensors(picks)
        wanted = self.chunks_of(tensors)
        access = partial(self.table.access, traced=traced, on_host=True)
        can = self.table.can_access_on_host(tensors)
        if any(self.model.chunks[i].pins for i in wanted):
            assert not can
            with pytest.raises(StateError, match="in use on DEVICE"):
                access(tensors)
            return
        try:
            actions = access(tensors)
        except OutOfBudgetError:
            assert not can
            return
        self.untraced = not traced
        if traced:
            self.note_moment(wanted)
            self.diverged = self.schedule is not None  # no moment of a recorded step was on HOST
        self.judge_on_host(actions or (), wanted)
        if not self.wait_on_host(tensors, order):
            assert not can
            dirty = False
        else:
            self.refuse_meanwhile(tensors[0], num_prefetch)
        self.release_on_host(tensors, dirty=dirty)

    def judge_on_host(self, actions: tuple[_C.Action, ...], wanted: set[int]) -> None:
        for action in actions:
            chunk = self.model.chunks[action.chunk]
            if action.kind == Kind.ALLOCATE:
                assert (action.from_tier, action.to_tier, action.id) == (HOST, HOST, 0)
                assert action.chunk in wanted
                assert not chunk.valid
                chunk.valid = {HOST}
            elif action.kind == Kind.EVICT:
                assert action.chunk in wanted
                assert DEVICE in chunk.valid
                assert HOST not in chunk.valid
                assert chunk.flight is None
                chunk.flight = Flight(DEVICE, HOST, new_bytes=True)
                self.model.flights[action.id] = action.chunk
            else:
                assert (action.kind, action.from_tier) == (Kind.DROP, HOST)
                assert action.chunk not in wanted
                self.model.judge(action)
            assert self.model.usage(HOST) <= self.model.budgets[HOST]

    def wait_on_host(self, tensors: tuple[int, ...], order: random.Random) -> bool:
        """Complete what is in flight until all is usable there; False where it is refused in the end."""
        for _ in range(100):
            if self.table.ready(tensors):
                chunks = [self.model.chunks[i] for i in self.chunks_of(tensors)]
                assert all(HOST in chunk.valid and chunk.flight is None for chunk in chunks)
                return True
            assert self.model.flights, "stuck: nothing to wait for"
            self.end(order.choice(sorted(self.model.flights)), succeeded=True)
            try:
                self.judge_on_host(self.table.ensure(tensors), self.chunks_of(tensors))
            except OutOfBudgetError:
                return False
        pytest.fail("never ready")

    def refuse_meanwhile(self, tensor: int, num_prefetch: int) -> None:
        """What is used on HOST is used there alone, and no transfer touches it."""
        with pytest.raises(StateError, match="in use on HOST"):
            self.table.access((tensor,), traced=False)
        assert self.table.tensor_state(tensor) == COMPUTE
        chunk = self.model.tensors[tensor].chunk
        actions = self.table.prefetch(num_prefetch)
        for index, action in enumerate(actions):
            assert action.chunk != chunk
            self.model.judge(action, actions[index + 1 :])

    def release_on_host(self, tensors: tuple[int, ...], *, dirty: bool) -> None:
        drops = set()
        for i in self.chunks_of(tensors) if dirty else ():
            chunk = self.model.chunks[i]
            drops |= {(i, DEVICE)} if DEVICE in chunk.valid else set()
            chunk.valid = {HOST}
        if dirty:
            self.note_written(self.chunks_of(tensors))
        self.expect_drops(self.table.release(tensors, dirty), drops)
        for tensor in (self.model.tensors[t] for t in tensors):
            tensor.state = HOLD if self.model.chunks[tensor.chunk].valid else FREE


def test_table_agrees_with_the_reference_model_of_uses_on_host() -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        HostMachine,
        settings=settings(
            max_examples=num_examples(300),
            stateful_step_count=40,
            suppress_health_check=checks,
        ),
    )
