"""Checkpoints that this user may not remove or read, as another user's or after chmod."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_models import Run, assert_same, start
from permissions import modes_respected

from gemini import checkpoint
from gemini.checkpoint import new_checkpoint
from gemini.cli.command_line import EXIT_ERROR
from gemini.cli.main import main
from gemini.errors import CheckpointError, IoError

pytestmark = pytest.mark.usefixtures("one_thread", "an_ordinary_user")


@pytest.fixture
def an_ordinary_user(tmp_path: Path) -> Iterator[None]:
    """Be bound by modes, and leave directories behind that can be removed."""
    with modes_respected():
        yield
        for directory in [tmp_path, *tmp_path.rglob("*")]:
            if directory.is_dir() and not directory.is_symlink():
                directory.chmod(0o700)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    """A run after one step, and its checkpoint."""
    run = start().train(1)
    return run, run.save(tmp_path / "run")


def test_a_checkpoint_that_cannot_be_removed_stops_no_save(
    saved: tuple[Run, Path], caplog: pytest.LogCaptureFixture
) -> None:
    run, path = saved
    path.chmod(0o500)  # entries of it cannot be removed
    for _ in range(4):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gemini"):
            newest = run.train(1).save(path.parent, keep=1)
        assert caplog.messages
        for message in caplog.messages:
            assert f"{path}.partial cannot be removed" in message
            assert "by hand" in message
    assert {entry.name for entry in path.parent.iterdir()} == {newest.name, f"{path.name}.partial"}
    other = start(seed=7)
    other.load(path.parent)
    assert_same(other, run)


def test_what_can_be_removed_of_a_checkpoint_is(saved: tuple[Run, Path]) -> None:
    run, path = saved
    (path / "below").mkdir()
    (path / "below" / "file").write_text("")
    (path / "below").chmod(0o500)
    run.train(1).save(path.parent, keep=1)
    assert [entry.name for entry in path.with_name(f"{path.name}.partial").iterdir()] == ["below"]


def test_a_save_that_fails_names_the_directory(saved: tuple[Run, Path]) -> None:
    run, path = saved
    path.parent.chmod(0o500)
    with pytest.raises(IoError, match=rf"cannot save a checkpoint: Permission denied.*{path.parent}"):
        run.train(1).save(path.parent)
    path.parent.chmod(0o700)
    bare = PermissionError(1, "Operation not permitted", "model-00001-of-00001.safetensors")
    with pytest.raises(IoError) as caught, new_checkpoint(path.parent, 9):
        raise bare
    assert caught.value.filename == str(path.parent)


TINY = ["--quiet", "--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--steps", "1"]


@pytest.fixture
def a_training(tmp_path: Path) -> list[str]:
    """The arguments of a training, and a run of it in ``training``."""
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
    arguments = ["train", "--data", str(tmp_path / "text.txt"), "--checkpoint", str(tmp_path / "training")]
    assert main([*arguments, *TINY]) == 0
    return arguments


@pytest.mark.parametrize("place", ["training", "training/checkpoint", "training/checkpoint/step-00000001"])
def test_what_may_not_be_read_is_an_error_of_one_line(
    a_training: list[str], tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / place).chmod(0)
    run, target = str(tmp_path / "training"), str(tmp_path / "out")
    commands = [[*a_training, "--resume"], [*a_training, *TINY]]
    commands += [["ckpt", command, run] for command in ("inspect", "verify")]
    commands += [["ckpt", "convert", run, target, "--to", form] for form in ("hf", "torch", "dcp")]
    for command in commands:
        assert main(command) == EXIT_ERROR
        said = capsys.readouterr().err
        assert said.splitlines()[-1].startswith("gemini: error: ")
        assert f"{tmp_path / place}" in said
        assert "Permission denied" in said
        assert "change its permissions" in said
        assert "--overwrite" not in said


def test_a_target_that_may_not_be_looked_at_is_an_error(
    saved: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    target = tmp_path / "closed" / "out"
    assert main(["ckpt", "convert", str(saved[1]), str(target), "--to", "torch"]) == EXIT_ERROR
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["older", "newer"])
def test_a_checkpoint_that_may_not_be_read_does_not_keep_another_from_loading(
    saved: tuple[Run, Path], closed: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, path = saved
    newest = run.train(1).save(path.parent)
    shut, left = (path, newest) if closed == "older" else (newest, path)
    shut.chmod(0)
    assert checkpoint.is_complete(path.parent)
    assert checkpoint.latest(path.parent) == left
    with caplog.at_level(logging.WARNING, "gemini"):
        run.load(path.parent)
    assert run.model.manager.step == (2 if closed == "older" else 1)
    assert [message for message in caplog.messages if f"cannot read {shut}" in message]
    run.train(1).save(path.parent, keep=1)
    assert shut.is_dir()  # nobody knew what it was


def test_the_others_are_verified_where_one_may_not_be_read(
    saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = saved
    newest = run.train(1).save(path.parent)
    path.chmod(0)
    for command in ("inspect", "verify"):
        assert main(["ckpt", command, str(path.parent)]) == EXIT_ERROR
        said = capsys.readouterr()
        assert newest.name in said.out
        assert f"cannot read {path}" in said.err


def test_where_none_may_be_read_nobody_says_that_there_is_none(saved: tuple[Run, Path]) -> None:
    run, path = saved
    next(path.glob("model-0*")).unlink()  # damaged, and the newest that can be read
    older = run.save(path.parent)
    older.chmod(0)
    for look in (checkpoint.is_complete, checkpoint.latest):
        with pytest.raises(CheckpointError, match=f"cannot read {older}.*read it as that user"):
            look(path.parent)
