"""A script with Lightning trains with GeminiStrategy as without: the same figures, the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="only the extra 'test' brings it")

import torch
from hf_models import assert_same
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_runs import TIGHT, Classifier, loader, run, trainer

import gemini
from gemini.cli.main import main
from gemini.errors import ConfigError
from gemini.integrations.lightning import GeminiStrategy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
        {"precision": "bf16-true", "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=str,
)
def test_figures_and_weights_are_those_of_an_unmanaged_run(options: dict[str, Any], tmp_path: Path) -> None:
    _, want, wanted = run(tmp_path, managed=False, **options)
    made, got, figures = run(tmp_path, managed=True, **options)
    assert figures == wanted
    assert len(figures) == 2 * (2 * 6 + 1)
    assert_same(got, want)
    stats = made.strategy.handle.stats()
    assert stats["step"] == (6 if "accumulate_grad_batches" in options else 12)
    assert not stats["warmup"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resuming_is_bit_for_bit_as_not_stopping(precision: str, tmp_path: Path) -> None:
    _, want, wanted = run(tmp_path, managed=True, precision=precision)
    first, _, before = run(tmp_path, managed=True, precision=precision, max_epochs=1)
    first.save_checkpoint(tmp_path / "run.ckpt")
    assert sorted(path.name for path in (tmp_path / "run.ckpt").iterdir()) == ["gemini", "lightning.ckpt"]
    _, got, after = run(tmp_path, managed=True, precision=precision, resume=tmp_path / "run.ckpt")
    assert before + after == wanted
    assert_same(got, want)


def test_the_callback_that_saves_keeps_the_newest(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_top_k=1, monitor="step", mode="max", save_last=True)
    _, _, losses = run(tmp_path, managed=True, enable_checkpointing=True, callbacks=[saver])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=1-step=12.ckpt", "last.ckpt"]
    made, figures = trainer(tmp_path, GeminiStrategy(**TIGHT))
    made.validate(Classifier(), loader(8), ckpt_path=saver.last_model_path)
    assert figures.kept == losses[-1:]


def test_a_checkpoint_of_weights_is_a_file_of_lightnings(tmp_path: Path) -> None:
    made, module, _ = run(tmp_path, managed=True)
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert_same(Classifier.load_from_checkpoint(tmp_path / "weights.ckpt"), module)


def test_a_directory_becomes_a_file_for_a_module_without_a_trainer(tmp_path: Path) -> None:
    made, module, _ = run(tmp_path, managed=True)
    made.save_checkpoint(tmp_path / "run.ckpt")
    convert = ["ckpt", "convert", str(tmp_path / "run.ckpt" / "gemini"), str(tmp_path / "run.pt")]
    assert main([*convert, "--to", "torch"]) == 0
    plain = Classifier()
    plain.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["model"])
    assert_same(plain, module)


def test_a_run_of_another_strategy_goes_on_in_chunks(tmp_path: Path) -> None:
    first, _, _ = run(tmp_path, managed=False, max_epochs=1)
    first.save_checkpoint(tmp_path / "run.ckpt")
    _, want, wanted = run(tmp_path, managed=False, resume=tmp_path / "run.ckpt")
    _, got, figures = run(tmp_path, managed=True, resume=tmp_path / "run.ckpt")
    assert figures == wanted
    assert_same(got, want)


def test_a_module_is_trained_on_and_tested_as_it_is_managed(tmp_path: Path) -> None:
    _, want, _ = run(tmp_path, managed=False)
    run(tmp_path, managed=False, module=want)
    _, got, _ = run(tmp_path, managed=True)
    run(tmp_path, managed=True, module=got)
    assert_same(got, want)
    with pytest.raises(ConfigError, match="already managed"):
        run(tmp_path, managed=True, module=got, gemini={"device_bytes": "70KiB"})
    gemini.handle_of(got).release()
    assert_same(got, want)


def test_several_optimizers_are_saved_in_a_file(tmp_path: Path) -> None:
    _, want, _ = run(tmp_path, managed=False, module=Two())
    made, got, _ = run(tmp_path, managed=True, module=Two())
    assert_same(got, want)
    made.save_checkpoint(tmp_path / "run.ckpt")
    further = {"max_epochs": 3, "resume": tmp_path / "run.ckpt"}
    _, want, _ = run(tmp_path, managed=False, module=Two(), **further)
    _, got, _ = run(tmp_path, managed=True, module=Two(), **further)
    assert_same(got, want)


class Silent(Classifier):
    """Draws no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.last[1].p = 0.0


class Two(Silent):
    """Steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.first, self.last)]


def test_a_path_elsewhere_is_refused(tmp_path: Path) -> None:
    made, _, _ = run(tmp_path, managed=True, max_epochs=1)
    with pytest.raises(ConfigError, match="s3://"):
        made.save_checkpoint("s3://bucket/run.ckpt")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_of_ours_train_as_in_a_plain_loop(precision: str, tmp_path: Path) -> None:
    _, got, _ = run(tmp_path, managed=True, gemini={"mixed_precision": precision}, module=Silent())
    want = Silent()
    handle = gemini.manage(want, mixed_precision=precision, **TIGHT)
    (inner,), (schedule,) = want.configure_optimizers()
    optimizer = gemini.GeminiOptimizer(inner, handle)
    for _epoch in range(2):
        for inputs, labels in loader():
            optimizer.backward(torch.nn.functional.cross_entropy(want(inputs), labels))
            optimizer.step()
        schedule.step()
    assert_same(got, want)


def test_scaled_gradients_of_lightnings_are_refused(tmp_path: Path) -> None:
    plugin = MixedPrecision("16-mixed", "cpu")
    with pytest.raises(ConfigError, match="bf16-mixed"):
        run(tmp_path, managed=True, plugins=[plugin])
