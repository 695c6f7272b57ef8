"""Evaluation during ``gemini finetune``, and the weights that did best."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import LLAMA, files_of, run, small_run
from hf_models import assert_same

import gemini
from gemini.errors import CheckpointError, ConfigError
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.held_out import BestWeights
from gemini.jobs.finetune.task import FineTuneTask


@pytest.fixture
def config(tmp_path: Path) -> FineTuneConfig:
    """Return a run that does best on what is held out before its end: that is of other letters."""
    lines = [json.dumps({"text": "ork play" * (1 + row)}) + "\n" for row in range(4)]
    (tmp_path / "held-out.jsonl").write_text("".join(lines))
    config = small_run(tmp_path)
    return dataclasses.replace(
        config, eval_data=str(tmp_path / "held-out.jsonl"), eval_every=2, lr=0.1, schedule="constant"
    )


def eval_losses(config: FineTuneConfig) -> dict[int, float]:
    lines = Path(config.output, "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}


def test_the_loss_on_held_out_records_is_that_of_the_exported_model(config: FineTuneConfig) -> None:
    config = dataclasses.replace(config, precision="fp32", steps=2, batch=4)
    result = run(config)
    task = FineTuneTask(config, Path("unused"), resume=False, scratch=None)
    (make,) = task._held_out.batches()
    model = LLAMA.from_pretrained(result.summary.model)
    assert result.summary.eval_loss == model(**make().inputs, use_cache=False).loss.item()
    assert any(
        line.startswith("data: held out: 4 texts (text) in JSON lines, held-out.jsonl;")
        for line in task.describe()
    )
    card = Path(config.output, "model", "README.md").read_text()
    assert "| held out | held-out.jsonl |" in card
    assert f"| last held-out loss | {result.summary.eval_loss:.4f} |" in card


@pytest.mark.dear("a whole run, a shorter one, and one that is stopped and resumed")
@pytest.mark.parametrize(
    "options", [{}, {"lora": 4, "merge": True, "precision": "fp32"}], ids=["full", "merged"]
)
def test_a_resumed_run_exports_the_same_best_weights(
    options: dict[str, Any], config: FineTuneConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, **options, keep_best=True, resume="auto")
    want = run(config)
    losses = eval_losses(config)
    best = min(losses, key=losses.__getitem__)
    assert best < config.steps, "the case shows nothing if the last step is the best"
    assert (want.summary.best_step, want.summary.best_eval_loss) == (best, losses[best])
    short = run(config, output=str(tmp_path / "short"), steps=best, keep_best=False)
    assert short.summary.model is not None
    assert want.summary.model is not None
    assert_same(LLAMA.from_pretrained(want.summary.model), LLAMA.from_pretrained(short.summary.model))
    there = str(tmp_path / "again")
    stopped = run(config, stop_before_evaluation=best, output=there)
    assert stopped.exit_code == 128 + signal.SIGUSR1
    assert best not in eval_losses(dataclasses.replace(config, output=there))
    resumed = run(config, output=there)
    assert resumed.losses == want.losses
    assert eval_losses(dataclasses.replace(config, output=there)) == losses
    assert (resumed.summary.best_step, resumed.summary.best_eval_loss) == (best, losses[best])
    assert files_of(resumed) == files_of(want)
    assert f"of step {best}, which had the lowest held-out loss" in files_of(want)["README.md"].decode()
    assert len(list(Path(there, "best").iterdir())) == 1


def test_best_weights_of_a_checkpoint_stay_until_the_next_one_is_whole(tmp_path: Path) -> None:
    best = BestWeights(tmp_path / "best")
    best.offer(1, 3.0, Path.mkdir)
    best.saved()
    state = json.loads(json.dumps(best.state()))
    for step, loss in ((2, 2.0), (3, 1.0), (4, 1.0), (5, float("nan"))):
        best.offer(step, loss, Path.mkdir)
    assert (best.step, best.loss, best.evaluated) == (3, 1.0, 5)
    assert sorted(entry.name for entry in (tmp_path / "best").iterdir()) == ["step-1", "step-3"]
    resumed = BestWeights(tmp_path / "best")  # as after a kill
    resumed.restore(state)
    assert (resumed.step, resumed.loss, resumed.evaluated) == (1, 3.0, 1)
    assert [entry.name for entry in (tmp_path / "best").iterdir()] == ["step-1"]
    resumed.offer(3, 1.0, Path.mkdir)
    resumed.saved()
    assert [entry.name for entry in (tmp_path / "best").iterdir()] == ["step-3"]
    with pytest.raises(CheckpointError, match=r"step-1 is missing.* --no-keep-best"):
        BestWeights(tmp_path / "best").restore(state)


@pytest.mark.parametrize(
    "state",
    [
        3,
        {},
        {"step": 1, "loss": "low", "evaluated": 1},
        {"step": 5, "loss": 1.0, "evaluated": 1},
        {"step": "../..", "loss": 1.0, "evaluated": 1},
        {"step": 1, "loss": float("nan"), "evaluated": 1},
    ],
)
def test_what_no_run_has_written_of_the_best_weights_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="for the best weights"):
        BestWeights(tmp_path).restore(state)


def test_held_out_records_that_are_learned_or_missing_are_refused(
    config: FineTuneConfig, tmp_path: Path
) -> None:
    (tmp_path / "link.jsonl").symlink_to(config.data)
    with pytest.raises(ConfigError, match=r"--eval-data .*link\.jsonl is also in --data"):
        run(config, eval_data=str(tmp_path / "link.jsonl"))
    with pytest.raises(gemini.errors.InputError, match="--eval-data nowhere does not exist"):
        run(config, eval_data="nowhere")
    for name, text in (("records.txt", b'{"text": "a"}'), ("packed.txt", b"PK\3\4")):
        (tmp_path / name).write_bytes(text)
    with pytest.raises(gemini.errors.InputError, match=r"--eval-data .*records\.txt seems to hold JSON"):
        run(config, eval_data=str(tmp_path / "records.txt"))
    with pytest.raises(gemini.errors.InputError, match=r"--eval-data .*packed\.txt seems to be a zip"):
        run(config, eval_data=str(tmp_path / "packed.txt"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="--eval-data has 0 tokens"):
        run(config, eval_data=str(tmp_path / "empty.jsonl"))
    assert not Path(config.output).exists()


def test_other_held_out_records_are_another_run_and_its_weights_are_kept_from_foreign_hands(
    config: FineTuneConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(config, steps=2, keep_best=True)
    run(config)
    with pytest.raises(ConfigError, match=r"has eval_share = 0\.0, but this command has eval_share = 0\.1"):
        run(config, eval_data=None, eval_share=0.1, resume="yes")
    with pytest.raises(ConfigError, match="best is the model that the run starts from"):
        run(config, model=str(next(Path(config.output, "best").iterdir())), overwrite=True)
    (tmp_path / "mine" / "best").mkdir(parents=True)
    with pytest.raises(ConfigError, match="best exists and was not written by a run"):
        run(config, output=str(tmp_path / "mine"))
    run(config, overwrite=True, keep_best=False)
    assert not Path(config.output, "best").exists()
