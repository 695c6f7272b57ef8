"""Two models in one process, forked processes, debug modes, and memory touched behind the runtime's back."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import first
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from training_harness import (
    KIB,
    Recipe,
    assert_same_state,
    assert_within_budgets,
    managed_optimizer,
    managed_step,
    moved_bytes,
    seeded,
    tight,
    train_plain,
)
from training_models import Around, TinyGPT, gpt_loss, square_loss

from gemini import ConfigError, CPUAdam, EvictedAccessError, GeminiDDP, StateError

ROOT = Path(__file__).parents[2]


def build() -> Around:
    """Return the model of this file."""
    return Around(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)))


# -- two models ----------------------------------------------------------------------------------


def _distill(student: nn.Module, teacher: nn.Module, index: int) -> Tensor:
    """Use both models, one of them within an operator that takes parameters of both."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(index)).to(
        next(student.parameters()).dtype
    )
    mixed = (
        getattr(student, "module", student).before.weight * getattr(teacher, "module", teacher).before.weight
    )
    return (student(x) - teacher(x)).float().square().mean() + mixed.float().square().sum()


def _train_two(student: nn.Module, teacher: nn.Module, optimizers: list[Any]) -> list[float]:
    losses = []
    for index in range(4):
        loss = _distill(student, teacher, index)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("device_bytes", [None, 40 * KIB])
def test_two_models_train_together_and_share_an_operator(device_bytes: int | None, tmp_path: Path) -> None:
    plain = [seeded(build, seed) for seed in (0, 1)]
    want = _train_two(*plain, [CPUAdam(model.parameters(), **Recipe().adam) for model in plain])
    options = tight(tmp_path, device_bytes)
    with GeminiDDP(seeded(build), **options) as student, GeminiDDP(seeded(build, 1), **options) as teacher:
        assert _train_two(student, teacher, [managed_optimizer(student), managed_optimizer(teacher)]) == want
        for model, reference in zip((student, teacher), plain, strict=True):
            assert_same_state(model.state_dict(), reference.state_dict())
            assert_within_budgets(model.stats())


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("device_bytes", [None, 40 * KIB])
def test_a_moving_average_between_two_models_follows(
    device_bytes: int | None, precision: str | None, tmp_path: Path
) -> None:
    def average(target: nn.Module, online: nn.Module) -> None:
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)

    dtype = torch.bfloat16 if precision else torch.float32
    plain = [seeded(build, seed).to(dtype) for seed in (0, 1)]
    average(*plain)
    options = tight(tmp_path, device_bytes, mixed_precision=precision)
    with GeminiDDP(seeded(build), **options) as target, GeminiDDP(seeded(build, 1), **options) as online:
        before = {key: value.clone() for key, value in online.state_dict().items()}
        average(target, online)
        assert_same_state(target.state_dict(), {k: v.float() for k, v in plain[0].state_dict().items()})
        assert_same_state(online.state_dict(), before)


def test_copying_from_one_parameter_to_another_leaves_the_source_as_it_was(tmp_path: Path) -> None:
    with GeminiDDP(seeded(build), mixed_precision="bf16", **tight(tmp_path, 40 * KIB)) as model:
        source, target = model.module.core[0].weight, model.module.core[2].weight
        before = model.state_dict()["core.0.weight"].clone()
        with torch.no_grad():
            target.copy_(source)
        state = model.state_dict()
        assert torch.equal(state["core.0.weight"], before)
        assert torch.equal(state["core.2.weight"], before.bfloat16().float())


def test_closing_one_model_leaves_the_other_working(tmp_path: Path) -> None:
    first = GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB))
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as second:
        optimizer = managed_optimizer(second)
        managed_step(second, optimizer, square_loss, Recipe(), 0)
        first.close()
        losses = [managed_step(second, optimizer, square_loss, Recipe(), step) for step in (1, 2)]
    assert [[loss] for loss in train_plain(seeded(build), square_loss, Recipe(steps=3)).losses[1:]] == losses


# -- fork ----------------------------------------------------------------------------------------


