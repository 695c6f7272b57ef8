"""What the optimizer refuses, forgets and repeats: failed updates, clipping of other gradients, older
graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini import (
    ConfigError,
    CPUAdam,
    GeminiDDP,
    GeminiOptimizer,
    IoError,
    StateError,
    checkpoint,
    manage,
)

KIB = 1024


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 8))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    loss: torch.Tensor = model(torch.randn(16, 32, generator=generator)).float().square().mean()
    return loss


@pytest.fixture
def managed(tmp_path: Path) -> Iterator[tuple[GeminiDDP, GeminiOptimizer]]:
    with GeminiDDP(build(), device_bytes=72 * KIB, disk_dir=str(tmp_path), non_model_bytes=0) as model:
        yield model, GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)


def step(model: GeminiDDP, optimizer: GeminiOptimizer, seed: int) -> float:
    loss = loss_of(model, seed)
    optimizer.backward(loss)
    optimizer.step()
    return loss.item()


def plain_losses(steps: int, clip: float | None = None) -> list[float]:
    model = build()
    optimizer = CPUAdam(model.parameters(), lr=1e-2)
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


class FailingAcquire:
    """Raises IoError in the n-th call of ``acquire`` and passes every other call on."""

    def __init__(self, acquire: Any, fails_at: int) -> None:
        self._acquire = acquire
        self._left = fails_at

    def __call__(self, tensors: Any, **where: bool) -> None:
        self._left -= 1
        if self._left == 0:
            raise IoError(5, "injected")
        self._acquire(tensors, **where)


@pytest.mark.parametrize("non_model_bytes", [None, 0])
@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_a_warmup_that_failed_is_recorded_anew(
    tmp_path: Path, non_model_bytes: int | None, fails_at: int
) -> None:
    want = plain_losses(4)
    with GeminiDDP(
        build(), device_bytes="64MiB", disk_dir=str(tmp_path), non_model_bytes=non_model_bytes
    ) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model)
        acquire = model.manager.chunks.acquire
        model.manager.chunks.acquire = FailingAcquire(acquire, fails_at)  # type: ignore[method-assign]
        with pytest.raises(IoError):
            optimizer.backward(loss_of(model, 0))
        model.manager.chunks.acquire = acquire  # type: ignore[method-assign]
        optimizer.zero_grad()
        assert [step(model, optimizer, seed) for seed in range(4)] == want
        trace = model.memstats()
        assert trace is not None
        assert trace.phases.count("forward") == 3


def test_an_update_that_failed_in_the_step_is_refused_until_a_checkpoint_is_loaded(
    tmp_path: Path, managed: tuple[GeminiDDP, GeminiOptimizer]
) -> None:
    model, _ = managed
    optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model, overlap=False)
    want = plain_losses(4)
    assert [step(model, optimizer, seed) for seed in range(2)] == want[:2]
    checkpoint.save(tmp_path / "run", model, optimizer)
    optimizer.backward(loss_of(model, 2))
    acquire = model.manager.chunks.acquire
    model.manager.chunks.acquire = FailingAcquire(acquire, 2)  # type: ignore[method-assign]
    with pytest.raises(IoError):
        optimizer.step()
    model.manager.chunks.acquire = acquire  # type: ignore[method-assign]
    optimizer.zero_grad()
    for refused in (
        optimizer.step,
        optimizer.state_dict,
        lambda: checkpoint.save(tmp_path / "run", model, optimizer),
    ):
        with pytest.raises(StateError, match="failed half-way"):
            refused()
    checkpoint.load(tmp_path / "run", model, optimizer)
    assert [step(model, optimizer, seed) for seed in (2, 3)] == want[2:]


def test_clipping_ends_with_the_gradients_it_measured(
    managed: tuple[GeminiDDP, GeminiOptimizer],
) -> None:
    model, optimizer = managed
    optimizer.backward(loss_of(model, 7))
    optimizer.clip_grad_by_norm(1e-6)
    model.zero_grad()  # the model's, not the optimizer's
    assert [step(model, optimizer, seed) for seed in range(3)] == plain_losses(3)


def test_max_norm_clips_again_after_clipped_gradients_were_given_up(tmp_path: Path) -> None:
    with GeminiDDP(build(), device_bytes=72 * KIB, disk_dir=str(tmp_path), non_model_bytes=0) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model, max_norm=0.05)
        optimizer.backward(loss_of(model, 7))
        optimizer.clip_grad_by_norm(1e-6)
        model.zero_grad()
        assert [step(model, optimizer, seed) for seed in range(3)] == plain_losses(3, clip=0.05)


def test_gradients_that_arrive_after_clipping_are_refused(
    managed: tuple[GeminiDDP, GeminiOptimizer],
) -> None:
    model, optimizer = managed
    optimizer.backward(loss_of(model, 0))
    optimizer.clip_grad_by_norm(0.1)
    optimizer.backward(loss_of(model, 1))
    with pytest.raises(StateError, match="clip once"):
        optimizer.step()
    optimizer.zero_grad()
    assert [step(model, optimizer, seed) for seed in range(2)] == plain_losses(2)


def test_a_graph_from_before_the_update_is_refused_as_in_torch(
    managed: tuple[GeminiDDP, GeminiOptimizer],
) -> None:
    model, optimizer = managed
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_clamping_does_not_hide_an_overflow(tmp_path: Path) -> None:
    with GeminiDDP(build(), mixed_precision="fp16") as model:
        optimizer = GeminiOptimizer(
            CPUAdam(model.parameters(), lr=1e-2), model, initial_scale=2.0**30, hysteresis=1
        )
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.backward(loss_of(model, 0))
        optimizer.clip_grad_by_value(0.1)
        optimizer.step()
        assert optimizer.loss_scale is not None
        assert optimizer.loss_scale.scale == 2.0**29
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_overlap_never_changes_the_numbers_and_gpu_memory_is_refused(tmp_path: Path) -> None:
    for overlap in (True, False):
        with GeminiDDP(build(), device_bytes=72 * KIB, disk_dir=str(tmp_path), non_model_bytes=0) as model:
            optimizer = GeminiOptimizer(CPUAdam(model.parameters(), lr=1e-2), model, overlap=overlap)
            assert [step(model, optimizer, seed) for seed in range(3)] == plain_losses(3)
    with GeminiDDP(build()) as model, pytest.raises(ConfigError, match="gpu_margin_mem_ratio"):
        GeminiOptimizer(CPUAdam(model.parameters()), model, gpu_margin_mem_ratio=0.5)


def test_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    with GeminiDDP(build()) as model:
        optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
        plain = torch.optim.Adam(build().parameters())
        wrong: list[Any] = [
            (lambda: checkpoint.save(tmp_path, model.module, optimizer), "model is a .*, not a GeminiDDP"),
            (lambda: checkpoint.load(tmp_path, model.module, optimizer), "model is a .*, not a GeminiDDP"),
            (lambda: checkpoint.save_async(tmp_path, model.module, optimizer), "not a GeminiDDP"),
            (lambda: checkpoint.save(tmp_path, model, plain), "optimizer is a Adam, not a GeminiOptimizer"),
            (lambda: GeminiOptimizer(optimizer, model), "it is a GeminiOptimizer already"),
            (lambda: optimizer.load_state_dict({}), "the state has no param_groups"),
            (lambda: optimizer.clip_grad_by_norm(-1.0), "max_norm is -1"),
            (lambda: optimizer.clip_grad_by_value(float("nan")), "clip_value is nan"),
            (lambda: CPUAdam(build().parameters(), lr="fast"), "lr, eps, weight_decay"),
            (lambda: GeminiDDP(build(), device_bytes=2**70), "device_bytes is .* no machine has that much"),
        ]
        with GeminiDDP(build()) as other:
            wrong.append((lambda: checkpoint.save(tmp_path, other, optimizer), "updates another model"))
            for call, message in wrong:
                with pytest.raises(ConfigError, match=message):
                    call()


def test_a_group_of_parameters_that_the_model_does_not_manage_is_refused_and_changes_nothing(
    managed: tuple[GeminiDDP, GeminiOptimizer],
) -> None:
    model, optimizer = managed
    other = nn.Linear(32, 8)
    for params in (other.parameters(), other.weight, list(other.named_parameters())):
        with pytest.raises(ConfigError, match=r"group 1 .*does not manage"):
            optimizer.add_param_group({"params": params})
    another = r"\(8, 32\) of another managed model; give each model its own"
    with GeminiDDP(other) as second, pytest.raises(ConfigError, match=another):
        optimizer.add_param_group({"params": second.parameters()})
    assert [step(model, optimizer, seed) for seed in range(3)] == plain_losses(3)


def test_what_came_into_the_module_later_is_managed_then(
    managed: tuple[GeminiDDP, GeminiOptimizer],
) -> None:
    model, optimizer = managed
    late = nn.Parameter(torch.ones(8))
    with pytest.raises(ConfigError, match="does not manage"):
        optimizer.add_param_group({"params": late})
    next(iter(model.module.children())).late = late
    optimizer.add_param_group({"params": late})
    assert type(late) is not nn.Parameter
    assert [step(model, optimizer, seed) for seed in range(3)] == plain_losses(3)


def test_parameters_that_are_added_later_train_from_then_on(tmp_path: Path) -> None:
    def losses(model: nn.Module, optimizer: Any, added: Any) -> Iterator[float]:
        for seed in range(6):
            if seed == 3:
                optimizer.add_param_group({"params": added.parameters(), "lr": 1e-3})
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            yield loss.item()

    plain = build()
    want = list(losses(plain, CPUAdam(plain[2:].parameters(), lr=1e-2), plain[0]))
    with GeminiDDP(build(), device_bytes=72 * KIB, disk_dir=str(tmp_path), non_model_bytes=0) as model:
        layers = model.module
        optimizer = GeminiOptimizer(CPUAdam(layers[2:].parameters(), lr=1e-2), model)
        assert list(losses(model, optimizer, layers[0])) == want


def _swap_one(model: GeminiDDP) -> None:
    torch.utils.swap_tensors(model.module[2].weight, nn.Parameter(torch.zeros(32, 48)))


def _load_by_swapping(model: GeminiDDP) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.module.load_state_dict(build().state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_torch_exchanges_no_managed_parameter(managed: tuple[GeminiDDP, GeminiOptimizer]) -> None:
    model, optimizer = managed
    losses = [step(model, optimizer, 0)]
    with pytest.raises(RuntimeError, match="weakref"):
        _swap_one(model)
    assert [*losses, step(model, optimizer, 1), step(model, optimizer, 2)] == plain_losses(3)
    with pytest.raises(RuntimeError, match="weakref"):
        _load_by_swapping(model)  # which has copied the values by then
    want = build().state_dict()
    assert all(torch.equal(value, want[key]) for key, value in model.state_dict().items())


def test_a_parameter_that_is_managed_no_more_is_refused_wherever_it_would_be_used(
    managed: tuple[GeminiDDP, GeminiOptimizer],
) -> None:
    model, optimizer = managed
    step(model, optimizer, 0)
    model.module[2].weight.__class__ = nn.Parameter  # what an exchange comes to
    for used in (
        lambda: loss_of(model, 1),
        optimizer.step,
        optimizer.zero_grad,
        model.state_dict,
        lambda: model.load_state_dict(build().state_dict()),
    ):
        with pytest.raises(StateError, match=r"'2.weight' is no longer managed: .*load_state_dict"):
            used()


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "managed after its first step"])
def test_an_adam_of_ours_alone_updates_managed_parameters_until_they_are_released(
    tmp_path: Path, wrapped: bool
) -> None:
    net, plain = build(), build()
    optimizer, wanted = CPUAdam(net.parameters(), lr=1e-2), CPUAdam(plain.parameters(), lr=1e-2)
    if not wrapped:
        loss_of(net, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = manage(net, device_bytes=72 * KIB, disk_dir=str(tmp_path), non_model_bytes=0)
    for seed in range(0 if wrapped else 1, 3):
        loss_of(net, seed).backward()
        optimizer.step()
    for seed in range(3):
        loss_of(plain, seed).backward()
        wanted.step()
        wanted.zero_grad()
    assert all(map(torch.equal, handle.state_dict().values(), plain.state_dict().values()))
    handle.release()
    for used in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(StateError, match="the model was released"):
            used()
