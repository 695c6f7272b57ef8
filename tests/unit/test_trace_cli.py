"""``gemini trace``: the built-in training or any script, recorded; nothing recorded is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from torch.nn.modules import module as torch_module

from gemini.cli import main
from gemini.cli.command_line import EXIT_ERROR, EXIT_INTERRUPTED
from gemini.errors import ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.task import record_training
from gemini.jobs.run.display import SilentDisplay
from gemini.timeline.event_recorder import TimelineRecorder

TINY = [
    "--layers",
    "2",
    "--hidden",
    "32",
    "--heads",
    "2",
    "--seq",
    "32",
    "--batch",
    "2",
    "--device-bytes",
    "256KiB",
]
TWO_MODELS = """
import sys
import torch
from gemini import CPUAdam, GeminiDDP, GeminiOptimizer

for _ in range(2):
    model = GeminiDDP(torch.nn.Linear(8, 8))
    optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
    for step in range(2):
        optimizer.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
    model.close()
if sys.argv[1] == "fail":
    raise RuntimeError("the script's own")
"""
SCRIPT = """
import sys
import torch
from helper import NAME
from gemini import CPUAdam, GeminiDDP, GeminiOptimizer

model = GeminiDDP(torch.nn.Linear(8, 8))
optimizer = GeminiOptimizer(CPUAdam(model.parameters()), model)
for step in range(int(sys.argv[1])):
    optimizer.backward(model(torch.ones(2, 8)).sum())
    if step == int(sys.argv[2]):
        raise KeyboardInterrupt
    optimizer.step()
model.close()
sys.exit(NAME)
"""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 200)
    return str(path)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("NAME = 7\n")
    path = tmp_path / "train_it.py"
    path.write_text(SCRIPT)
    return str(path)


def traced_steps(directory: Path, name: str = "trace") -> list[str]:
    """Return the steps that a trace file names; the page must be there too."""
    assert "</html>" in (directory / f"{name}.html").read_text()
    events = json.loads((directory / f"{name}.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "step"]


def test_builtin_training_is_recorded_after_its_warmup(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "out"
    options = ["--data", text, "--disk-dir", str(tmp_path / "disk"), "--warmup", "2", "--record", "2"]
    assert main.main(["trace", *TINY, *options, "--out", str(out), "--json"]) == 0
    assert traced_steps(out) == ["step 3", "step 4"]
    summary = json.loads(capsys.readouterr().out)
    assert [step["number"] for step in summary["steps"]] == [3, 4]
    assert all(step["links"]["disk_read"]["nbytes"] > 0 for step in summary["steps"])


def test_summary_is_a_table_that_fits_a_terminal(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", text, "--disk-dir", str(tmp_path), "--out", str(tmp_path), "--quiet"]
    assert main.main(["trace", *TINY, *arguments, "--warmup", "1"]) == 0
    table, _, files = capsys.readouterr().out.rpartition("wrote ")
    assert "computing: backward" in table
    assert "step 4" in table
    assert max(map(len, table.splitlines())) <= 80
    assert str(tmp_path / "trace.html") in files
    step = str(tmp_path / "trace-step.json")
    assert step in files
    assert main.main(["simulate", step, "--device-bytes", "50%", "--disk-bytes", "200%"]) == 0
    assert main.main(["simulate", str(tmp_path / "trace.json")]) == EXIT_ERROR
    assert "trace-step.json" in capsys.readouterr().err


class Interrupting(SilentDisplay):
    """Sends Ctrl-C when so many steps are done, ``times`` in a row."""

    def __init__(self, after_step: int, times: int) -> None:
        self._left, self._times = after_step, times

    def note(self, text: str) -> None:
        """Count a step."""
        self._left -= 1
        if self._left == 0:
            for _ in range(self._times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_what_was_recorded(text: str, times: int) -> None:
    kept: list[TimelineRecorder] = []
    config = TrainConfig(data=text, layers=1, hidden=32, heads=2, seq=32, steps=9)
    display = Interrupting(after_step=3, times=times)
    if times == 1:
        assert record_training(config, warmup=1, display=display, keep=kept.append) == 128 + signal.SIGINT
    else:
        with pytest.raises(KeyboardInterrupt):
            record_training(config, warmup=1, display=display, keep=kept.append)
    (recorder,) = kept
    assert not recorder.is_recording
    assert [step.number for step in recorder.timeline().steps] == [2, 3]


class Noting(SilentDisplay):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep ``text``."""
        self.notes.append(text)


def test_each_step_says_whether_it_was_recorded(text: str) -> None:
    config, display = TrainConfig(data=text, layers=1, hidden=32, heads=2, seq=32, steps=3), Noting()
    assert record_training(config, warmup=1, display=display, keep=lambda _recorder: None) == 0
    said = [note.rpartition("  ")[2] for note in display.notes if note.startswith("step ")]
    assert said == ["warmup, not recorded", "recorded", "recorded"]


def test_ctrl_c_before_the_recording_writes_nothing_and_says_so(text: str) -> None:
    kept: list[TimelineRecorder] = []
    config = TrainConfig(data=text, layers=1, hidden=32, heads=2, seq=32, steps=9)
    with pytest.raises(ConfigError, match="stopped in step 1, before recording began"):
        record_training(config, warmup=2, display=Interrupting(1, times=1), keep=kept.append)
    assert kept == []