@pytest.fixture(params=[None, 40 * KIB], ids=["unbounded", "tight"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GeminiDDP]:
    """Yield a model after two steps."""
    with GeminiDDP(seeded(build), **tight(tmp_path, request.param)) as managed:
        optimizer = managed_optimizer(managed)
        for step in range(2):
            managed_step(managed, optimizer, square_loss, Recipe(), step)
        yield managed


class Numbers(Dataset[Tensor]):
    """Batches made in worker processes."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(6, 32, generator=torch.Generator().manual_seed(index))


def test_training_from_a_data_loader_with_workers_is_identical(tmp_path: Path) -> None:
    def losses(module: nn.Module, optimizer: Any, workers: int) -> list[float]:
        seen = []
        for batch in DataLoader(
            Numbers(), batch_size=None, num_workers=workers, multiprocessing_context=None
        ):
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    plain = seeded(build)
    want = losses(plain, CPUAdam(plain.parameters(), **Recipe().adam), 0)
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as managed:
        got = losses(managed, managed_optimizer(managed), 2)
        assert got == want
        assert_same_state(managed.state_dict(), plain.state_dict())
        assert moved_bytes(managed.stats()) > 0


def _in_child(work: Callable[[], bool]) -> bool:
    """Return what ``work`` returns in a forked child; False for any exception or crash there."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


USES: dict[str, Callable[[GeminiDDP], Any]] = {
    "read": lambda m: m.module.before.weight.norm(),
    "write": lambda m: m.module.before.weight.data.zero_(),
    "forward": lambda m: square_loss(m, 0),
    "evaluate": lambda m: torch.no_grad()(square_loss)(m, 0),
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": lambda m: copy.deepcopy(m.module),
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("use", USES)
def test_a_forked_child_gets_state_error_and_the_parent_goes_on(model: GeminiDDP, use: str) -> None:
    def work() -> bool:
        try:
            USES[use](model)
        except StateError as error:
            return "forked process" in str(error)
        return False

    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert _in_child(work)
    assert_same_state(model.state_dict(), before)
    managed_step(model, managed_optimizer(model), square_loss, Recipe(), 2)
    model.manager.chunks.table.check_invariants()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_read_descriptions_and_train_a_model_of_its_own(
    model: GeminiDDP, tmp_path: Path
) -> None:
    def work() -> bool:
        shapes = [tuple(param.shape) for param in model.parameters()]
        with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as own:
            managed_step(own, managed_optimizer(own), square_loss, Recipe(), 0)
        return shapes[0] == (32, 32)

    assert _in_child(work)
    managed_step(model, managed_optimizer(model), square_loss, Recipe(), 2)


# -- debug modes and stray accesses --------------------------------------------------------------


_LAWS = "just_fits-auto-reentrant or host_and_disk-auto-non"


# What is checked after every change costs twenty times the test itself: the second level does all that the
# first does.
@pytest.mark.dear("laws in a process of its own, with checks that cost twenty times the laws")
@pytest.mark.parametrize(
    ("level", "names"),
    first([(3, f"{_LAWS} or (any_use_of_a_weight_trains_alike and bf16)"), (2, _LAWS)]),
)
def test_debug_modes_check_and_poison_and_change_no_number(level: int, names: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names]
    files = [str(Path(__file__).with_name(name)) for name in ("test_laws.py", "test_operators.py")]
    environment = {**os.environ, "GEMINI_DEBUG": str(level), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*command, *files], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _evicted_view(model: GeminiDDP) -> np.ndarray[Any, Any]:
    """Return a numpy view of a parameter whose chunk has left DEVICE, as if it had been kept since before."""
    param = model.module.core[0].weight
    view: np.ndarray[Any, Any]
    with torch._C.DisableTorchFunctionSubclass():
        view = param.detach().numpy()
    chunk = param._slot.group.param.id
    if not model.storage.trains:
        managed_optimizer(model)  # for its states, which push others out
    for _ in range(3):  # least recently used order after steps that followed a plan
        for group in reversed(model.storage.groups):
            for tensors in (
                group.slots[0].param_ref.tensors,
                *(tuple(piece.tensors.values()) for piece in group.pieces),
            ):
                if group is not param._slot.group:
                    with model.manager.operator(tensors):
                        pass
    assert "DEVICE" not in [t.name for t in model.manager.chunks.table.valid_tiers(chunk)]
    return view


def _train_on(model: GeminiDDP, steps: int) -> list[float]:
    optimizer = managed_optimizer(model)
    return [managed_step(model, optimizer, square_loss, Recipe(), step)[0] for step in range(steps)]


def test_a_stray_read_gives_nan_then_one_clear_error_and_training_goes_on(tmp_path: Path) -> None:
    want = train_plain(seeded(build), square_loss, Recipe(steps=3)).losses
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as managed:
        view = _evicted_view(managed)
        assert np.isnan(view).all()
        chunk = managed.module.core[0].weight._slot.group.param.id
        with pytest.raises(EvictedAccessError, match=f"evicted chunk {chunk} .*clone"):
            managed.module.before.weight.norm()
        assert _train_on(managed, 3) == want


def test_a_stray_write_is_reported_and_lost(tmp_path: Path) -> None:
    want = train_plain(seeded(build), square_loss, Recipe(steps=3)).losses
    with GeminiDDP(seeded(build), **tight(tmp_path, 40 * KIB)) as managed:
        _evicted_view(managed)[:] = 5.0
        with pytest.raises(EvictedAccessError):
            square_loss(managed, 0)
        assert _train_on(managed, 3) == want


def test_a_stray_access_is_reported_once_by_its_own_model_and_no_model_is_stuck(tmp_path: Path) -> None:
    options = tight(tmp_path, 40 * KIB)
    with GeminiDDP(seeded(build), **options) as first, GeminiDDP(seeded(build), **options) as second:
        for touched in (first, second):
            assert np.isnan(_evicted_view(touched)[0, 0])
            for other in (first, second):
                if other is not touched:
                    other.module.before.weight.norm()
            with pytest.raises(EvictedAccessError):
                touched.module.before.weight.norm()
            touched.module.before.weight.norm()
        losses = train_plain(seeded(build), square_loss, Recipe(steps=2)).losses
        assert _train_on(first, 2) == losses
        assert _train_on(second, 2) == losses


def test_a_stray_read_after_the_last_operator_is_reported_by_close_and_by_no_other_model(
    tmp_path: Path,
) -> None:
    options = tight(tmp_path, 40 * KIB)
    model = GeminiDDP(seeded(build), **options)
    _train_on(model, 2)
    view = _evicted_view(model)
    assert np.isnan(view[0, 0])
    with pytest.raises(EvictedAccessError, match=r"save model.state_dict\(\)"):
        model.close()
    with pytest.raises(StateError, match="was closed"):
        model.module.before.weight.norm()
    assert model.manager.chunks.arena_bytes() == 0
    assert np.isnan(view[0, 0])  # of a model that is closed
    model.close()
    with GeminiDDP(seeded(build), **options) as other:
        want = train_plain(seeded(build), square_loss, Recipe(steps=2)).losses
        assert _train_on(other, 2) == want


def test_leaving_a_model_reports_a_stray_read_unless_something_else_was_raised(tmp_path: Path) -> None:
    options = tight(tmp_path, 40 * KIB)
    with pytest.raises(EvictedAccessError), GeminiDDP(seeded(build), **options) as model:
        assert np.isnan(_evicted_view(model)[0, 0])
    with pytest.raises(ConfigError), GeminiDDP(seeded(build), **options) as model:
        model.memstats(str(_evicted_view(model)[0, 0]))


def test_a_view_read_while_its_chunk_is_on_device_is_right(tmp_path: Path) -> None:
    plain = seeded(TinyGPT)
    with GeminiDDP(seeded(TinyGPT), **tight(tmp_path, None)) as managed:
        views = [param.detach().numpy() for param in managed.parameters()]
        assert all(
            np.array_equal(v, p.detach().numpy()) for v, p in zip(views, plain.parameters(), strict=True)
        )
        assert gpt_loss(managed, 0).item() == gpt_loss(plain, 0).item()
