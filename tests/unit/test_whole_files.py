"""Checkpoints of trainers: the next save removes what killed ones left, and nothing of a live one."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini.comm.ranks import Rank
from gemini.errors import IoError
from gemini.integrations.whole_files import remove_whole, written_whole
from gemini.system.files import DirectoryLock


def partial(directory: Path, name: str, entry: str = "") -> Path:
    """Make a directory as a killed save of ``name`` leaves it, and return it."""
    path = directory / f".{name}.partial"
    (path / (entry or name)).mkdir(parents=True)
    (path / (entry or name) / "weights").write_bytes(b"some")
    return path


def save(target: Path) -> None:
    with written_whole(target, Rank()) as made:
        made.write_text("whole")


def test_the_next_save_removes_what_no_process_holds(tmp_path: Path) -> None:
    left = partial(tmp_path, "epoch=1.ckpt")
    live = partial(tmp_path, "epoch=2.ckpt")
    of_others = partial(tmp_path, "download", entry="part-1")
    lock = DirectoryLock(live)
    save(tmp_path / "epoch=3.ckpt")
    assert sorted(tmp_path.iterdir()) == sorted([live, of_others, tmp_path / "epoch=3.ckpt"])
    assert not left.exists()
    lock.release()
    remove_whole(tmp_path / "epoch=3.ckpt")
    save(tmp_path / "epoch=4.ckpt")
    assert sorted(tmp_path.iterdir()) == sorted([of_others, tmp_path / "epoch=4.ckpt"])


def test_two_processes_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    live = partial(tmp_path, "last.ckpt")
    lock = DirectoryLock(live)
    with pytest.raises(IoError, match="another process is writing it"):
        save(tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == [live.name]
    lock.release()
    save(tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