def test_a_script_is_recorded_as_it_is(script: str, tmp_path: Path) -> None:
    argv, path, hooks = list(sys.argv), list(sys.path), dict(torch_module._global_forward_pre_hooks)
    options = ["--out", str(tmp_path), "--warmup", "1", "--record", "2"]
    assert main.main(["trace", *options, "--script", script, "6", "-1"]) == 7  # its own exit code
    assert traced_steps(tmp_path) == ["step 2", "step 3"]
    assert (sys.argv, sys.path) == (argv, path)
    assert dict(torch_module._global_forward_pre_hooks) == hooks


def test_ctrl_c_in_a_script_keeps_what_was_recorded(script: str, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path), "--warmup", "0", "--record", "9"]
    assert main.main(["trace", *options, "--script", script, "6", "2"]) == EXIT_INTERRUPTED
    assert traced_steps(tmp_path) == ["step 1", "step 2", "step 3 (incomplete)"]


def test_each_model_of_a_script_gets_its_files(script: str, tmp_path: Path) -> None:
    twice = tmp_path / "twice.py"
    loop = [f"import runpy, sys\nfor _ in range(2):\n    try: runpy.run_path({script!r})"]
    twice.write_text("\n".join([*loop, "    except SystemExit: pass\n"]))
    options = ["--out", str(tmp_path), "--warmup", "1"]
    assert main.main(["trace", *options, "--script", str(twice), "3", "-1"]) == 0
    assert traced_steps(tmp_path) == traced_steps(tmp_path, "trace-2") == ["step 2", "step 3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--record", "0"], "--record is 0; it must be at least 1"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--script"], "--script needs a file to run"),
        (["--script", "missing.py"], "missing.py: the file does not exist"),
        (["--hidden", "30", "--heads", "4"], "use hidden 32"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["trace", "--out", str(tmp_path / "out"), *arguments]) == EXIT_ERROR
    said = capsys.readouterr().err.replace("\n", " ")
    assert message in said
    assert "recorded" not in said
    assert not (tmp_path / "out").exists()


def test_a_script_without_a_managed_model_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print('trained')\n")
    assert main.main(["trace", "--out", str(tmp_path / "out"), "--script", str(script)]) == 0
    assert "no GeminiDDP started a training step" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("end", "code"), [("fail", 1), ("end well", EXIT_ERROR)])
def test_a_recording_that_cannot_be_written_costs_neither_the_others_nor_the_scripts_error(
    end: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO_MODELS)
    (tmp_path / "trace.json").mkdir()  # the first recording cannot replace it
    arguments = ["trace", "--out", str(tmp_path), "--warmup", "0", "--script", str(script), end]
    assert main.main(arguments) == code
    said = capsys.readouterr().err
    assert "trace.json" in said
    assert ("RuntimeError: the script's own" in said) == (end == "fail")
    assert traced_steps(tmp_path, "trace-2") == ["step 1", "step 2"]


@pytest.mark.parametrize("out", ["file", "file/below", "/proc"])
def test_a_directory_that_cannot_be_written_is_refused_before_the_work(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    script = tmp_path / "plain.py"
    script.write_text("raise RuntimeError('it ran')\n")
    arguments = ["--out", str(tmp_path / out)]
    for work in (["--script", str(script)], TINY):
        assert main.main(["trace", *arguments, *work]) == EXIT_ERROR
        said = capsys.readouterr().err
        assert f"cannot write to --out {tmp_path / out}: " in said
        assert "name a directory that you can write to" in said
        assert "recorded" not in said


def test_files_of_an_earlier_recording_go_and_nothing_else(script: str, tmp_path: Path) -> None:
    older = ["trace-2.html", "trace-2.json", "trace-2-step.json", "trace-13.html"]
    others = ["trace.png", "my-trace.json", "trace-2.json.bak", "trace-x.html", "summary.json"]
    out = tmp_path / "out"
    out.mkdir()
    for name in (*older, *others):
        (out / name).touch()
    (out / "trace-3.html").mkdir()
    assert main.main(["trace", "--out", str(out), "--warmup", "1", "--script", script, "3", "-1"]) == 7
    own = ["trace.html", "trace.json", "trace-step.json"]
    assert {path.name for path in out.iterdir()} == {*own, *others, "trace-3.html"}


def test_a_script_may_go_to_another_directory(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "else").mkdir()
    Path(script).write_text(f"import os\nos.chdir('else')\n{SCRIPT}")
    assert main.main(["trace", "--out", "out", "--warmup", "0", "--script", script, "2", "-1"]) == 7
    assert traced_steps(tmp_path / "out") == ["step 1", "step 2"]


def test_an_earlier_recording_stays_where_there_is_no_new_one(tmp_path: Path) -> None:
    (tmp_path / "trace.html").touch()
    script = tmp_path / "plain.py"
    script.touch()
    assert main.main(["trace", "--out", str(tmp_path), "--script", str(script)]) == 0
    assert (tmp_path / "trace.html").exists()
