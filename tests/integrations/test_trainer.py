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
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn  # noqa: E402
from trainer_runs import Tokens, arguments, build, figures, ours, tight, unmanaged  # noqa: E402

import gemini  # noqa: E402
from gemini.integrations.accelerate import unwrap_optimizer  # noqa: E402
from gemini.integrations.transformers import GeminiCallback, GeminiTrainer  # noqa: E402

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
    kept = unwrap_optimizer(trainer.optimizer).state_dict()["state"]
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
    trainer = ours(arguments(tmp_path, num_train_epochs=3, logging_steps=2))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(0 <= log["gemini/stall_share"] <= 1 for log in logs)
    assert all(log["gemini/tokens_per_second"] > 0 for log in logs)
    assert all(0 < log["gemini/device_gib"] <= 200 / 2**20 for log in logs)
    assert all(log["gemini/step_seconds"] > 0 for log in logs)
    spent = sum(2 * log["gemini/step_seconds"] for log in logs)
    assert spent <= trainer.state.log_history[-1]["train_runtime"]


def test_logs_say_what_the_plan_expected_once_there_is_one(tmp_path: Path) -> None:
    trainer = ours(arguments(tmp_path, num_train_epochs=3))
    expected = [log.get("gemini/expected_step_seconds") for log in trainer.state.log_history if "loss" in log]
    assert expected[0] is None
    planned = trainer.handle.plan().step
    assert planned is not None
    assert expected[-1] == planned.promise.simulation.step_seconds > 0
    all_of_it = ours(arguments(tmp_path / "resident"), device_bytes="2MiB")
    assert not any("gemini/expected_step_seconds" in log for log in all_of_it.state.log_history)


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


class OwnOptimizer:
    """A trainer that makes its optimizer by itself."""

    def create_optimizer(self, *_: Any) -> Any:
        model: Any = self.model  # type: ignore[attr-defined]
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return self.optimizer


def test_an_optimizer_that_a_subclass_makes_updates_chunks(tmp_path: Path) -> None:
    trained = []
    for kind, options in ((transformers.Trainer, {}), (GeminiTrainer, {"gemini": tight(str(tmp_path))})):
        made = type("Own", (OwnOptimizer, kind), {})
        run = arguments(tmp_path / kind.__name__)
        trained.append(made(model=build(), args=run, train_dataset=Tokens(12), **options))
        trained[-1].train()
    want, got = trained
    assert figures(got) == figures(want)
    assert_same(got.model, want.model)


@pytest.mark.parametrize("optim", ["sgd", "rmsprop", "adagrad", "adafactor"])
def test_optimizers_that_are_named_update_chunks_with_their_numbers(optim: str, tmp_path: Path) -> None:
    want = transformers.Trainer(
        model=build(), args=arguments(tmp_path / "want", optim=optim), train_dataset=Tokens(12)
    )
    want.train()
    got = ours(arguments(tmp_path / "got", optim=optim))
    assert figures(got) == figures(want)
    assert_same(got.model, want.model)


@pytest.mark.parametrize(
    ("more", "message"), [({"optim": "lomo"}, "while gradients are computed"), ({"fp16": True}, "fp16")]
)
def test_what_cannot_be_done_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(arguments(tmp_path, **more))


def test_options_for_a_model_that_is_managed_are_refused(tmp_path: Path) -> None:
    model = build()
    gemini.manage(model, **tight(str(tmp_path)))
    with pytest.raises(ConfigError, match="already managed"):
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


class Average(transformers.TrainerCallback):
    """Keeps a moving average of the weights, in a copy of the model that ``managing`` may manage."""

    def __init__(self, managing: dict[str, Any] | None = None) -> None:
        self._managing = managing

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(0.8)).requires_grad_(False)
        if self._managing is not None:
            gemini.manage(self.averaged.module, **self._managing)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.averaged.update_parameters(model)


class MasterAverage(transformers.TrainerCallback):
    """Keeps a moving average of the fp32 weights, read one shard after another."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.averaged = {name: value.clone() for name, value in self._values(model)}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        for name, value in self._values(model):
            self.averaged[name].lerp_(value, 0.2)

    def _values(self, model: Any) -> Any:
        if not hasattr(model, "_gemini"):
            return model.state_dict().items()
        shards = gemini.handle_of(model).state_dict_shard("16KiB")
        return ((name, value) for shard, _ in shards for name, value in shard.items())


@pytest.mark.parametrize("overlap", [True, False])
def test_averages_of_the_weights_are_those_of_an_unmanaged_trainer(overlap: bool, tmp_path: Path) -> None:
    def with_averages(kind: Any, managing: Any, **options: Any) -> Any:
        args = arguments(tmp_path / kind.__name__)
        adam = {"lr": args.learning_rate, "betas": (0.9, 0.95), "eps": args.adam_epsilon}
        callbacks = [Average(), Average(managing), MasterAverage()]
        trainer = kind(
            model=build(),
            args=args,
            train_dataset=Tokens(12),
            optimizer_cls_and_kwargs=(gemini.HybridAdam, adam),
            callbacks=callbacks,
            **options,
        )
        trainer.train()
        return trainer, [average.averaged for average in callbacks]

    budget = {**tight(str(tmp_path)), "device_bytes": "60KiB"}  # half of the weights
    options = {"gemini": budget, "gemini_optimizer": {"overlap": overlap}}
    want, (copied, _same, masters) = with_averages(transformers.Trainer, None)
    got, averages = with_averages(GeminiTrainer, budget, **options)
    assert figures(got) == figures(want)
    assert_same(averages[0].module, copied.module)
    assert_same(averages[1].module, copied.module)
    assert all(torch.equal(value, masters[name]) for name, value in averages[2].items())
    assert averages[1].module._gemini.stats()["device"]["peak_bytes"] <= 60 * 1024
    assert (got.handle.plan().step is not None) != overlap  # what the page says of it
