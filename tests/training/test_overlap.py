"""When an update runs is nobody's business: whoever looks sees it done, with the bits of the barrier."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from num_examples import num_examples
from pairs import pairs
from test_sequences import USES, Core, Side, Use
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from training_harness import (
    KIB,
    Recipe,
    assert_identical,
    assert_same_state,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    moved_bytes,
    seeded,
    tight,
    train_managed,
    train_plain,
)
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import CPUAdam, GeminiDDP, GeminiOptimizer, StateError, checkpoint

STEPS = 3


def build() -> Around:
    """Return the model of this file: several times what :func:`trained` lets it have on DEVICE."""
    return Around(Core())


def adam(model: GeminiDDP, **options: Any) -> GeminiOptimizer:
    return GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1), model, **options)


def trained(place: Path, steps: int = STEPS, *, overlap: bool = True, **options: Any) -> Side:
    """Return a model after some steps, the update of the last one pending if ``overlap``."""
    model = GeminiDDP(seeded(build), **tight(place, 40 * KIB), **options)
    side = Side(model, adam(model, overlap=overlap, max_norm=0.05))
    for index in range(steps):
        step(side, index)
    assert (model.stats()["pending_updates"] > 0) == overlap
    return side


def step(side: Side, index: int) -> float:
    loss = square_loss(side.model, index)
    side.optimizer.backward(loss)
    side.optimizer.step()
    return loss.item()


@pytest.fixture(params=[None, "bf16"], ids=["fp32", "bf16"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    """Yield the same training twice, with an update pending and without."""
    late, barrier = (
        trained(tmp_path, overlap=overlap, mixed_precision=request.param) for overlap in (True, False)
    )
    yield late, barrier
    for side in (late, barrier):
        side.model.close()


def assert_same(late: Side, barrier: Side) -> None:
    """Compare weights, states and groups, now and two steps later."""
    for _ in range(2):
        assert_same_state(late.model.state_dict(), barrier.model.state_dict())
        got, want = late.optimizer.state_dict(), barrier.optimizer.state_dict()
        assert got["param_groups"] == want["param_groups"]
        assert got["state"].keys() == want["state"].keys()
        for key, entry in want["state"].items():
            assert_same_state(got["state"][key], entry)
        assert [step(late, index) for index in (7, 8)] == [step(barrier, index) for index in (7, 8)]
    late.model.manager.chunks.table.check_invariants()
    assert_within_budgets(late.model.stats())


# -- the same bits ---------------------------------------------------------------------------------


@pairs(
    device_kib=[72, 320],
    accumulate=[1, 3],
    checkpointing=["none", "reentrant", "non-reentrant"],
    precision=[None, "bf16"],
    overlap=[True, False],
)
def test_overlap_trains_to_the_bits_of_the_plain_model(
    device_kib: int, accumulate: int, checkpointing: str, precision: str | None, overlap: bool, tmp_path: Path
) -> None:
    recipe = Recipe(steps=5, accumulate=accumulate, clip=("norm", 0.01), precision=precision)
    want = train_plain(seeded(lambda: TinyGPT(checkpointing)), gpt_loss, recipe)
    options = tight(tmp_path, device_kib * KIB, mixed_precision=precision)
    with GeminiDDP(seeded(lambda: TinyGPT(checkpointing)), **options) as model:
        optimizer = adam(model, overlap=overlap)
        for group in optimizer.param_groups:
            group.update(recipe.adam)
        losses = []
        for index in range(recipe.steps):
            losses += managed_step(model, optimizer, gpt_loss, recipe, index)
            assert (model.stats()["pending_updates"] > 0) == (overlap and index > 0)
        assert losses == want.losses
        assert_same_state(model.state_dict(), want.state)
        assert_within_budgets(model.stats())
        assert moved_bytes(model.stats()) > 0


class Routed(nn.Module):
    """Uses one of its experts per batch, and never the last; the head is the first layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.expert = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return torch.tanh(self.experts[self.expert](x)) @ self.first.weight


@pytest.mark.parametrize("device_bytes", [40 * KIB, 64 * KIB])
def test_parameters_that_the_next_step_does_not_use_are_updated_all_the_same(
    device_bytes: int, tmp_path: Path
) -> None:
    def loss_fn(model: nn.Module, index: int) -> Tensor:
        getattr(model, "module", model).core.expert = index % 2 if index < 6 else 0
        return square_loss(model, index)

    recipe = Recipe(steps=9, clip=("norm", 0.05))
    want = train_plain(seeded(lambda: Around(Routed())), loss_fn, recipe)
    got = train_managed(
        GeminiDDP(seeded(lambda: Around(Routed())), **tight(tmp_path, device_bytes)), loss_fn, recipe
    )
    assert_identical(got, want)


