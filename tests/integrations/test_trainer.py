"""GeminiTrainer prints what an unmanaged Trainer with the same optimizer does, and ends with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

from hf_models import assert_same  # noqa: E402
from trainer_runs import Tokens, arguments, build, figures, ours, tight, unmanaged  # noqa: E402

import gemini  # noqa: E402
from gemini.integrations.accelerate import unwrapped  # noqa: E402
from gemini.integrations.transformers import GeminiCallback, GeminiTrainer  # noqa: E402

pytestmark = pytest.mark.slow

BEST = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
        {"max_grad_norm": 0.0},
        {"bf16": True},
        BEST,
    ],
    ids=["accumulated and clipped", "norm without clipping", "autocast", "best model at the end"],
)
def test_figures_and_weights_are_those_of_an_unmanaged_trainer(more: dict[str, Any], tmp_path: Path) -> None:
    want = unmanaged(arguments(tmp_path / "want", **more))
    got = ours(arguments(tmp_path / "got", **more))
    assert figures(got) == figures(want)
    assert_same(got.model, want.model)
    assert got.handle.stats()["device"]["peak_bytes"] <= 200 * 1024
    assert got.handle.stats()["disk_read"]["bytes"] > 0


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_resuming_is_bit_for_bit_as_not_stopping(precision: str | None, tmp_path: Path) -> None:
    options = {**tight(str(tmp_path)), "mixed_precision": precision}
    saves = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    want = ours(arguments(tmp_path / "run", **saves), **options)
    again = arguments(tmp_path / "again", gradient_accumulation_steps=2)
    got = ours(again, resume=str(tmp_path / "run" / "checkpoint-2"), **options)
    assert figures(got) == figures(want)
    for one, other in zip(states(got), states(want), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert not (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").exists()


def states(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Return masters, and the state of each parameter."""
    kept = unwrapped(trainer.optimizer).state_dict()["state"]
    return [trainer.handle.state_dict(), *kept.values()]


def test_what_it_saves_is_loaded_by_transformers(tmp_path: Path) -> None:
    trainer = ours(arguments(tmp_path / "run"))
    trainer.save_model(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same(loaded, trainer.model)
    tokens = torch.arange(6).reshape(1, 6)
    options = {"max_new_tokens": 5, "do_sample": False}
    trainer.model.eval()
    assert torch.equal(trainer.model.generate(tokens, **options), loaded.generate(tokens, **options))


def test_a_model_that_was_loaded_into_chunks_is_trained_as_it_is(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "model")
    kind = transformers.LlamaForCausalLM
    got = ours(
        arguments(tmp_path / "got"),
        gemini.from_pretrained(tmp_path / "model", kind, attention_dropout=0.1, **tight(str(tmp_path))),
    )
    want = unmanaged(arguments(tmp_path / "want"), kind.from_pretrained(tmp_path / "model"))
    assert figures(got) == figures(want)


def test_logs_say_what_the_runtime_did(tmp_path: Path) -> None:
    logs = [log for log in ours(arguments(tmp_path)).state.log_history if "loss" in log]
    assert all(0 <= log["gemini/stall_share"] <= 1 for log in logs)
    assert all(log["gemini/tokens_per_second"] > 0 for log in logs)
    assert all(0 < log["gemini/device_gib"] <= 200 / 2**20 for log in logs)


def test_the_callback_alone_serves_an_unchanged_trainer(tmp_path: Path) -> None:
    model = build()
    gemini.manage(model, **tight(str(tmp_path)))
    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=Tokens(4),
        callbacks=[GeminiCallback()],
        optimizers=(gemini.GeminiAdamOptimizer(model, lr=1e-2), None),
    )
    trainer.train()
    assert "gemini/stall_share" in trainer.state.log_history[0]


def test_a_default_that_is_replaced_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours(arguments(tmp_path))
    assert "gemini's AdamW" in caplog.text


@pytest.mark.parametrize(
    ("more", "message"), [({"optim": "adafactor"}, "adafactor"), ({"fp16": True}, "fp16")]
)
def test_what_cannot_be_done_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(arguments(tmp_path, **more))


def test_options_for_a_model_that_is_managed_are_refused(tmp_path: Path) -> None:
    model = build()
    gemini.manage(model, **tight(str(tmp_path)))
    with pytest.raises(ConfigError, match="managed already"):
        GeminiTrainer(model=model, args=arguments(tmp_path), gemini={"device_bytes": "1MiB"})


def test_a_model_that_the_trainer_makes_is_managed_too(tmp_path: Path) -> None:
    logs = []
    for kind, options in ((transformers.Trainer, {}), (GeminiTrainer, {"gemini": tight(str(tmp_path))})):
        args = arguments(tmp_path / kind.__name__)
        adam = {"lr": args.learning_rate, "betas": (0.9, 0.95), "eps": args.adam_epsilon}
        trainer = kind(
            model_init=build,
            args=args,
            train_dataset=Tokens(12),
            optimizer_cls_and_kwargs=(gemini.HybridAdam, adam),
            **options,
        )
        trainer.train()
        logs.append(figures(trainer))
    assert logs[0] == logs[1]
    assert gemini.handle_of(trainer.model).stats()["step"] == 6


class Full(torch.nn.Module):
    """Has no memory for more than ``rows`` rows; for none ``times`` times."""

    def __init__(self, rows: int, times: int) -> None:
        super().__init__()
        self.rows, self.times, self.calls = rows, times, []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        if len(hidden) > self.rows or len(self.calls) in range(3, 3 + self.times):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return hidden


@pytest.mark.parametrize(
    ("memory", "accumulate", "batches"),
    [((1, 0), 1, [2, 2, *[1] * 12]), ((2, 2), 3, [2, 2, 2, 1, *[1] * 12])],
    ids=["never fits", "gradients were there"],
)
def test_a_batch_that_does_not_fit_twice_becomes_smaller(
    memory: tuple[int, int], accumulate: int, batches: list[int], tmp_path: Path
) -> None:
    model = build()
    model.model.norm = torch.nn.Sequential(model.model.norm, Full(*memory))
    args = arguments(tmp_path, auto_find_batch_size=True, gradient_accumulation_steps=accumulate)
    trainer = GeminiTrainer(model=model, args=args, train_dataset=Tokens(12), gemini=tight(str(tmp_path)))
    trainer.train()
    assert model.model.norm[1].calls == batches
    assert len([log for log in figures(trainer) if "loss" in log]) == 12 // accumulate


def test_a_pass_without_memory_is_repeated_with_the_same_batch(tmp_path: Path) -> None:
    model = build()
    model.model.norm = torch.nn.Sequential(model.model.norm, Full(2, 1))
    args = arguments(tmp_path, auto_find_batch_size=True)
    trainer = GeminiTrainer(model=model, args=args, train_dataset=Tokens(12), gemini=tight(str(tmp_path)))
    trainer.train()
    assert model.model.norm[1].calls == [2] * 7
    want = unmanaged(arguments(tmp_path / "want"))
    assert [log["loss"] for log in figures(trainer)] == [
        log["loss"] for log in figures(want) if "loss" in log
    ]
