"""Where the output of a command goes is no reason for another exit code, nor to stop working."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from programs import run_python

from gemini.cli.command_line import EXIT_ERROR
from gemini.cli.console import Console
from gemini.cli.main import main

TRACE = str(Path(__file__).resolve().parents[2] / "benchmarks/traces/gpt2.json")
SIMULATE = ["simulate", TRACE, "--policy", "lru"]


@pytest.fixture
def closed_pipe() -> Iterator[TextIO]:
    """A stream whose reader has left; nothing may be left in it that fails once more as it is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        yield stream


@pytest.mark.parametrize("arguments", [["check"], SIMULATE, [*SIMULATE, "--json"]])
def test_a_reader_that_has_left_is_no_error(
    arguments: list[str], closed_pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    assert main(arguments) == 0


def test_help_for_a_reader_that_has_left_is_no_error(
    closed_pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert not end.value.code


def test_an_error_stays_one_although_the_reader_has_left(
    closed_pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", closed_pipe)
    print("what was found before")
    assert main(["plan", "no-such-model"]) == EXIT_ERROR


@pytest.mark.parametrize("arguments", [["check"], [*SIMULATE, "--json"], ["--help"]])
def test_a_full_disk_under_the_output_is_an_error_of_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # argparse ignores an error of its own writing
    command = [sys.executable, "-m", "gemini", *arguments]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == EXIT_ERROR
    assert ended.stderr.count("\n") == 1
    assert "No space left on device; free some space" in ended.stderr


def test_progress_that_nobody_reads_does_not_stop_the_work(
    closed_pipe: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", closed_pipe)
    console = Console(stderr=True)
    for step in range(3):
        console.print(f"step {step}")


def test_a_full_disk_under_the_progress_does_not_stop_the_work(tmp_path: Path) -> None:
    text, run = tmp_path / "text", tmp_path / "run"
    text.write_text("all work and no play " * 100)
    command = ["-m", "gemini.cli.main", "train", "--data", str(text), "--checkpoint", str(run)]
    with Path("/dev/full").open("w") as full:
        options = ["--steps", "3", "--layers", "1", "--hidden", "16"]
        ended = run_python([*command, *options], stderr=full)
        assert ended.returncode == 0
        assert "loss, first to last" in ended.stdout
        refused = run_python([*command, *options], stderr=full)
    assert refused.returncode == EXIT_ERROR  # it already holds a run


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_streams_that_the_caller_has_closed_are_no_error(closed: str) -> None:
    command = f"exec {shlex.quote(sys.executable)} -m gemini.cli.main check {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True).returncode == 0
