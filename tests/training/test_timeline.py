"""Recorded timelines: they say what happened, agree with the counters, and change nothing."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_harness import (
    KIB,
    TIERS,
    Recipe,
    assert_identical,
    managed_optimizer,
    managed_step,
    random_batch,
    seeded,
    tight,
    train_managed,
)

from gemini import GeminiDDP
from gemini.errors import StateError
from gemini.timeline.event_recorder import TimelineRecorder
from gemini.timeline.events import Timeline, Transfer, computing

CLIPPED = Recipe(steps=6, accumulate=2, clip=("norm", 0.1))


class Net(nn.Module):
    """Six layers of 64 x 64, the middle ones recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        x = checkpoint(
            lambda y: torch.tanh(self.layers[3](torch.tanh(self.layers[2](y)))), x, use_reentrant=False
        )
        return self.layers[5](torch.tanh(self.layers[4](x)))


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    return F.mse_loss(model(random_batch(index, 4, 64)), random_batch(index + 999, 4, 64))


def placements(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {
        "resident": {"device_bytes": "64MiB", "non_model_bytes": 0},
        "disk": tight(tmp_path, 160 * KIB),
        "host": {**tight(tmp_path, 160 * KIB), "disk_dir": None, "host_bytes": "4MiB"},
    }


PLACEMENTS = pytest.mark.parametrize("placement", ["resident", "disk", "host"])


def recorded(
    options: dict[str, Any], recipe: Recipe = CLIPPED, first: int = 2
) -> tuple[Timeline, dict[str, Any]]:
    """Train; return the timeline of the steps from ``first`` on, and what else is known of them."""
    with GeminiDDP(seeded(Net), **options) as model:
        optimizer = managed_optimizer(model, recipe)
        for step in range(first):
            managed_step(model, optimizer, loss_of, recipe, step)
        model.manager.chunks.drain()
        before = model.stats()
        with model.record_timeline() as recorder:
            for step in range(first, recipe.steps):
                managed_step(model, optimizer, loss_of, recipe, step)
            model.manager.chunks.drain()
            after = model.stats()
        return recorder.timeline(), {"before": before, "after": after, "trace": model.memstats()}


def grown(counters: dict[str, Any], *path: str) -> float:
    """Return by how much a counter has grown."""
    before, after = counters["before"], counters["after"]
    for key in path:
        before, after = before[key], after[key]
    return float(after - before)


@PLACEMENTS
def test_recording_changes_no_bits_of_training(placement: str, tmp_path: Path) -> None:
    options = placements(tmp_path)[placement]
    want = train_managed(GeminiDDP(seeded(Net), **options), loss_of, CLIPPED)
    model = GeminiDDP(seeded(Net), **options)
    with model.record_timeline() as recorder:
        got = train_managed(model, loss_of, CLIPPED)
    assert_identical(got, want)
    assert len(recorder.timeline().steps) == CLIPPED.steps


@PLACEMENTS
def test_a_step_is_computing_and_waiting_and_the_runtime(placement: str, tmp_path: Path) -> None:
    timeline, _ = recorded(placements(tmp_path)[placement])
    assert len(timeline.steps) == 4
    for step in timeline.steps:
        operators = timeline.operators_of(step)
        waits = [w for w in timeline.waits if step.begin_s <= w.begin_s < step.end_s]
        spans = [(c.begin_s, c.end_s) for c in computing(operators, step)]
        spans += [(o.asked_s, o.begin_s) for o in operators]
        total = sum(end - begin for begin, end in spans)
        assert total == pytest.approx(step.end_s - step.begin_s, rel=1e-9)
        for wait in waits:
            assert any(o.asked_s <= wait.begin_s <= wait.end_s <= o.begin_s for o in operators)


@PLACEMENTS
def test_spans_of_the_training_thread_come_one_after_the_other(placement: str, tmp_path: Path) -> None:
    timeline, _ = recorded(placements(tmp_path)[placement])
    for one, next_one in itertools.pairwise(timeline.operators):
        assert one.asked_s <= one.begin_s <= one.end_s
        assert one.begin_s <= next_one.asked_s
        if next_one.depth == one.depth:
            assert one.end_s <= next_one.asked_s or next_one.end_s <= one.end_s
    for one_wait, next_wait in itertools.pairwise(timeline.waits):
        assert one_wait.begin_s <= one_wait.end_s <= next_wait.begin_s
    for phase, next_phase in itertools.pairwise(timeline.phases):
        assert phase.begin_s <= phase.end_s <= next_phase.begin_s


@pytest.mark.parametrize("placement", ["disk", "host"])
def test_timeline_and_counters_say_the_same(placement: str, tmp_path: Path) -> None:
    timeline, counters = recorded(placements(tmp_path)[placement])
    waited = sum(wait.end_s - wait.begin_s for wait in timeline.waits)
    assert waited == pytest.approx(grown(counters, "stall_seconds"), rel=1e-6)
    for link in ("h2d", "d2h", "disk_read", "disk_write"):
        assert sum(t.nbytes for t in timeline.transfers if t.link == link) == grown(counters, link, "bytes")
    for tier in TIERS:
        assert max(getattr(fill, f"{tier}_bytes") for fill in timeline.fills) <= timeline.budget(tier)
        assert getattr(timeline.fills[-1], f"{tier}_bytes") == counters["after"][tier]["bytes"]


@pytest.mark.parametrize("placement", ["disk", "host"])
def test_waits_are_explained_by_transfers_under_way(placement: str, tmp_path: Path) -> None:
    timeline, _ = recorded(placements(tmp_path)[placement])
    shares = [(wait, share) for wait in timeline.waits for share in wait.shares]
    assert shares
    for wait, share in shares:
        there = [t for t in timeline.transfers if (t.link, t.chunk) == (share.link, share.chunk)]
        assert any(t.submitted_s < wait.end_s and t.end_s > wait.begin_s for t in there)
    for wait in timeline.waits:
        assert sum(share.seconds for share in wait.shares) <= wait.end_s - wait.begin_s + 1e-9


@pytest.mark.parametrize("placement", ["disk", "host"])
def test_transfers_of_a_link_overlap_no_more_than_the_engine_allows(placement: str, tmp_path: Path) -> None:
    timeline, _ = recorded(placements(tmp_path)[placement])
    for link in ("h2d", "d2h", "disk_read", "disk_write"):
        used = sorted((t for t in timeline.transfers if t.link == link), key=lambda t: t.begin_s)
        for transfer in used:
            assert transfer.submitted_s <= transfer.begin_s <= transfer.end_s
            assert at_once(used, transfer) <= allowed(link, transfer)


def at_once(used: list[Transfer], moment: Transfer) -> int:
    """Return the bytes on the link when ``moment`` began."""
    return sum(t.nbytes for t in used if t.begin_s <= moment.begin_s < t.end_s)


def allowed(link: str, transfer: Transfer) -> int:
    return max(16 << 20, transfer.nbytes) if link.startswith("disk") else transfer.nbytes


def test_updates_put_off_are_seen_in_the_next_forward_pass(tmp_path: Path) -> None:
    timeline, _ = recorded(tight(tmp_path, 160 * KIB), Recipe(steps=5))
    late = [operator for operator in timeline.operators if operator.late]
    assert len(timeline.updates) >= len(timeline.steps)
    assert {operator.phase for operator in late} == {"optimizer"}
    for operator in late:
        assert any(u.begin_s <= operator.asked_s and operator.end_s <= u.end_s for u in timeline.updates)


def test_operators_are_called_after_their_modules(tmp_path: Path) -> None:
    timeline, _ = recorded(tight(tmp_path, 160 * KIB), Recipe(steps=3))
    labels = {(operator.phase, operator.label) for operator in timeline.operators}
    assert {
        ("forward", "layers.0"),
        ("backward", "layers.3"),
        ("backward", "gradient of layers.5.weight"),
    } <= labels
    assert any(label.startswith("update of layers.0.") for phase, label in labels if phase == "optimizer")
    assert all(timeline.chunk_labels)


def test_a_step_has_the_moments_of_the_trace(tmp_path: Path) -> None:
    timeline, counters = recorded(tight(tmp_path, 160 * KIB), Recipe(steps=4))
    num_moments = len(counters["trace"].phases)
    for step in timeline.steps:
        moments = [operator.moment for operator in timeline.operators_of(step)]
        assert moments == list(range(num_moments))


@PLACEMENTS
def test_a_recorder_that_was_left_holds_nothing_and_is_not_asked(placement: str, tmp_path: Path) -> None:
    model = GeminiDDP(seeded(Net), **placements(tmp_path)[placement])
    optimizer = managed_optimizer(model)
    with model.record_timeline() as recorder:
        managed_step(model, optimizer, loss_of, Recipe(), 0)
    events = recorder.timeline().num_events
    managed_step(model, optimizer, loss_of, Recipe(), 1)
    assert model.manager.observer is None
    assert model.manager.chunks.observer is None
    assert recorder.timeline().num_events == events
    assert model.manager.resident == (placement == "resident")
    model.close()
    gone = weakref.ref(model.manager)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_a_recording_may_end_by_itself_after_some_steps(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        with model.record_timeline(steps=2) as recorder:
            for step in range(4):
                managed_step(model, optimizer, loss_of, Recipe(), step)
                assert recorder.is_recording == (step < 1)
    assert [step.number for step in recorder.timeline().steps] == [1, 2]
    assert all(step.complete for step in recorder.timeline().steps)


def test_what_was_recorded_before_an_exception_is_kept(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        recorder = model.record_timeline()
        with pytest.raises(KeyboardInterrupt):
            interrupted(recorder, lambda step: managed_step(model, optimizer, loss_of, Recipe(), step), model)
        assert [step.complete for step in recorder.timeline().steps] == [True, False]
        managed_step(model, optimizer, loss_of, Recipe(), 2)


def interrupted(recorder: TimelineRecorder, step: Callable[[int], object], model: GeminiDDP) -> None:
    """Record a step, and one in which Ctrl-C comes after forward."""
    with recorder:
        step(0)
        loss_of(model, 1)
        raise KeyboardInterrupt


def test_misuse_is_refused_and_the_model_trains_on(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **tight(tmp_path)) as model:
        with model.record_timeline() as recorder:
            with pytest.raises(StateError, match="already being recorded"), model.record_timeline():
                pass
            assert recorder.is_recording
            managed_step(model, managed_optimizer(model), loss_of, Recipe(), 0)
        with pytest.raises(StateError, match="records once"):
            recorder.start()
        with pytest.raises(StateError, match="steps is 0"):
            model.record_timeline(steps=0)


def test_an_evaluation_belongs_to_no_step(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **tight(tmp_path)) as model:
        optimizer = managed_optimizer(model)
        managed_step(model, optimizer, loss_of, Recipe(), 0)
        with model.record_timeline() as recorder, torch.no_grad():
            loss_of(model, 1)
    timeline = recorder.timeline()
    assert timeline.steps == ()
    assert len([operator for operator in timeline.operators if operator.phase == "forward"]) >= 6
    assert recorder.summary() == []


def test_planning_belongs_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GeminiDDP(seeded(Net), **placements(tmp_path)["disk"]) as model:
        optimizer = managed_optimizer(model, CLIPPED)
        plan, in_steps = model.manager.order.end, []
        with model.record_timeline() as recorder:

            def note_and_plan(pending: Any) -> None:
                in_steps.append(recorder._in_step)
                plan(pending)

            monkeypatch.setattr(model.manager.order, "end", note_and_plan)
            for step in range(5):
                managed_step(model, optimizer, loss_of, CLIPPED, step)
                assert recorder._in_step is False
        assert in_steps == [False] * 5
        assert len(recorder.timeline().steps) == 5


def test_a_recording_that_ends_with_the_first_step_has_its_trace(tmp_path: Path) -> None:
    with GeminiDDP(seeded(Net), **placements(tmp_path)["disk"]) as model:
        recorder = model.record_timeline(steps=1)
        recorder.start()
        managed_step(model, managed_optimizer(model), loss_of, Recipe(), 0)
        assert recorder.trace is not None
        assert len(recorder.timeline().steps) == 1
