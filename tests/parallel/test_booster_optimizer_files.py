"""Optimizers and schedulers that a booster saved go on under any plugin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from booster_models import PLUGINS, TINY, boosted, every_layout, every_plugin, mlp, tied, train
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from gemini import CheckpointError, ConfigError, HybridAdam
from gemini.parallel import Booster, GeminiPlugin, TorchDDPPlugin
from gemini.parallel.booster import Plugin


@pytest.mark.parametrize("source", PLUGINS)
@pytest.mark.parametrize("target", PLUGINS)
def test_resumed_training_continues_bit_for_bit_under_any_plugin(
    source: str, target: str, tmp_path: Path
) -> None:
    booster, model, optimizer = boosted(PLUGINS[source](), tied())
    train(booster, model, optimizer, range(3))
    booster.save_model(model, tmp_path / "model")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    want = train(booster, model, optimizer, range(3, 6))
    again, resumed, optim = boosted(PLUGINS[target](), tied(1), lr=0.5)
    again.load_model(resumed, tmp_path / "model")
    again.load_optimizer(optim, tmp_path / "optimizer")
    assert train(again, resumed, optim, range(3, 6)) == want


@every_plugin
@every_layout
@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_resumed_training_in_16_bits_continues_bit_for_bit(
    plugin: Callable[..., Plugin], shard: bool, mixed_precision: str, tmp_path: Path
) -> None:
    booster, model, optimizer = boosted(plugin(), tied(), mixed_precision)
    train(booster, model, optimizer, range(3))
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=shard, size_per_shard=TINY)  # type: ignore[arg-type]
    booster.save_model(model, tmp_path / "model", shard=shard)
    want = train(booster, model, optimizer, range(3, 6))
    booster, model, optimizer = boosted(plugin(), tied(1), mixed_precision)
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    booster.load_model(model, tmp_path / "model")  # the fp32 weights, whatever came first
    assert train(booster, model, optimizer, range(3, 6)) == want


@pytest.mark.parametrize(
    "optimizer_type",
    [
        torch.optim.AdamW,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
    ],
)
def test_any_torch_optimizer_is_resumed(optimizer_type: Callable[..., Any], tmp_path: Path) -> None:
    def start() -> tuple[Booster, nn.Module, Any]:
        booster, model = Booster(), tied()
        wrapped, optim, *_ = booster.boost(model, optimizer_type(model.parameters()))
        return booster, wrapped, optim

    booster, model, optimizer = start()
    train(booster, model, optimizer, range(3))
    booster.save_model(model, tmp_path / "model")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    want = train(booster, model, optimizer, range(3, 6))
    booster, model, optimizer = start()
    booster.load_model(model, tmp_path / "model")
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    (tmp_path / "optimizer").write_bytes(b"")  # what was loaded is no view of the file
    assert train(booster, model, optimizer, range(3, 6)) == want


@every_plugin
def test_loss_scale_is_resumed(plugin: Callable[..., Plugin], tmp_path: Path) -> None:
    booster, model, optimizer = boosted(plugin(), tied(), "fp16")
    train(booster, model, optimizer, range(3))
    want = optimizer.state_dict()["loss_scale"]
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster, _, optimizer = boosted(plugin(), tied(), "fp16")
    assert optimizer.state_dict()["loss_scale"] != want
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    assert optimizer.state_dict()["loss_scale"] == want


def test_optimizer_before_its_first_step_is_saved(tmp_path: Path) -> None:
    booster, _, optimizer = boosted(TorchDDPPlugin(), mlp(), lr=0.25)
    booster.save_optimizer(optimizer, tmp_path / "optimizer", shard=True)
    booster, _, optimizer = boosted(GeminiPlugin(), mlp())
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_optimizer_of_other_parameters_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    booster, _, optimizer = boosted(TorchDDPPlugin(), mlp())
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    booster.save_model(mlp(), tmp_path / "model")
    other_booster, model, other = boosted(GeminiPlugin(), tied(), lr=0.5)
    with pytest.raises(CheckpointError, match="when it was saved"):
        other_booster.load_optimizer(other, tmp_path / "optimizer")
    with pytest.raises(CheckpointError, match="save_optimizer"):
        other_booster.load_optimizer(other, tmp_path / "model")
    assert other.param_groups[0]["lr"] == 0.5
    with pytest.raises(ConfigError, match=r"booster\.boost"):
        booster.save_optimizer(HybridAdam(model.parameters()), tmp_path / "other")


@pytest.mark.parametrize(
    "scheduler_type",
    [
        lambda optimizer: CosineAnnealingLR(optimizer, T_max=9),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
    ],
)
def test_scheduler_is_resumed(scheduler_type: Callable[..., Any], tmp_path: Path) -> None:
    booster, model, optimizer = boosted(TorchDDPPlugin(), mlp())
    scheduler = scheduler_type(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    booster.save_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    booster.save_optimizer(optimizer, tmp_path / "optimizer")
    scheduler.step()
    want = scheduler.get_last_lr()
    booster, model, optimizer = boosted(GeminiPlugin(), mlp())
    scheduler = scheduler_type(optimizer)
    booster.load_optimizer(optimizer, tmp_path / "optimizer")
    booster.load_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    booster.backward(model(torch.ones(1, 16)).sum(), optimizer)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == want
    assert optimizer.param_groups[0]["lr"] == want[0]


def test_file_that_is_no_scheduler_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    scheduler = CosineAnnealingLR(HybridAdam(mlp().parameters()), 3)
    for path in (tmp_path / "file", tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=path.name):
            Booster().load_lr_scheduler(scheduler, path)
