"""Metrics of a run in TensorBoard, W&B and MLflow; a tracker never ends a run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_train_engine import FakeEngine, fake_is_complete

from gemini.cli.main import main
from gemini.errors import ConfigError
from gemini.jobs.gpt import job
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.run.run_directory import RunDirectory
from gemini.jobs.run.trackers import parse_trackers

pytestmark = pytest.mark.usefixtures("one_thread")


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
        steps=6,
        checkpoint=str(tmp_path / "run"),
    )


class Stopping(FakeEngine):
    """Be told to stop in the third step."""

    def step(self) -> None:
        super().step()
        if self.steps == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def run(config: TrainConfig, engine: Callable[[TrainConfig], Any] = FakeEngine, **changes: Any) -> Any:
    return job.run(
        dataclasses.replace(config, **changes), engine_factory=engine, is_complete=fake_is_complete
    )


def metrics_of(config: TrainConfig) -> list[dict[str, Any]]:
    assert config.checkpoint is not None
    return [json.loads(line) for line in Path(config.checkpoint, "metrics.jsonl").read_text().splitlines()]


def curves_of(config: TrainConfig) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: each curve as steps with values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert config.checkpoint is not None
    events = EventAccumulator(str(Path(config.checkpoint, "tensorboard")))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_shows_one_curve_of_a_run_that_was_resumed(config: TrainConfig) -> None:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    config = dataclasses.replace(config, report_to="tensorboard", checkpoint_every=2)

    class Failing(Stopping):
        def save(self, directory: Path, scheduler: Any, extra: Any) -> None:
            if extra["step"] == 3:
                raise KeyboardInterrupt  # its third step is logged, and lost
            super().save(directory, scheduler, extra)

    with pytest.raises(KeyboardInterrupt):
        run(config, Failing)
    assert [step for step, _ in curves_of(config)["train/loss"]] == [1, 2, 3]
    run(config, resume="yes")
    curves, records = curves_of(config), metrics_of(config)
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4, 5, 6]
    for name, key in (("train/loss", "loss"), ("train/learning_rate", "lr")):
        assert [value for _, value in curves[name]] == pytest.approx([record[key] for record in records])
    assert {value for _, value in curves["memory/device_bytes"]} == {500.0}
    assert all(value > 0 for _, value in curves["train/tokens_per_second"])
    run(config, overwrite=True, steps=1)
    assert [step for step, _ in curves_of(config)["train/loss"]] == [1]


class FakeWandB(ModuleType):
    """What is documented of W&B, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []
        self.fails_at = 0

    def login(self, *, prompt: bool) -> bool:
        assert not prompt, "nobody may be there to answer"
        return False

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> Any:
        self.begun.append(options)
        identity = options["id"] or f"run-{len(self.begun)}"
        return SimpleNamespace(id=identity, url=None, log=self._log, finish=self._finish)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise RuntimeError("Network error (ConnectionError)")
        self.logged.append((step, metrics))

    def _finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


class FakeMLflow(ModuleType):
    """What is documented of MLflow, as far as it is used."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []

    def MlflowClient(self) -> Any:
        return self

    def set_experiment(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=f"id of {name}")

    def get_tracking_uri(self) -> str:
        return "sqlite:///mlflow.db"

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.calls.append(("create", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="made"))

    def update_run(self, run_id: str, status: str) -> None:
        self.calls.append(("update", run_id, status))

    def log_param(self, run_id: str, key: str, value: str) -> None:
        self.calls.append(("param", run_id, key, value))

    def log_metric(self, run_id: str, key: str, value: float, step: int) -> None:
        self.calls.append(("metric", run_id, key, step, value))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.calls.append(("end", run_id, status))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def test_a_resumed_run_is_the_same_run_of_its_trackers(
    config: TrainConfig, wandb: FakeWandB, mlflow: FakeMLflow
) -> None:
    config = dataclasses.replace(config, report_to="wandb,mlflow")
    run(config, Stopping)
    run(config, resume="yes")
    assert [options["id"] for options in wandb.begun] == [None, "run-1"]
    assert {options["mode"] for options in wandb.begun} == {"offline"}, "it would ask for a key"
    assert wandb.begun[0]["config"]["lr"] == config.lr
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 4, 5, 6]
    losses = [record["loss"] for record in metrics_of(config)]
    assert [metrics["train/loss"] for _, metrics in wandb.logged] == losses
    assert wandb.ended == [0, 0]
    assert [call[:2] for call in mlflow.calls if call[0] in ("create", "update")] == [
        ("create", "id of gemini"),
        ("update", "made"),
    ]
    assert ("param", "made", "hidden", "16") in mlflow.calls
    assert [call[3:] for call in mlflow.calls if call[2] == "train/loss"] == list(enumerate(losses, 1))
    assert [call for call in mlflow.calls if call[0] == "end"] == [("end", "made", "FINISHED")] * 2


def test_a_tracker_that_fails_is_left_out_with_one_warning(config: TrainConfig, wandb: FakeWandB) -> None:
    wandb.fails_at = 2
    result = run(config, report_to="wandb")
    assert result.summary.last_step == config.steps
    (note,) = (note for note in result.summary.notes if "wandb" in note)
    assert note.startswith(
        "--report-to wandb: Network error (ConnectionError); training continues without it"
    )
    assert [step for step, _ in wandb.logged] == [1]


def test_a_run_that_fails_is_a_failed_run_of_its_tracker(config: TrainConfig, wandb: FakeWandB) -> None:
    class Broken(FakeEngine):
        def step(self) -> None:
            raise ConfigError("broken")

    with pytest.raises(ConfigError, match="broken"):
        run(config, Broken, report_to="wandb")
    assert wandb.ended == [1]


def test_what_a_run_file_says_of_trackers_is_no_more_than_text(config: TrainConfig) -> None:
    assert config.checkpoint is not None
    run(config)
    file = Path(config.checkpoint, "run.json")
    directory = RunDirectory(config.checkpoint, fake_is_complete)
    for said in (3, ["wandb"], {"wandb": 3}):
        file.write_text(json.dumps({**json.loads(file.read_text()), "trackers": said}))
        assert directory.tracker_identities() == {}


def test_a_missing_package_is_named_before_anything_is_trained(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="--report-to mlflow needs the package mlflow: pip install mlflow"):
        run(config, report_to="mlflow")
    assert not Path(str(config.checkpoint)).exists()


def test_names_of_trackers_are_joined_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_trackers("wandb, tensorboard,wandb") == ("wandb", "tensorboard")
    assert parse_trackers("none") == parse_trackers("") == ()
    with pytest.raises(ConfigError, match="none must be the only name"):
        parse_trackers("none,wandb")
    with pytest.raises(ConfigError, match=r"'wanb' \(did you mean wandb\?\); it must be one of"):
        parse_trackers("wanb")
    assert main(["train", "--report-to", "wandb", "--report-to", "comet"]) == 2
    assert "--report-to is 'comet'; it must be one of tensorboard, wandb, mlflow, none" in " ".join(
        capsys.readouterr().err.split()
    )
    assert main(["train", "--report-to", "wandb"]) == 2
    assert "--report-to needs --checkpoint DIR" in " ".join(capsys.readouterr().err.split())
