"""A run's directory that something has happened to: each command on it comes to its end, or says in one line
why it does not. It waits for nothing, and opens nothing outside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_inputs import Outside, no_longer_than

from gemini.cli.command_line import EXIT_ERROR
from gemini.cli.main import main

_SECONDS = 120
TRAIN = ["train", "--quiet", "--layers", "1", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "1"]


def _link(path: Path, target: object) -> None:
    path.symlink_to(str(target))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _in_its_place(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "not a number": lambda path: path.write_bytes(b"NaN\n"),
    "other types": lambda path: path.write_bytes(
        b'{"options": [], "step": {}, "loss": NaN, "sequence": []}\n'
    ),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "bytes": lambda path: path.write_bytes(b"\xff\x00\xfe" * 9),
    "gone": Path.unlink,
    "directory": _in_its_place(Path.mkdir),
    "fifo": _in_its_place(os.mkfifo),
    "link to nothing": _in_its_place(lambda path: _link(path, "nowhere")),
    "link to itself": _in_its_place(lambda path: _link(path, path.name)),
    "link to a device": _in_its_place(lambda path: _link(path, "/dev/zero")),
    "sparse": lambda path: os.truncate(path, 2**40),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a run of two steps; its text lies beside it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    path.with_name("text").write_bytes(b"the quick brown fox jumps over the lazy dog; " * 40)
    assert main(_arguments(path, path.with_name("text"), 2)) == 0
    return path


def _arguments(run: Path, text: Path, steps: int) -> list[str]:
    return [*TRAIN, "--data", str(text), "--steps", str(steps), "--checkpoint", str(run)]


@pytest.mark.parametrize(
    ("way", "damage"),
    [
        *[("--resume", damage) for damage in [*DAMAGES, "link out"]],
        # Nothing of the older run is read.
        *[("--overwrite", damage) for damage in ("directory", "fifo", "link to itself", "link out")],
    ],
)
def test_a_damaged_run_is_gone_on_with_or_refused_in_one_line(
    way: str, damage: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside").mkdir()
    outside = Outside(tmp_path / "outside")
    secret = outside.path / "secret"
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert len(files) > 6
    wrong = []
    for name in files:
        run = Path(shutil.copytree(whole, tmp_path / "run"))
        shutil.copy(run / name, secret)
        if damage == "link out":
            (run / name).unlink()
            _link(run / name, secret)
        else:
            DAMAGES[damage](run / name)
        outside.was_touched()
        capsys.readouterr()
        with no_longer_than(_SECONDS):
            code = main([*_arguments(run, whole.with_name("text"), 3), way])
        said = capsys.readouterr().err.splitlines()
        lines = [line for line in said if line.startswith("gemini: error: ")]
        if code not in (0, EXIT_ERROR) or "Traceback" in "".join(said) or (code and len(lines) != 1):
            wrong.append(f"{name}: code {code}: {said[-3:]}")
        if outside.was_touched():
            wrong.append(f"{name}: opens what is outside, code {code}: {said[-1:]}")
        shutil.rmtree(run)
    outside.close()
    assert not wrong, "\n".join(wrong)
