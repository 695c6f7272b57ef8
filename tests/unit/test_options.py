"""Options of GeminiDDP do what they say, say that they do nothing, or are refused: none is dropped."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gemini import ConfigError, CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.runtime.config import GeminiConfig


@pytest.mark.parametrize(
    "options",
    [
        {"placement_policy": "cpu"},
        {"search_range_mb": 1},
        {"hidden_dim": 64},
        {"min_chunk_size_mb": 1},
        {"mixed_precision": "bf16"},
        {"device_bytes": "1GiB"},
        {"host_bytes": 0},
        {"disk_dir": "."},
        {"disk_bytes": 0},
        {"non_model_bytes": 0},
        {"force_outputs_fp32": True},
        {"verbose": True},
    ],
)
def test_an_option_beside_a_config_is_refused_by_name(options: dict[str, Any]) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=next(iter(options))):
        GeminiDDP(module, config=GeminiConfig(), **options)
    assert type(module.weight) is nn.Parameter


@pytest.mark.parametrize(
    "options",
    [
        {"min_chunk_size_mb": float("inf")},
        {"search_range_mb": float("nan")},
        {"placement_policy": 5},
        {"placement_policy": None},
        {"memstats": "trace.json"},
        {"device": "nope"},
        {"device": -1},
    ],
)
def test_a_value_of_no_use_is_refused_by_name(options: dict[str, Any]) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=next(iter(options))):
        GeminiDDP(module, **options)
    assert type(module.weight) is nn.Parameter


def test_what_is_no_module_and_no_managed_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wraps an nn\.Module, not list"):
        GeminiDDP([nn.Linear(4, 4)])  # type: ignore[arg-type]
    plain = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="model is a Linear, not a GeminiDDP"):
        GeminiOptimizer(CPUAdam(plain.parameters()), plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_a_norm_that_would_clip_nothing_in_silence_is_refused(max_norm: float) -> None:
    with GeminiDDP(nn.Linear(4, 4)) as model, pytest.raises(ConfigError, match="max_norm"):
        GeminiOptimizer(CPUAdam(model.parameters()), model, max_norm=max_norm)


def test_a_config_alone_is_what_the_model_is_built_with() -> None:
    config = GeminiConfig(precision=torch.bfloat16, device_bytes=2**20)
    with GeminiDDP(nn.Linear(4, 4), "cpu", config=config) as model:
        assert model._gemini.config is config
        assert model.stats()["device"]["budget_bytes"] == 2**20


@pytest.mark.parametrize("pin_memory", [None, False, True])
def test_pinning_without_a_gpu_is_accepted_and_said_once(
    pin_memory: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="gemini"):
        GeminiDDP(nn.Linear(4, 4), pin_memory=pin_memory, device_bytes="1MiB").close()
    said = [message for message in caplog.messages if "pin_memory=True" in message]
    assert len(said) == (pin_memory is True)


def test_a_config_of_another_library_is_refused_by_its_class() -> None:
    with pytest.raises(ConfigError, match="config is a SimpleNamespace; give a GeminiConfig"):
        GeminiDDP(nn.Linear(4, 4), config=SimpleNamespace(hidden_size=4))