@pytest.mark.dear("many sequences, each trained twice")
@settings(
    max_examples=num_examples(25),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    uses=st.lists(st.tuples(st.sampled_from(USES), st.integers(0, 30)), min_size=3, max_size=10),
    device_kib=st.sampled_from([40, 64, 96]),
)
def test_any_sequence_of_uses_after_a_step_gives_the_same_results(
    tmp_path_factory: pytest.TempPathFactory, uses: list[tuple[Use, int]], device_kib: int
) -> None:
    plain = seeded(build)
    want = Side(plain, CPUAdam(plain.parameters(), lr=1e-2))
    with GeminiDDP(seeded(build), **tight(tmp_path_factory.mktemp("disk"), device_kib * KIB)) as model:
        got = Side(model, GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model))
        train = USES[0]
        # A step between any two uses, so that each of them meets pending updates.
        for pair in [(train, 1), (train, 2), *uses]:
            for use, index in (pair, (train, 4)):
                assert use(got, index) == use(want, index), use.__name__
        assert_same_state(model.state_dict(), plain.state_dict())
        assert_within_budgets(model.stats())
        model.manager.chunks.table.check_invariants()


# -- whoever looks ---------------------------------------------------------------------------------


def _no_grad(use: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return use()


def _write(side: Side) -> None:
    side.param(2).mul_(0.5)


def _freeze_the_first(side: Side) -> None:
    side.param(0).requires_grad_(False)


def _ones_like(param: nn.Parameter) -> Tensor:
    """Return ones without an operator on the parameter."""
    return torch.ones(param.shape, dtype=param.dtype)


LOOKS: dict[str, Callable[[Side], Any]] = {
    "read": lambda s: [param.sum().item() for param in s.model.parameters()],
    "read the last": lambda s: s.param(-1).norm().item(),
    "write": lambda s: _no_grad(lambda: _write(s)),
    "write data": lambda s: s.param(3).data.fill_(0.01).sum().item(),
    "grad": lambda s: [param.grad for param in s.model.parameters()],
    "zero_grad": lambda s: s.optimizer.zero_grad(),
    "zero_grad to zeros": lambda s: s.model.zero_grad(set_to_none=False),
    "grad = None": lambda s: setattr(s.param(1), "grad", None),
    "assign a gradient": lambda s: setattr(s.param(1), "grad", _ones_like(s.param(1))),
    "state_dict": lambda s: [v.sum().item() for v in s.model.state_dict().values()],
    "state_dict of the module": lambda s: [v.sum().item() for v in s.model.module.state_dict().values()],
    "states": lambda s: [v["exp_avg_sq"].sum().item() for v in s.optimizer.state_dict()["state"].values()],
    "load weights": lambda s: s.model.load_state_dict(seeded(build, 5).state_dict()),
    "reload states": lambda s: s.optimizer.load_state_dict(s.optimizer.state_dict()),
    "evaluate": lambda s: _no_grad(lambda: square_loss(s.model, 50).item()),
    "evaluate the module": lambda s: _no_grad(lambda: square_loss(s.model.module, 50).item()),
    "train the module": lambda s: square_loss(s.model.module, 50).backward(),
    "copy": lambda s: [p.sum().item() for p in copy.deepcopy(s.model.module).parameters()],
    "step again": lambda s: s.optimizer.step(),
    "another optimizer": lambda s: adam(s.model).step(),
    "change the learning rate": lambda s: s.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.0),
    "freeze": _freeze_the_first,
    "timeline": lambda s: [entry["phase"] for entry in s.model.timeline()],
    "forward only": lambda s: square_loss(s.model, 50).item(),
    "clip": lambda s: (s.optimizer.clip_grad_by_norm(1.0).item(), s.optimizer.zero_grad())[0],
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_update_done(both: tuple[Side, Side], look: str) -> None:
    late, barrier = both
    got, want = LOOKS[look](late), LOOKS[look](barrier)
    if isinstance(want, (float, list)):
        assert got == want
    if look == "freeze":
        late.param(0).requires_grad_(True), barrier.param(0).requires_grad_(True)
    assert_same(late, barrier)


def test_a_checkpoint_holds_the_update(both: tuple[Side, Side], tmp_path: Path) -> None:
    late, barrier = both
    checkpoint.save(tmp_path / "run", late.model, late.optimizer)
    assert late.model.stats()["pending_updates"] == 0
    step(late, 20)
    checkpoint.load(tmp_path / "run", late.model, late.optimizer)
    assert_same(late, barrier)


def test_a_gradient_of_an_older_graph_does_not_meet_the_one_that_is_pending(both: tuple[Side, Side]) -> None:
    for side in both:
        older = [param.sum() for param in side.model.parameters()]
        step(side, 20)
        torch.autograd.backward(older)
        for param in side.model.parameters():
            assert torch.equal(param.grad, _ones_like(param))
    assert_same(*both)


def test_a_gradient_kept_across_the_step_cannot_be_used(both: tuple[Side, Side]) -> None:
    for side in both:
        square_loss(side.model, 30).backward()
        kept = side.param(1).grad
        side.optimizer.step()
        assert side.param(1).grad is None
        with pytest.raises(StateError, match=r"clone\(\)"):
            kept.sum()
    assert_same(*both)


def test_a_scheduler_changes_the_next_update_only(tmp_path: Path) -> None:
    plain = seeded(build)
    want = Side(plain, CPUAdam(plain.parameters(), lr=1e-2, weight_decay=0.1))
    model = GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB))
    with model:
        got = Side(model, adam(model))
        schedulers = [LambdaLR(side.optimizer, lambda index: 0.5**index) for side in (got, want)]
        for index in range(6):
            losses = []
            for side, scheduler in zip((got, want), schedulers, strict=True):
                side.optimizer.zero_grad()
                loss = square_loss(side.model, index)
                loss.backward()
                side.optimizer.step()
                scheduler.step()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        assert_same_state(model.state_dict(), plain.state_dict())


