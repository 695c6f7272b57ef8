"""A conversion that a full disk, Ctrl-C or a kill ends: one line, and nothing that stays."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from fault_training import adam, file_size_limit, managed, train_step
from interrupts import interrupt_at

from gemini import checkpoint
from gemini.checkpoint.convert import convert
from gemini.cli.command_line import EXIT_ERROR, EXIT_INTERRUPTED
from gemini.cli.main import main
from gemini.system.durable import scratch_directory

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

FORMS = ["hf", "torch", "dcp"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint below ``run``."""
    model = managed(tmp_path)
    optimizer = adam(model)
    train_step(model, optimizer, 0)
    path = checkpoint.save(tmp_path / "run", model, optimizer)
    model.close()
    return path


def names(directory: Path) -> list[str]:
    """Return what is there beside the checkpoint."""
    return sorted(entry.name for entry in directory.iterdir() if entry.name != "run")


@pytest.mark.parametrize("form", FORMS)
def test_a_byte_too_few_is_an_error_of_one_line(
    saved: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "run" / "whole"
    convert(saved, whole, form)
    largest = max(path.stat().st_size for path in (whole, *whole.rglob("*")) if path.is_file())
    with file_size_limit(largest - 1):
        code = main(["ckpt", "convert", str(saved), str(tmp_path / "out"), "--to", form])
    (said,) = capsys.readouterr().err.splitlines()
    assert code == EXIT_ERROR
    assert "cannot convert the checkpoint: " in said
    assert str(tmp_path / "out") in said
    assert names(tmp_path) == []


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_ctrl_c_inside_of_torch_is_code_130(saved: Path, tmp_path: Path, form: str) -> None:
    command = ["ckpt", "convert", str(saved), str(tmp_path / "out"), "--to", form]
    codes, number = [EXIT_INTERRUPTED], 1
    while codes[-1]:
        sys.settrace(
            interrupt_at(number, "call", ("checkpoint/utils.py", "filesystem.py", "serialization.py"))
        )
        try:
            codes.append(main(command))
        finally:
            sys.settrace(None)
        assert codes[-1] in (0, EXIT_INTERRUPTED)
        assert names(tmp_path) == [] or not codes[-1]
        number += 1 + number // 4
    assert len(codes) > 5


def convert_until_killed(source: Path, target: Path, form: str) -> None:
    """Convert in a forked child that is killed right before the target would appear."""
    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(
                lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None
            )
            convert(source, target, form)
        finally:
            os._exit(1)  # the rest of the test is not for this process
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("form", FORMS)
def test_what_a_kill_leaves_goes_with_the_next_conversion(saved: Path, tmp_path: Path, form: str) -> None:
    convert_until_killed(saved, tmp_path / "out", form)
    (leftover,) = names(tmp_path)
    convert(saved, tmp_path / "other", form)
    assert names(tmp_path) == [leftover, "other"]
    convert(saved, tmp_path / "out", form)
    assert names(tmp_path) == ["other", "out"]


def test_what_is_in_use_or_the_users_stays(saved: Path, tmp_path: Path) -> None:
    mine = [".out-settings", ".out.gemini-", ".out.gemini-12345678x"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.gemini-abcdefgh").symlink_to(tmp_path / mine[0])
    (tmp_path / ".out.gemini-12345678").write_text("mine")
    with scratch_directory(tmp_path / "out") as scratch:
        convert(saved, tmp_path / "out", "hf")
        assert scratch.is_dir()
    assert names(tmp_path) == sorted([*mine, ".out.gemini-12345678", ".out.gemini-abcdefgh", "out"])
