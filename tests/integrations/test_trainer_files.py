"""Checkpoints of GeminiTrainer are whole or absent; what is not whole, or of two saves, is not resumed."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trainer_runs import Tokens, arguments, build, figures, ours, tight

from gemini.errors import CheckpointError
from gemini.integrations import trainer_files
from gemini.integrations.transformers import GeminiTrainer

SAVING = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A run of six steps with three checkpoints, and what it printed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    return run, figures(ours(arguments(run, **SAVING)))


@pytest.fixture
def run(trained: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b"_step_count")] += 1  # within a member of the archive
    path.write_bytes(data)


def replace_by_older(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent.with_name("checkpoint-2") / path.name, path)


def another_step(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": 2}))


def save_only_model(path: Path) -> None:
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "save": None, "files": []}))
    shutil.rmtree(path.parent / "gemini")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemini", shutil.rmtree, "which has the optimizer's states and is not there"),
        ("gemini", replace_by_older, "of another save than it was saved with"),
        ("gemini/step-00000006/seal.json", Path.unlink, "no complete checkpoint"),
        ("gemini/step-00000006/optimizer.index.json", truncate, "is damaged"),
        ("gemini.json", truncate, "copy or download the file again"),
        ("gemini.json", save_only_model, "save_only_model"),
        ("trainer_state.json", truncate, "copy or download the file again"),
        ("trainer_state.json", Path.unlink, "cannot read"),
        ("trainer_state.json", another_step, "is of step 6, .* of step 2"),
        ("scheduler.pt", truncate, "is damaged"),
        ("scheduler.pt", change_a_byte, "is damaged"),
        ("rng_state.pth", Path.unlink, "is not there"),
        ("rng_state.pth", lambda path: path.write_bytes(b""), "is damaged"),
    ],
)
def test_what_is_not_whole_is_named_and_passed_over(
    run: Path, name: str, change: Callable[[Path], Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(run / "checkpoint-6" / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer_files.check(run / "checkpoint-6")
    assert "\n" not in str(caught.value)
    assert "checkpoint-6" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert trainer_files.newest(run) == run / "checkpoint-4"
    assert str(caught.value) in caplog.text


def link_out(path: Path) -> None:
    shutil.copy(path, path.parents[2] / "outside")
    path.unlink()
    path.symlink_to(path.parents[2] / "outside")


def become(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def unpacks_to_more(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(10**6))


def needs_a_password(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(mark) + flags] |= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "fifo": become(os.mkfifo),
    "directory": become(Path.mkdir),
    "link to nothing": become(lambda path: path.symlink_to("nowhere")),
    "link to itself": become(lambda path: path.symlink_to(path.name)),
    "link to a device": become(lambda path: path.symlink_to("/dev/zero")),
    "link out": link_out,
    "empty": lambda path: path.write_bytes(b""),
    "cut": truncate,
    "text": lambda path: path.write_text("[NaN]"),
    "sparse": lambda path: os.truncate(path, 2**40),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["trainer_state.json", "gemini.json", "scheduler.pt", "rng_state.pth"])
def test_no_damage_of_a_file_is_waited_for_or_raises_anything_raw(run: Path, name: str, damage: str) -> None:
    DAMAGES[damage](run / "checkpoint-6" / name)
    with pytest.raises(CheckpointError, match="checkpoint-6") as caught:
        trainer_files.check(run / "checkpoint-6")
    assert "\n" not in str(caught.value)
    assert trainer_files.newest(run) == run / "checkpoint-4"


@pytest.mark.parametrize("damage", [unpacks_to_more, needs_a_password])
def test_an_archive_that_torch_does_not_write_is_refused(run: Path, damage: Callable[[Path], Any]) -> None:
    damage(run / "checkpoint-6" / "scheduler.pt")
    with pytest.raises(CheckpointError, match=r"scheduler\.pt is damaged"):
        trainer_files.check(run / "checkpoint-6")


@pytest.mark.parametrize(
    "change",
    [
        {"global_step": "6"}, {"global_step": -6}, {"global_step": True}, {"global_step": 10**400},
        {"log_history": {}}, {"log_history": [1]}, {"best_metric": "x"}, {"stateful_callbacks": []},
        {"total_flos": None}, {"another": 1},
    ],
)  # fmt: skip
def test_a_state_that_transformers_would_stumble_over_is_refused(run: Path, change: dict[str, Any]) -> None:
    path = run / "checkpoint-6" / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=rf"trainer_state\.json.*{next(iter(change))}"):
        trainer_files.check(path.parent)


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("content", [[1], {"python": 1}, torch.ones(2)])
def test_a_whole_file_of_something_else_is_an_error_in_one_line(run: Path, name: str, content: Any) -> None:
    if name == "scheduler.pt" and isinstance(content, dict):
        pytest.skip("a schedule takes any attribute")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    (run / "checkpoint-4" / name).write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match=r"cannot go on from .*checkpoint-4") as caught:
        ours(arguments(run), resume=str(run / "checkpoint-4"))
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    trained: tuple[Path, list[dict[str, float]]], run: Path
) -> None:
    shutil.rmtree(run / "checkpoint-6")
    truncate(run / "checkpoint-4" / "trainer_state.json")
    resumed = ours(arguments(run, **SAVING), resume=True)
    assert figures(resumed) == trained[1]
    assert sorted(path.name for path in run.glob("*check*")) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
    ]
    trainer_files.check(run / "checkpoint-4")


def test_a_run_that_was_killed_after_its_last_save_trains_no_further_step(tmp_path: Path) -> None:
    """Its epoch is not over."""
    args = arguments(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=2)
    first = ours(args)
    (tmp_path / "run" / ".checkpoint-2.partial").mkdir()
    second = ours(args, resume=True)
    assert second.state.global_step == 4
    assert not list((tmp_path / "run").glob(".checkpoint-*"))
    want, got = first.model.state_dict(), second.model.state_dict()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []
    assert figures(second)[:4] == figures(first)[:4]


def test_no_whole_checkpoint_is_an_error_that_names_the_newest(run: Path) -> None:
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path / "gemini")
    with pytest.raises(CheckpointError, match=r"checkpoint-6 was saved with .*checkpoint-6/gemini"):
        ours(arguments(run), resume=True)
    with pytest.raises(CheckpointError, match="checkpoint-2/gemini"):
        ours(arguments(run), resume=str(run / "checkpoint-2"))
    shutil.rmtree(run)
    run.mkdir()
    with pytest.raises(ValueError, match="No valid checkpoint"):
        ours(arguments(run), resume=True)


@pytest.mark.parametrize("failing", ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, failing: str) -> None:
    class Failing(GeminiTrainer):
        """Has no space for the second checkpoint."""

    def fail(self: Any, directory: str, *args: Any, **options: Any) -> None:
        getattr(GeminiTrainer, failing)(self, directory, *args, **options)
        if self.state.global_step == 4:
            raise OSError(28, "No space left on device")

    setattr(Failing, failing, fail)
    options = {"gemini": tight(str(tmp_path)), "train_dataset": Tokens(12)}
    trainer = Failing(model=build(), args=arguments(tmp_path / "run", **SAVING), **options)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    trainer_files.check(tmp_path / "run" / "checkpoint-2")


@pytest.mark.parametrize("limit", [1, 2])
def test_best_and_older_checkpoints_stay_as_a_trainer_keeps_them(tmp_path: Path, limit: int) -> None:
    more = {
        "save_total_limit": limit,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "learning_rate": 1.0,  # the first are the best
    }
    found = []
    for kind, options in ((transformers.Trainer, {}), (GeminiTrainer, {"gemini": tight(str(tmp_path))})):
        run = tmp_path / kind.__name__
        data = {"train_dataset": Tokens(12), "eval_dataset": Tokens(4)}
        trainer = kind(model=build(), args=arguments(run, optim="sgd", **more), **data, **options)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint)
        saved = json.loads((best / "trainer_state.json").read_text())
        assert Path(saved["best_model_checkpoint"]) == best
        assert best.is_dir()
        found.append((best.name, sorted(path.name for path in run.iterdir())))
    assert found[0] == found[1]


def test_a_checkpoint_is_pushed_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    trainer = ours(arguments(tmp_path / "run"))
    trainer.args.push_to_hub = True
    monkeypatch.setattr(
        transformers.Trainer,
        "_push_from_checkpoint",
        lambda self, path: pushed.append((path, Path(path, "gemini.json").is_file())),
    )
    trainer._save_checkpoint(trainer.model, None)
    assert pushed == [(str(tmp_path / "run" / "checkpoint-6"), True)]
