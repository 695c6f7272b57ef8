"""A booster on one process, without any launch: the same program trains the same under every plugin."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from booster_models import boosted, every_plugin, mlp, tied, train
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gemini import ConfigError, GeminiDDP, HybridAdam, StateError
from gemini.parallel import Booster, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from gemini.parallel.booster import Plugin
from gemini.parallel.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)


def plain_training(seeds: range, max_norm: float) -> tuple[nn.Module, list[float]]:
    """Train without a booster."""
    model = tied()
    optimizer = HybridAdam(model.parameters(), lr=1e-2)
    losses = []
    for seed in seeds:
        batch = torch.randint(0, 12, (6,), generator=torch.Generator().manual_seed(seed))
        loss = nn.functional.cross_entropy(model(batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@every_plugin
def test_booster_never_changes_training(plugin: Callable[..., Plugin]) -> None:
    want, want_losses = plain_training(range(5), max_norm=0)
    booster, model, optimizer = boosted(plugin(), tied())
    assert train(booster, model, optimizer, range(5), max_norm=0) == want_losses
    got = model.state_dict()
    assert set(got) == set(want.state_dict())
    for name, value in want.state_dict().items():
        assert name == "_extra_state" or torch.equal(value, got[name]), name


@every_plugin
def test_clipped_training_is_that_of_torch(plugin: Callable[..., Plugin]) -> None:
    _, want = plain_training(range(5), max_norm=0.5)
    assert want != plain_training(range(5), max_norm=0)[1]
    booster, model, optimizer = boosted(plugin(), tied())
    # A norm may be summed in another order.
    assert train(booster, model, optimizer, range(5), max_norm=0.5) == pytest.approx(want, rel=1e-5)


@every_plugin
def test_boost_returns_all_five_in_order_and_none_for_absent(plugin: Callable[..., Plugin]) -> None:
    model = mlp()
    optimizer = HybridAdam(model.parameters())
    loader = DataLoader(TensorDataset(torch.zeros(2, 16)))
    scheduler = StepLR(optimizer, 1)

    def criterion(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.mean()

    wrapped, optim, loss_fn, data, sched = Booster(plugin=plugin()).boost(
        model, optimizer, criterion, loader, scheduler
    )
    assert isinstance(wrapped, nn.Module)
    assert isinstance(optim, torch.optim.Optimizer)
    assert (loss_fn, data, sched) == (criterion, loader, scheduler)
    assert Booster(plugin=plugin()).boost(mlp())[1:] == (None, None, None, None)


@every_plugin
@pytest.mark.parametrize("mixed_precision", [None, "bf16", "fp16"])
def test_training_falls_in_every_precision(
    plugin: Callable[..., Plugin], mixed_precision: str | None
) -> None:
    booster, model, optimizer = boosted(plugin(), tied(), mixed_precision)
    losses = train(booster, model, optimizer, [0] * 8)
    assert losses[-1] < losses[0]


@every_plugin
def test_scheduler_made_before_boost_drives_the_boosted_optimizer(plugin: Callable[..., Plugin]) -> None:
    model = mlp()
    optimizer = HybridAdam(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    booster = Booster(plugin=plugin())
    model, optim, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it believes that the optimizer did not step
        for _ in range(2):
            booster.backward(model(torch.ones(1, 16)).sum(), optim)
            optim.step()
            scheduler.step()
    assert optim.param_groups[0]["lr"] == 0.25


@every_plugin
def test_scheduler_made_after_boost_drives_the_boosted_optimizer(plugin: Callable[..., Plugin]) -> None:
    booster, model, optimizer = boosted(plugin(), mlp(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@every_plugin
@pytest.mark.parametrize("mixed_precision", [None, "fp16"])
def test_clipping_sees_gradients_without_loss_scale(
    plugin: Callable[..., Plugin], mixed_precision: str | None
) -> None:
    batch = torch.full((2, 16), 0.5)
    plain = mlp()
    plain(batch).mean().backward()
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    booster, model, optimizer = boosted(plugin(), mlp(), mixed_precision)
    booster.backward(model(batch).float().mean(), optimizer)
    assert torch.isclose(optimizer.clip_grad_by_norm(0.01), want, rtol=1e-2)
    assert torch.isclose(optimizer.clip_grad_by_norm(1.0), torch.tensor(0.01), rtol=1e-2)


@every_plugin
def test_clipping_by_value_limits_every_element(plugin: Callable[..., Plugin]) -> None:
    booster, model, optimizer = boosted(plugin(), mlp())
    booster.backward(model(torch.ones(2, 16)).sum(), optimizer)
    optimizer.clip_grad_by_value(1e-3)
    num_weights = sum(param.numel() for param in model.parameters())
    assert 0 < optimizer.clip_grad_by_norm(1e9) <= 1.001e-3 * num_weights**0.5


@every_plugin
def test_no_sync_accumulates(plugin: Callable[..., Plugin]) -> None:
    booster, model, optimizer = boosted(plugin(), mlp())
    with booster.no_sync(model):
        booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    twice = optimizer.clip_grad_by_norm(1e9)
    optimizer.zero_grad()
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    assert torch.isclose(twice, 2 * optimizer.clip_grad_by_norm(1e9))


# --- torch's mixed precision ---


def overflowing(loss: torch.Tensor) -> torch.Tensor:
    return loss * float("inf")


def test_overflow_skips_the_step_and_lowers_the_scale() -> None:
    precision = FP16TorchMixedPrecision(init_scale=64.0, backoff_factor=0.25)
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp(), precision)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    booster.backward(overflowing(model(torch.ones(1, 16)).sum()), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.state_dict()["loss_scale"]["scale"] == 16.0


def test_scale_grows_after_clean_steps_with_and_without_clipping() -> None:
    precision = FP16TorchMixedPrecision(init_scale=8.0, growth_factor=4.0, growth_interval=2)
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp(), precision)
    for clip in (True, False):
        booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
        if clip:
            optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state_dict()["loss_scale"] == {"scale": 32.0, "clean_steps": 0}


def test_gradients_cannot_be_added_after_clipping_until_given_up() -> None:
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp(), "fp16")
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.clip_grad_by_value(1.0)
    with pytest.raises(StateError, match="clip once"):
        booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.zero_grad()
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.step()


def test_criterion_runs_under_autocast_too() -> None:
    booster = Booster("bf16", TorchDDPPlugin())
    _, _, criterion, _, _ = booster.boost(mlp(), criterion=lambda a, b: a @ b)
    assert criterion(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16


def test_step_without_gradients_is_legal_in_fp16() -> None:
    _, _, optimizer = boosted(TorchDDPPlugin(), mlp(), "fp16")
    assert optimizer.clip_grad_by_norm(1.0) == 0
    optimizer.step()


# --- what cannot be is refused, with the way out ---


@pytest.mark.parametrize(
    ("mixed_precision", "text"),
    [("fp8", "'bf16'"), ("half", "'fp16', 'bf16'"), (16, "'fp16', 'bf16'")],
)
def test_unknown_mixed_precision_is_refused(mixed_precision: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Booster(mixed_precision)


def test_plugin_must_be_a_plugin() -> None:
    with pytest.raises(ConfigError, match=r"GeminiPlugin\(\)"):
        Booster(plugin="gemini")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"GeminiPlugin\(\)"):
        Booster(plugin=GeminiPlugin)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plugin", "mixed_precision", "text"),
    [
        (TorchDDPPlugin(), "fp16_naive", "use 'fp16' or 'bf16'"),
        (GeminiPlugin(), FP16TorchMixedPrecision(), "mixed_precision='fp16'"),
        (GeminiPlugin(mixed_precision="bf16"), "fp16", "set the precision in one of them"),
        (GeminiPlugin(initial_scale=8), FP16NaiveMixedPrecision(), "set each in one of them"),
    ],
)
def test_precision_that_a_plugin_cannot_do_is_refused(
    plugin: Plugin, mixed_precision: Any, text: str
) -> None:
    model = mlp()
    with pytest.raises(ConfigError, match=text):
        Booster(mixed_precision, plugin).boost(model)
    assert {(type(param), param.dtype) for param in model.parameters()} == {(nn.Parameter, torch.float32)}


@pytest.mark.parametrize(
    ("plugin", "mixed_precision", "scale"),
    [
        (GeminiPlugin(mixed_precision="fp16", initial_scale=8), None, 8),
        (GeminiPlugin(initial_scale=16), "fp16", 16),
        (GeminiPlugin(), FP16NaiveMixedPrecision(initial_scale=32), 32),
    ],
)
def test_loss_scale_reaches_the_managed_optimizer(plugin: Plugin, mixed_precision: Any, scale: float) -> None:
    _, _, optimizer = boosted(plugin, mlp(), mixed_precision)
    assert optimizer.loss_scale.scale == scale


def test_bf16_object_is_bf16() -> None:
    _, model, _ = boosted(GeminiPlugin(), mlp(), BF16MixedPrecision())
    assert isinstance(model, GeminiDDP)
    assert model._gemini.config.precision == torch.bfloat16


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'chunk_size'"):
        GeminiPlugin(chunk_size=4)
    with pytest.raises(TypeError):
        TorchDDPPlugin(fp8_communication=True)  # type: ignore[call-arg]


def test_gemini_refuses_other_optimizers_and_changes_nothing() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"LBFGS cannot update a managed model"):
        Booster(plugin=GeminiPlugin()).boost(model, optimizer)
    assert Booster().boost(model, optimizer)[1].optim is optimizer


def test_model_on_meta_is_for_gemini_only() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="GeminiPlugin"):
        Booster().boost(model)
    wrapped, *_ = Booster(plugin=GeminiPlugin()).boost(model)
    assert wrapped(torch.ones(1, 2)).isfinite().all()


def test_half_weights_under_autocast_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.float\(\)"):
        Booster("fp16").boost(mlp().half())


def test_scheduler_of_another_optimizer_is_refused() -> None:
    model, other = mlp(), mlp()
    scheduler = StepLR(HybridAdam(other.parameters()), 1)
    with pytest.raises(ConfigError, match="another optimizer"):
        Booster().boost(model, HybridAdam(model.parameters()), lr_scheduler=scheduler)


@pytest.mark.parametrize("plugin", [TorchDDPPlugin, LowLevelZeroPlugin, GeminiPlugin])
def test_an_optimizer_of_another_model_is_refused(plugin: Any) -> None:
    model = mlp()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ConfigError, match=r"updates no parameter of this Sequential; make it from"):
        Booster(plugin=plugin()).boost(model, HybridAdam(mlp().parameters()))
    assert all(torch.equal(was, param) for was, param in zip(before, model.parameters(), strict=True))


def test_parameters_of_a_criterion_go_along_with_those_of_the_model() -> None:
    model, scale = mlp(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    assert Booster(plugin=TorchDDPPlugin()).boost(model, optimizer)[1].optim is optimizer


def test_only_what_boost_returned_can_be_used() -> None:
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp())
    loss = model(torch.ones(1, 16)).sum()
    with pytest.raises(ConfigError, match=r"booster\.boost"):
        booster.backward(loss, optimizer.optim)
    with pytest.raises(ConfigError, match="returned"):
        booster.no_sync(model.module)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already"):
        booster.boost(model, optimizer)
    with pytest.raises(ConfigError, match="in this order"):
        booster.boost(mlp(), nn.MSELoss())  # type: ignore[arg-type]


# --- data ---


def batches(loader: DataLoader[Any]) -> list[list[float]]:
    return [batch.tolist() for (batch,) in loader]


def test_order_depends_on_the_seed_alone_and_every_pass_shuffles_anew() -> None:
    data = TensorDataset(torch.arange(12.0))
    loaders = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        loaders.append(TorchDDPPlugin().prepare_dataloader(data, 3, shuffle=True, seed=5))
    first, second = batches(loaders[0]), batches(loaders[0])
    assert first == batches(loaders[1])
    assert first != second
    assert sorted(number for batch in first for number in batch) == list(range(12))
    other = TorchDDPPlugin().prepare_dataloader(data, 3, shuffle=True, seed=6)
    assert batches(other) != first


class Noise(torch.utils.data.Dataset[torch.Tensor]):
    """Draws what augmentations draw."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        import random

        import numpy as np

        return torch.tensor([random.random(), float(np.random.rand()), torch.rand(()).item()])


def test_workers_draw_the_same_in_every_run_and_each_its_own() -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        loader = TorchDDPPlugin().prepare_dataloader(Noise(), 4, num_workers=2, seed=3)
        return torch.cat(list(loader)), torch.cat(list(loader))

    first, second = run()
    assert all(torch.equal(a, b) for a, b in zip(run(), (first, second), strict=True))
    drawn = torch.cat((first, second)).flatten().tolist()
    assert len(set(drawn)) == len(drawn)


def test_options_reach_the_loader_and_unknown_ones_are_refused() -> None:
    data = TensorDataset(torch.arange(10.0))
    loader = TorchDDPPlugin().prepare_dataloader(data, 4, drop_last=True, collate_fn=len)
    assert list(loader) == [4, 4]
    with pytest.raises(TypeError):
        TorchDDPPlugin().prepare_dataloader(data, 4, batchsize=3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_stream_of_data_is_loaded_as_it_is_on_one_process() -> None:
    assert len(list(TorchDDPPlugin().prepare_dataloader(Stream(), 5))) == 1


def test_loader_that_divides_nothing_is_no_matter_on_one_process(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Booster().boost(mlp(), dataloader=DataLoader(Stream()))
    assert not caplog.records