def test_a_skipped_step_leaves_nothing_pending(tmp_path: Path) -> None:
    outcomes = []
    for overlap in (True, False):
        model = GeminiDDP(seeded(build), mixed_precision="fp16", **tight(tmp_path, 40 * KIB))
        with model:
            side = Side(model, adam(model, overlap=overlap, initial_scale=2.0**10, hysteresis=1))
            pending = []
            for index in range(8):
                loss = square_loss(model, index) * (1e30 if index in (0, 3, 4) else 1.0)
                side.optimizer.backward(loss)
                side.optimizer.step()
                pending.append(model.stats()["pending_updates"] > 0)
            assert pending == [overlap and index not in (0, 3, 4) for index in range(8)]
            outcomes.append((model.state_dict(), side.optimizer.loss_scale.scale))
            assert_within_budgets(model.stats())
    assert outcomes[0][1] == outcomes[1][1] == 2.0**7
    assert_same_state(outcomes[0][0], outcomes[1][0])


# -- when it is put off ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"device_bytes": None}, {"device_bytes": 2**20}])
def test_where_everything_fits_updates_run_in_the_step(options: dict[str, Any], tmp_path: Path) -> None:
    with GeminiDDP(seeded(TinyGPT), **{**tight(tmp_path), **options}) as model:
        optimizer = managed_optimizer(model)
        for index in range(4):
            managed_step(model, optimizer, gpt_loss, Recipe(), index)
            assert model.stats()["pending_updates"] == 0
        assert model.manager.resident


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(clip=("norm", 0.1)), Recipe(accumulate=2)])
@pytest.mark.parametrize("device_kib", [72, 200])
def test_steps_with_pending_updates_follow_the_recorded_order(
    device_kib: int, recipe: Recipe, tmp_path: Path
) -> None:
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, device_kib * KIB)) as model:
        optimizer, table = managed_optimizer(model), model.manager.chunks.table
        trace = None
        for index in range(6):
            seen: list[bool] = []
            managed_step(model, optimizer, _watching(gpt_loss, table, seen), recipe, index)
            trace = trace or model.memstats()
            assert not any(seen)
            assert model.memstats().hash() == trace.hash()
        model.state_dict()  # runs what is pending: the next step begins with none
        seen = []
        managed_step(model, optimizer, _watching(gpt_loss, table, seen), recipe, 6)
        assert not any(seen)
        assert model.memstats().hash() == trace.hash()


def _watching(loss_fn: Any, table: Any, seen: list[bool]) -> Any:
    """Return ``loss_fn`` that notes whether the step has left the schedule, also right before backward."""

    def watched(model: nn.Module, index: int) -> Tensor:
        loss = loss_fn(model, index)
        seen.append(table.diverged())
        loss.register_hook(lambda _grad: seen.append(table.diverged()))
        return loss

    return watched
