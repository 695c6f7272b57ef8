"""Checkpoints that this user may not remove or read, as another user's or after chmod."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_models import Run, assert_same, start
from permissions import modes_respected

from gemini.checkpoint import new_checkpoint
from gemini.errors import IoError

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
