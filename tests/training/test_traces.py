"""A trace says what a step of a real model does: the same whatever the budget, and whenever updates run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from training_harness import Recipe, managed_optimizer, managed_step, seeded, tight
from training_models import TinyGPT, gpt_loss

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.memstats import Trace
from gemini.placement import ModelDataSize, PlacementPlan, TierCapacity
from gemini.placement.policies import AutoPolicy

STATES = ("exp_avg", "exp_avg_sq")
Build = Callable[[], nn.Module]


def half_frozen() -> nn.Module:
    model = TinyGPT()
    model.blocks[0].requires_grad_(False)
    return model


# The embedding of TinyGPT is tied to its head.
CASES: dict[str, tuple[Build, Recipe]] = {
    "tied": (TinyGPT, Recipe()),
    "clipped": (TinyGPT, Recipe(clip=("norm", 0.1))),
    "accumulation": (TinyGPT, Recipe(accumulate=2)),
    "checkpointing": (lambda: TinyGPT("non-reentrant"), Recipe()),
    "reentrant": (lambda: TinyGPT("reentrant"), Recipe()),
    "frozen": (half_frozen, Recipe()),
    "bf16": (TinyGPT, Recipe(precision="bf16")),
}


def trained(model: GeminiDDP, recipe: Recipe, steps: int = 4, *, overlap: bool = True) -> Trace:
    """Train; return the trace, closing the model."""
    with model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model, overlap=overlap)
        for index in range(steps):
            managed_step(model, optimizer, gpt_loss, recipe, index)
        trace = model.memstats()
    assert trace is not None
    return trace


def record(place: Path, case: str, **options: Any) -> Trace:
    build, recipe = CASES[case]
    model = GeminiDDP(seeded(build), mixed_precision=recipe.precision, **tight(place))
    return trained(model, recipe, **options)


@pytest.mark.parametrize("case", CASES)
def test_a_trace_is_a_cycle_of_content_written_used_and_given_up(case: str, tmp_path: Path) -> None:
    trace = record(tmp_path, case)
    moments = list(zip(trace.accesses, trace.modes, trace.frees, strict=True))
    first = {
        chunk: mode
        for chunks, modes, _ in reversed(moments)
        for chunk, mode in zip(chunks, modes, strict=True)
    }
    start = content = {chunk for chunk, mode in first.items() if mode != "w"}
    for chunks, modes, freed in moments:
        assert all((mode == "w") == (chunk not in content) for chunk, mode in zip(chunks, modes, strict=True))
        content = content | set(chunks)
        assert set(freed) <= content
        content = content - set(freed)
    assert content == start


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_read_gradients_written_and_given_up_states_modified(
    case: str, tmp_path: Path
) -> None:
    trace = record(tmp_path, case)
    seen: dict[tuple[str, str], set[str]] = {}
    for chunks, modes, phase in zip(trace.accesses, trace.modes, trace.phases, strict=True):
        for chunk, mode in zip(chunks, modes, strict=True):
            seen.setdefault((trace.chunk_kinds[chunk], phase), set()).add(mode)
    forward = {key: modes for key, modes in seen.items() if key[1] == "forward"}
    assert forward == {("param", "forward"): {"r"}}
    assert seen["param", "backward"] == {"r"}
    assert seen["grad", "backward"] >= {"w", "m"}
    for kind in ("param", *STATES):
        assert seen[kind, "optimizer"] == {"m"}
    assert seen["grad", "optimizer"] == {"r"}
    assert not any((kind, "backward") in seen for kind in STATES)
    grads = {chunk for chunk, kind in enumerate(trace.chunk_kinds) if kind == "grad"}
    assert sorted(chunk for chunks in trace.frees for chunk in chunks) == sorted(grads)


@pytest.mark.parametrize("case", CASES)
def test_when_updates_run_changes_no_trace(case: str, tmp_path: Path) -> None:
    warmup = record(tmp_path, case, steps=1)
    for overlap in (True, False):
        got = record(tmp_path, case, overlap=overlap)
        assert got.hash() == warmup.hash()
        assert got.seconds != warmup.seconds
    assert set(got.phases) == {"forward", "backward", "optimizer"}


def test_frozen_parameters_are_modified_by_nothing(tmp_path: Path) -> None:
    trace = record(tmp_path, "frozen")
    updated = {
        c
        for chunks, phase in zip(trace.accesses, trace.phases, strict=True)
        if phase == "optimizer"
        for c in chunks
    }
    frozen = {c for c, kind in enumerate(trace.chunk_kinds) if kind == "param"} - updated
    assert frozen & {c for chunks in trace.accesses for c in chunks}


def test_a_second_micro_batch_modifies_the_gradients_of_the_first(tmp_path: Path) -> None:
    def writes(case: str) -> int:
        return "".join(record(tmp_path / case, case).modes).count("w")

    for case in ("tied", "accumulation"):
        (tmp_path / case).mkdir()
    assert writes("accumulation") == writes("tied")


class Spy(AutoPolicy):
    """Remembers the traces that plans were asked for."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def plan(self, size: ModelDataSize, capacity: TierCapacity, trace: Trace) -> PlacementPlan:
        self.traces.append(trace)
        return super().plan(size, capacity, trace)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_plan_is_made_of_the_warmup_and_once_more_of_its_final_times(
    overlap: bool, tmp_path: Path
) -> None:
    spy = Spy()
    model = GeminiDDP(seeded(TinyGPT), placement_policy=spy, **tight(tmp_path))
    trace = trained(model, Recipe(), steps=6, overlap=overlap)
    warmup, final = spy.traces
    assert final is trace
    assert warmup.seconds != final.seconds
    assert replace(warmup, seconds=final.seconds, links=final.links) == final
    assert [link.name for link in final.links] == ["disk_read", "disk_write"]


def test_the_times_are_those_of_the_iteration_in_the_middle(tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path)) as model:
        managed_step(model, managed_optimizer(model), gpt_loss, Recipe(), 0)
        order, trace = model.manager.order, model.memstats()
        for seconds in (9.0, 1.0, 2.0):
            assert not order.timed
            order.complete(replace(trace, seconds=(seconds,) * trace.num_moments))
        assert order.timed
        assert model.memstats().seconds == (2.0,) * trace.num_moments


def test_a_lasting_change_of_order_is_timed_again(tmp_path: Path) -> None:
    spy = Spy()
    with GeminiDDP(seeded(TinyGPT), placement_policy=spy, **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        for index in range(14):
            managed_step(model, optimizer, gpt_loss, Recipe(accumulate=1 if index < 6 else 2), index)
        first, timed, second, timed_again = spy.traces
        assert first.hash() == timed.hash() != second.hash() == timed_again.hash()
        assert len(second.accesses) > len(first.accesses)
        assert timed_again.seconds != second.seconds


def test_where_all_fits_no_link_is_measured(tmp_path: Path) -> None:
    model = GeminiDDP(seeded(TinyGPT), **tight(tmp_path, "64MiB"))
    assert trained(model, Recipe()).links == ()


def test_a_trace_that_was_given_is_final(tmp_path: Path) -> None:
    given = record(tmp_path, "tied")
    spy = Spy()
    model = GeminiDDP(seeded(TinyGPT), placement_policy=spy, memstats=given, **tight(tmp_path))
    again = trained(model, Recipe())
    # Chunks follow the order of the trace, which may be another layout: then it is only an order.
    assert (again is given) == (model.manager.context.chunk_signature == given.chunk_signature)
    same = GeminiDDP(seeded(TinyGPT), placement_policy=spy, memstats=again, **tight(tmp_path))
    assert trained(same, Recipe()) is again
