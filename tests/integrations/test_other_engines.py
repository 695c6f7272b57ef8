"""Settings of other engines that are left in a script are refused with the line to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from gemini.errors import ConfigError
from gemini.integrations.accelerate import GeminiAccelerator
from gemini.integrations.transformers import GeminiTrainer


def train(folder: Path, **left: Any) -> GeminiTrainer:
    """Make a trainer whose arguments have ``left`` in them, as after their own checks."""
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[])
    for name, value in left.items():
        setattr(args, name, value)
    return GeminiTrainer(model=torch.nn.Linear(2, 2), args=args)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        (
            {"deepspeed": "conf/zero3.json"},
            "Take deepspeed= out; gemini convert-config conf/zero3.json --for trainer",
        ),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "convert-config ds_config.json --for trainer"),
        ({"fsdp": True, "fsdp_config": {}}, "Take fsdp= and fsdp_config= out; gemini convert-config"),
    ],
)
def test_an_engine_in_the_arguments_is_refused(left: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, **left)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variable", ["ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"]
)
def test_an_engine_of_the_launcher_is_refused(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    monkeypatch.setenv(variable, "true")
    with pytest.raises(
        ConfigError, match=f"{variable}=true gives the model to .* MULTI_GPU .* --for trainer"
    ):
        GeminiTrainer(model=torch.nn.Linear(2, 2), args=args)
    with pytest.raises(ConfigError, match=f"{variable}=true gives the model to .* --for accelerate"):
        GeminiAccelerator(cpu=True, gemini={})
    monkeypatch.setenv(variable, "false")
    assert GeminiAccelerator(cpu=True, gemini={}) is not None


@pytest.mark.parametrize("name", ["fsdp_plugin", "deepspeed_plugin"])
def test_a_plugin_of_the_accelerator_is_refused(name: str) -> None:
    options: dict[str, Any] = {name: object()}
    with pytest.raises(ConfigError, match=f"Take {name}= out"):
        GeminiAccelerator(cpu=True, gemini={}, **options)
