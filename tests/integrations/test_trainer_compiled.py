"""With ``torch_compile`` a managed model's blocks are compiled; the numbers are an unmanaged Trainer's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

from accelerate.state import AcceleratorState  # noqa: E402
from hf_models import assert_same  # noqa: E402
from trainer_runs import Tokens, arguments, build, figures, ours, tight, unmanaged  # noqa: E402

import gemini  # noqa: E402
from gemini.integrations.accelerate import GeminiAccelerator  # noqa: E402
from gemini.integrations.transformers import GeminiTrainer  # noqa: E402

TRACED = "aot_eager"  # all of the compiler but the making of machine code
COMPILED = {"torch_compile": True, "torch_compile_backend": TRACED}


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have neither the compiler nor Accelerate know of other tests."""
    AcceleratorState._reset_state(reset_partial_state=True)
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
        monkeypatch.setenv(name, "no")  # TrainingArguments set it for the whole process
        monkeypatch.delenv(name)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


def alone(args: Any) -> Any:
    """Train with transformers' Trainer and our AdamW, the model's blocks compiled."""
    model = build()
    for layer in model.model.layers:
        layer.compile(backend=TRACED)
    return unmanaged(args, model)


@pytest.mark.dear("the compiler runs")
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "epoch"},
        {"bf16": True},
        {"gradient_checkpointing": True},
    ],
    ids=["accumulated and evaluated", "autocast", "checkpointed"],
)
def test_compiled_blocks_give_the_figures_and_weights_of_an_unmanaged_run(
    more: dict[str, Any], tmp_path: Path
) -> None:
    got = ours(arguments(tmp_path / "got", **COMPILED, **more))
    want = alone(arguments(tmp_path / "want", **more))
    assert len(got.handle.compiled.names) == 2
    assert figures(got) == figures(want)
    assert_same(got.model, want.model)
    assert got.handle.stats()["disk_read"]["bytes"] > 0


def test_what_was_trained_compiled_is_saved_and_trained_on(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 3}
    want = ours(arguments(tmp_path / "run", **COMPILED, **saves))
    resumed = ours(arguments(tmp_path / "again", **COMPILED), resume=str(tmp_path / "run" / "checkpoint-3"))
    assert figures(resumed) == figures(want)
    want.save_model(tmp_path / "saved")
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), want.model)


def test_blocks_that_are_compiled_already_stay_as_they_are(tmp_path: Path) -> None:
    model = build()
    gemini.manage(model, **tight(str(tmp_path)))
    model.compile(backend="eager")
    calls = [layer._compiled_call_impl._call for layer in model.model.layers]
    trainer = GeminiTrainer(model=model, args=arguments(tmp_path, **COMPILED), train_dataset=Tokens(4))
    trainer.train()
    assert [layer._compiled_call_impl._call for layer in model.model.layers] == calls


def test_a_trainer_of_others_leaves_a_managed_model_uncompiled_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = {"weight_decay": 0.0, "adam_beta2": 0.999}
    want = unmanaged(arguments(tmp_path / "want", **plain))
    model = build()
    handle = gemini.manage(model, **tight(str(tmp_path)))
    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path, **COMPILED),
        train_dataset=Tokens(12),
        eval_dataset=Tokens(4),
        optimizers=(gemini.GeminiAdamOptimizer(model, lr=1e-2), None),
    )
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "model.compile(), which compiles each block" in caplog.text
    assert not handle.compiled.names
    assert [log["loss"] for log in figures(trainer)] == [log["loss"] for log in figures(want)]


def test_accelerate_compiles_blocks_too(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2)))
    handle = gemini.manage(model, disk_dir=str(tmp_path))
    accelerator = GeminiAccelerator(cpu=True, dynamo_backend="eager")
    prepared = accelerator.prepare(model)
    assert prepared is model
    assert handle.compiled.names == ("0", "1")
    assert accelerator.state.dynamo_plugin.backend.value == "EAGER"
