"""A script under ``gemini trace`` ends as it does under ``python``, and what was recorded is written."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gemini.cli import main

TRAINING = """
import os
import signal
import torch
from gemini import CPUAdam, GeminiDDP, GeminiOptimizer
from gemini.errors import ConfigError

model = GeminiDDP(torch.nn.Linear(8, 8))
optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
def train(num_steps):
    for step in range(num_steps):
        optimizer.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
train(2)
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., int]:
    def run(text: str, *arguments: str) -> int:
        path = tmp_path / "script.py"
        path.write_text(text)
        return main.main(
            ["trace", "--out", str(tmp_path), "--warmup", "0", "--script", str(path), *arguments]
        )

    return run


def recorded_steps(directory: Path) -> list[str]:
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "step"]


def test_sigterm_writes_what_was_recorded(trace: Callable[..., int], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert trace(f"{TRAINING}os.kill(os.getpid(), signal.SIGTERM)\ntrain(1)\n") == 128 + signal.SIGTERM
    assert recorded_steps(tmp_path) == ["step 1", "step 2"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_keeps_the_meaning_that_a_script_gives_it(trace: Callable[..., int]) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: None)\n"
    assert trace(f"{TRAINING}{handler}os.kill(os.getpid(), signal.SIGTERM)\nraise SystemExit(9)\n") == 9


@pytest.mark.parametrize("error", ["BrokenPipeError", "ConfigError('of ours')", "ValueError", "OSError(5)"])
def test_an_error_of_a_script_is_shown_with_its_lines(
    error: str,
    trace: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch.distributed sets one for the process
    assert trace(f"{TRAINING}raise {error}\n") == 1
    said = capsys.readouterr().err
    first, *_, line = (each for each in said.splitlines() if each.startswith("  "))
    assert first == f'  File "{tmp_path / "script.py"}", line {TRAINING.count(chr(10)) + 1}, in <module>'
    assert line.strip() == f"raise {error}"
    assert recorded_steps(tmp_path) == ["step 1", "step 2"]


def test_a_script_that_cannot_be_compiled_is_shown(
    trace: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace("def wrong(:\n") == 1
    said = capsys.readouterr().err
    assert "SyntaxError" in said
    assert "cli/trace.py" not in said


RECORDING = """
with model.record_timeline() as timeline:
    train(2)
assert [step.number for step in timeline.timeline().steps] == [{numbers}]
train(2)
"""


def test_a_script_that_records_itself_goes_on_and_what_was_recorded_before_is_written(
    trace: Callable[..., int], tmp_path: Path
) -> None:
    assert trace(TRAINING + RECORDING.format(numbers="3, 4")) == 0
    assert recorded_steps(tmp_path) == ["step 1", "step 2"]


def test_a_model_that_the_script_records_is_recorded_once_that_has_ended(
    trace: Callable[..., int], tmp_path: Path
) -> None:
    assert trace(TRAINING.removesuffix("train(2)\n") + RECORDING.format(numbers="1, 2")) == 0
    assert recorded_steps(tmp_path) == ["step 3", "step 4"]


@pytest.mark.parametrize("joined", [False, True])
def test_everything_behind_a_script_is_its_own(joined: bool, tmp_path: Path) -> None:
    own = ["--ba", "3", "-o", "x y", "--se=4", "-h", "--", "--script", "--out", "-1", "--ver", ""]
    seen, script = tmp_path / "seen.json", tmp_path / "script.py"
    script.write_text(
        f"import json, pathlib, sys\npathlib.Path({str(seen)!r}).write_text(json.dumps(sys.argv))\n"
    )
    option = [f"--script={script}"] if joined else ["--script", str(script)]
    assert main.main(["trace", "--out", str(tmp_path), *option, *own]) == 0
    assert json.loads(seen.read_text()) == [str(script), *own]


def test_an_option_of_trace_is_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["trace", "--scr", __file__])
    assert "unrecognized arguments" in capsys.readouterr().err
