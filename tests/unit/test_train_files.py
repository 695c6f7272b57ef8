"""A run's own files: a disk that takes no more never costs the run, and is never taken for a difference."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_train_engine import FakeEngine, fake_is_complete

from gemini.cli import main
from gemini.cli.command_line import EXIT_ERROR
from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.jobs.gpt import job
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.job import TrainResult
from gemini.jobs.run.outcome import draw_timeline
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.verify import WeightFile

TIMELINE = [
    {
        "moment": moment,
        "phase": "forward",
        "device_bytes": 1,
        "host_bytes": 0,
        "disk_bytes": 1,
        "non_model_bytes": 1,
    }
    for moment in range(3)
]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
    return TrainConfig(
        data=str(text),
        layers=1,
        hidden=16,
        heads=2,
        seq=16,
        batch=2,
        steps=5,
        checkpoint=str(tmp_path / "run"),
    )


def run(config: TrainConfig, engine: type[FakeEngine] = FakeEngine, **changes: Any) -> TrainResult:
    return job.run(
        dataclasses.replace(config, **changes), engine_factory=engine, is_complete=fake_is_complete
    )


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``nbytes``, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def blocking(name: str, steps: range) -> type[FakeEngine]:
    """Return an engine during whose ``steps`` (from 1) nothing can be written to ``name`` of the run."""

    class Blocking(FakeEngine):
        def __init__(self, config: TrainConfig) -> None:
            super().__init__(config)
            self._path = Path(str(config.checkpoint), name)
            self._aside = self._path.with_name("aside")

        def step(self) -> None:
            super().step()
            if self.steps == steps.start:
                if self._path.exists():
                    self._path.rename(self._aside)
                self._path.mkdir()
            if self.steps == steps.stop:
                self._path.rmdir()
                self._aside.rename(self._path)

        def timeline(self) -> list[dict[str, Any]]:
            return TIMELINE

    return Blocking


class RefusesToLoad(FakeEngine):
    """An engine that must not be asked for a checkpoint."""

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        raise AssertionError(f"{directory} is loaded")


def test_a_line_that_did_not_fit_is_written_whole_with_the_next(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, fake_is_complete)
    directory.start({}, {})
    directory.append_metrics({"step": 1, "loss": 1.5})
    before = directory.metrics.read_bytes()
    with files_of_at_most(len(before) + 7), pytest.raises(IoError, match=r"metrics\.jsonl"):
        directory.append_metrics({"step": 2, "loss": 2.5})
    assert directory.metrics.read_bytes() == before
    directory.append_metrics({"step": 3, "loss": 3.5})
    assert [record["loss"] for record in directory.read_metrics(3)] == [1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    "line",
    ["[1]", '{"step": "1", "loss": 1.0}', '{"step": 1}', '{"step": 1, "loss": []}', "\0", 100_000 * "["],
)
def test_a_line_of_the_metrics_that_is_no_record_is_named_and_nothing_is_lost(
    line: str, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path, fake_is_complete)
    directory.metrics.write_text(f'{{"step": 1, "loss": 2.5}}\n{line}\n{{"step": 3, "loss": 1.5}}\n')
    before = directory.metrics.read_bytes()
    with pytest.raises(CheckpointError, match=r"line 2 of .*metrics\.jsonl .*remove the file"):
        directory.read_metrics(3)
    assert directory.metrics.read_bytes() == before


def test_training_goes_on_without_metrics_and_saves_and_says_so(config: TrainConfig) -> None:
    result = run(config, blocking("metrics.jsonl", range(2, 9)))
    assert result.exit_code == 0
    assert result.summary.last_step == 5
    assert [note for note in result.summary.notes if "metrics.jsonl" in note]
    assert fake_is_complete(Path(str(config.checkpoint), "checkpoint"))


def test_metrics_come_back_with_the_disk(config: TrainConfig) -> None:
    result = run(config, blocking("metrics.jsonl", range(2, 4)))
    lines = Path(str(config.checkpoint), "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == list(result.losses)


@pytest.mark.parametrize("name", ["summary.json", "memory.png"])
def test_a_summary_or_picture_that_cannot_be_written_is_a_note(config: TrainConfig, name: str) -> None:
    if name == "memory.png":
        pytest.importorskip("matplotlib")
    result = run(config, blocking(name, range(2, 9)))
    assert result.exit_code == 0
    assert [note for note in result.summary.notes if name in note]
    assert not list(Path(str(config.checkpoint)).glob("*.tmp"))


def test_an_error_of_a_runs_file_is_code_2_and_one_line(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--quiet", "--data", str(config.data), "--checkpoint", str(config.checkpoint)]
    arguments += ["--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--steps", "1"]
    assert main.main(arguments) == 0
    metrics = Path(str(config.checkpoint), "metrics.jsonl")
    metrics.unlink()
    metrics.mkdir()
    assert main.main([*arguments, "--resume"]) == EXIT_ERROR
    assert capsys.readouterr().err.splitlines()[-1].startswith("gemini: error: ")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_metrics_that_are_no_file_are_named_before_anything_is_loaded(config: TrainConfig, make: Any) -> None:
    run(config, steps=2)
    metrics = Path(str(config.checkpoint), "metrics.jsonl")
    metrics.unlink()
    make(metrics)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is not a regular file; remove it"):
        run(config, RefusesToLoad, resume="yes")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is not a regular file"):
        RunDirectory(metrics.parent, fake_is_complete).read_metrics(2)
    with pytest.raises(IoError, match=r"metrics\.jsonl"):
        RunDirectory(metrics.parent, fake_is_complete).append_metrics({"step": 3})
    assert fake_is_complete(metrics.parent / "checkpoint")


@pytest.mark.parametrize("again", [{"overwrite": True}, {"resume": "yes"}])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "summary.json", "memory.png", "run.json.tmp", "summary.json.tmp"]
)
def test_a_directory_in_the_place_of_a_file_costs_no_older_run(
    config: TrainConfig, name: str, again: dict[str, Any]
) -> None:
    run(config, steps=2)
    directory = Path(str(config.checkpoint))
    before = (directory / "run.json").read_bytes()
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir()
    with pytest.raises(
        (ConfigError, CheckpointError), match=f"{name} is (a directory; move|not a regular file)"
    ):
        run(config, **again)
    assert fake_is_complete(directory / "checkpoint")
    assert (directory / "run.json").read_bytes() == before


@pytest.mark.parametrize("options", [{"resume": "yes"}, {"overwrite": True}])
def test_what_a_kill_left_half_written_goes_with_the_next_run(
    config: TrainConfig, options: dict[str, Any]
) -> None:
    run(config, steps=2)
    directory = Path(str(config.checkpoint))
    before = {entry.name for entry in directory.iterdir()}
    for name in ("run.json", "metrics.jsonl", "summary.json", "memory.png"):
        (directory / f"{name}.tmp").write_text("half")
    (directory / "mine.tmp").touch()
    assert run(config, **options).exit_code == 0
    assert {entry.name for entry in directory.iterdir()} == before | {"mine.tmp"}


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "absent", fake_is_complete)
    with pytest.raises(IoError, match=r"summary\.json"):
        directory.write_summary({})
    with pytest.raises(IoError, match="absent"):
        directory.append_metrics({"step": 1})


def test_a_picture_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    with files_of_at_most(100), pytest.raises(IoError, match=r"memory\.png"):
        draw_timeline(path, TIMELINE, {"device": 10})
    assert list(tmp_path.iterdir()) == []


def test_weights_that_cannot_be_set_aside_are_an_io_error(tmp_path: Path) -> None:
    weights = [("a", torch.ones(1000))]
    with WeightFile(tmp_path / "absent") as file, pytest.raises(IoError, match="--verify"):
        file.write(weights)
    with WeightFile(tmp_path) as file, files_of_at_most(100), pytest.raises(IoError, match="--verify"):
        file.write(weights)


def test_weights_that_are_set_aside_and_cut_short_are_an_io_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WeightFile(tmp_path) as file:
        file.write([("a", torch.ones(1000))])
        ends = iter([4000 - 8, 0])  # it raises if it is asked a third time
        monkeypatch.setattr("os.preadv", lambda *_: next(ends))
        with pytest.raises(IoError, match=r"read back the weights for --verify.*the file ends early"):
            list(file.read())


def test_weights_that_are_set_aside_come_back_in_order_and_in_fp32(tmp_path: Path) -> None:
    weights = [
        ("turned", torch.arange(6.0).view(2, 3).t()),
        ("half", torch.tensor(0.1, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("last", torch.full((70,), 3.5)),
    ]
    with WeightFile(tmp_path) as file:
        file.write(weights)
        found = list(file.read())
    assert [name for name, _ in found] == ["turned", "half", "empty", "last"]
    for (_, values), (_, weight) in zip(found, weights, strict=True):
        assert values.dtype is torch.float32
        assert torch.equal(values, weight.float())


def linked_checkpoint(config: TrainConfig, target: Path) -> Path:
    """Return the checkpoint directory of the run, a link to ``target``."""
    link = Path(str(config.checkpoint), "checkpoint")
    link.parent.mkdir()
    link.symlink_to(target)
    return link


def test_checkpoints_may_be_on_another_disk(config: TrainConfig, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    link = linked_checkpoint(config, disk)
    with pytest.raises(CheckpointError, match="--resume auto"):
        run(config, resume="yes")
    assert run(config, steps=2).summary.last_step == 2
    assert run(config, resume="yes", steps=3).summary.first_step == 2
    (disk / "below").mkdir()
    (disk / "below" / "link").symlink_to(tmp_path)
    (disk / "link").symlink_to(tmp_path)
    assert run(config, overwrite=True).summary.last_step == 5
    assert link.is_symlink()
    assert fake_is_complete(disk)
    assert [entry.name for entry in disk.iterdir()] == ["state"]
    assert Path(config.data).exists()


def test_a_link_to_a_disk_that_is_not_there_is_said(config: TrainConfig, tmp_path: Path) -> None:
    link = linked_checkpoint(config, tmp_path / "disk")
    for options in ({}, {"overwrite": True}):
        with pytest.raises(ConfigError, match=f"{link} is a link to {tmp_path / 'disk'}.*mounted"):
            run(config, **options)
    assert link.is_symlink()
    assert not (tmp_path / "disk").exists()


def test_a_forked_child_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, fake_is_complete)
    directory.start({}, {})
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # lives on with a copy of all descriptors
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        with pytest.raises(ConfigError, match="another process trains"):
            RunDirectory(tmp_path, fake_is_complete).refuse_older_run()
        directory.release()
        other = RunDirectory(tmp_path, fake_is_complete)
        other.refuse_older_run()
        other.release()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)
