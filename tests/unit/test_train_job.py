"""The job around an engine: stop, resume, verify, and what it writes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_train_engine import FakeEngine, fake_is_complete
from rich.console import Console

from gemini.errors import CheckpointError, ConfigError, GeminiError
from gemini.jobs.gpt import job
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.job import TrainResult
from gemini.jobs.run import outcome
from gemini.jobs.run.outcome import summary_table
from gemini.jobs.run.report import Summary
from gemini.jobs.run.run_directory import RunDirectory, saved_options

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


def run(
    config: TrainConfig, engine: Callable[[TrainConfig], Any] = FakeEngine, **changes: Any
) -> TrainResult:
    return job.run(
        dataclasses.replace(config, **changes), engine_factory=engine, is_complete=fake_is_complete
    )


def stopping_at(step: int, signum: int = signal.SIGINT) -> Callable[[TrainConfig], FakeEngine]:
    class Stopping(FakeEngine):
        def step(self) -> None:
            super().step()
            if self.steps == step:
                os.kill(os.getpid(), signum)

    return Stopping


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    assert config.checkpoint is not None
    return [json.loads(line) for line in Path(config.checkpoint, "metrics.jsonl").read_text().splitlines()]


def text_of_summary(summary: Summary) -> str:
    screen = Console(file=io.StringIO(), width=120)
    screen.print(summary_table(summary))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


class Drawn(FakeEngine):
    """One that knows where its memory was."""

    non_model_bytes = 200

    def timeline(self) -> list[dict[str, Any]]:
        sizes = {"device_bytes": 400, "host_bytes": 0, "disk_bytes": 4000}
        sizes["non_model_bytes"] = self.non_model_bytes
        return [{"moment": moment, "phase": "forward", **sizes} for moment in range(4)]


def test_run_writes_checkpoint_metrics_and_summary(config: TrainConfig) -> None:
    result = run(config, Drawn)
    assert config.checkpoint is not None
    directory = Path(config.checkpoint)
    assert result.exit_code == 0
    assert [record["loss"] for record in metrics(config)] == list(result.losses)
    assert fake_is_complete(directory / "checkpoint")
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["ratio"] == 4.0
    assert summary["link_bytes"]["disk_read"] == 6 * 64
    assert summary["peak_non_model_bytes"] == 200
    assert summary["verify"] is None
    assert (summary["picture"] is not None) == (directory / "memory.png").exists()
    assert not summary["interrupted"]


def test_activations_that_nobody_measured_are_not_said_to_take_nothing(config: TrainConfig) -> None:
    class Unmeasured(Drawn):
        non_model_bytes = 0

    summary = run(config, Unmeasured).summary
    assert summary.peak_non_model_bytes is None
    assert re.search(r"activations and temporaries, peak.*not measured", text_of_summary(summary))


def test_a_summary_shows_brackets_as_they_are(config: TrainConfig) -> None:
    summary = dataclasses.replace(run(config).summary, checkpoint="out/run[2]", notes=("get runtime[plot]",))
    shown = text_of_summary(summary)
    assert "out/run[2]" in shown
    assert "runtime[plot]" in shown


def test_loss_falls_on_forty_steps(config: TrainConfig) -> None:
    losses = run(config, steps=40, checkpoint=None).losses
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.0


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"accumulate": 3, "clip": 0.1}])
def test_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    config: TrainConfig, tmp_path: Path, changes: dict[str, Any]
) -> None:
    want = run(config, checkpoint=str(tmp_path / "whole"), verify=True, **changes)
    stopped = run(config, stopping_at(2), resume="auto", **changes)
    resumed = run(config, resume="auto", verify=True, **changes)
    assert stopped.exit_code == 130
    assert stopped.summary.interrupted
    assert stopped.summary.last_step == 2
    assert resumed.losses == want.losses
    assert resumed.exit_code == want.exit_code == 0
    assert [record["step"] for record in metrics(config)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_other_signals_save_like_ctrl_c_and_handlers_come_back(
    config: TrainConfig, signum: int, code: int
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signum)
    assert run(config, stopping_at(3, signum)).exit_code == code
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signum)) == before
    assert run(config, resume="yes").summary.first_step == 3


def test_a_signal_after_the_last_step_costs_no_file(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(outcome, "draw_timeline", late)
    assert run(config, Drawn).exit_code == 143
    assert config.checkpoint is not None
    assert Path(config.checkpoint, "summary.json").exists()


@pytest.mark.parametrize("changes", [{}, {"resume": "yes"}, {"overwrite": True}])
def test_a_directory_where_another_run_trains_is_refused(
    config: TrainConfig, changes: dict[str, Any]
) -> None:
    class Alone(FakeEngine):
        def step(self) -> None:
            if not Path(config.checkpoint or "", "metrics.jsonl").exists():
                with pytest.raises(ConfigError, match="another process trains in"):
                    run(config, **changes)
            super().step()

    if changes:
        run(config, steps=2)
    result = run(config, Alone, overwrite=bool(changes))
    assert [record["loss"] for record in metrics(config)] == list(result.losses)
    assert run(config, resume="yes").summary.first_step == config.steps


def test_second_ctrl_c_stops_at_once_and_closes_the_engine(config: TrainConfig) -> None:
    engines: list[FakeEngine] = []

    class Impatient(FakeEngine):
        def step(self) -> None:
            engines.append(self)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(config, Impatient)
    assert engines[0].closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_engine_that_fails_in_the_middle_leaves_the_last_checkpoint(config: TrainConfig) -> None:
    engines: list[FakeEngine] = []

    class Failing(FakeEngine):
        def step(self) -> None:
            super().step()
            engines.append(self)
            if self.steps == 5:
                raise GeminiError("the disk went away")

    with pytest.raises(GeminiError, match="the disk went away"):
        run(config, Failing, checkpoint_every=2)
    assert engines[0].closed
    assert run(config, resume="yes").summary.first_step == 4
    assert [record["step"] for record in metrics(config)] == [1, 2, 3, 4, 5, 6]


def test_a_device_too_small_to_verify_on_costs_no_training(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_config: TrainConfig) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    monkeypatch.setattr(job, "PlainEngine", full)
    with pytest.raises(
        ConfigError, match="--verify trains unmanaged, and cpu has too little memory for that"
    ):
        run(config, verify=True)
    directory = Path(str(config.checkpoint))
    assert fake_is_complete(directory / "checkpoint")
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["verify"] is None
    assert any("verify a smaller model" in note for note in summary["notes"])


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_stopped_run_that_was_to_be_verified_says_how_to_do_so(
    config: TrainConfig, has_directory: bool
) -> None:
    if not has_directory:
        config = dataclasses.replace(config, checkpoint=None)
    stopped = run(config, stopping_at(2), verify=True)
    assert stopped.summary.verify is None
    (note,) = [note for note in stopped.summary.notes if note.startswith("not verified: ")]
    if not has_directory:
        assert note.endswith("; run the same command again")
        return
    command = re.search(r"gemini train (.*) continues and compares", note)
    assert command is not None
    assert shlex.split(command[1]) == ["--checkpoint", config.checkpoint, "--resume", "--verify"]
    verdict = run(config, resume="yes", verify=True).summary.verify
    assert verdict is not None
    assert verdict.identical


def test_verify_finds_one_changed_bit(config: TrainConfig) -> None:
    class Wrong(FakeEngine):
        def step(self) -> None:
            super().step()
            if self.steps == 4:
                weight = self._updated()[0]
                with torch.no_grad():
                    weight.view(-1)[3] = torch.nextafter(weight.view(-1)[3], torch.tensor(9.0))

    result = run(config, Wrong, verify=True)
    verdict = result.summary.verify
    assert result.exit_code == 1
    assert verdict is not None
    assert not verdict.identical
    assert verdict.weights_different > 0
    assert 0 < len(verdict.differences) <= 16
    assert run(config, verify=True, overwrite=True).exit_code == 0


def test_older_run_is_neither_overwritten_nor_mixed_up(config: TrainConfig) -> None:
    run(config)
    with pytest.raises(ConfigError, match=r"already holds a run.*--resume.*--overwrite"):
        run(config)
    with pytest.raises(ConfigError, match="has hidden = 16, but this command has hidden = 32"):
        run(config, resume="yes", hidden=32)
    assert run(config, resume="yes").summary.last_step == 6


@pytest.mark.parametrize("left", [[], ["step-00000001.partial"]], ids=["nothing", "a part"])
def test_run_killed_in_its_first_save_starts_anew(config: TrainConfig, left: list[str]) -> None:
    checkpoint = Path(str(config.checkpoint), "checkpoint")
    run(config, steps=1)
    (checkpoint / "state").unlink()
    for name in left:
        (checkpoint / name).mkdir()
        (checkpoint / name / "weights").write_bytes(b"half")
    directory = RunDirectory(checkpoint.parent, fake_is_complete)
    assert not directory.resumes("auto", overwrite=False)
    directory.release()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*--resume auto"):
        run(config, resume="yes")
    assert run(config).summary.first_step == 0
    assert [file.name for file in checkpoint.iterdir()] == ["state"]


@pytest.mark.parametrize("damage", ["files", "disk"])
def test_run_whose_checkpoint_has_lost_files_has_one_way_out(config: TrainConfig, damage: str) -> None:
    checkpoint = Path(str(config.checkpoint), "checkpoint")
    run(config, steps=1)
    if damage == "files":
        (checkpoint / "state").rename(checkpoint / "other")
    else:
        shutil.rmtree(checkpoint)
        checkpoint.parent.with_name("unmounted").mkdir()
        checkpoint.symlink_to(checkpoint.parent.with_name("unmounted"))
    for options in ({}, {"resume": "yes"}):
        with pytest.raises(GeminiError, match=r"no complete checkpoint in .*start over with --overwrite"):
            run(config, **options)
    assert run(config, overwrite=True).summary.last_step == 6


def test_summary_of_a_finished_run_stays_when_it_is_resumed(config: TrainConfig) -> None:
    run(config)
    summary = Path(str(config.checkpoint), "summary.json")
    before = summary.read_bytes()
    assert run(config, resume="yes").summary.tokens == 0
    assert summary.read_bytes() == before


def test_a_run_that_was_stopped_in_its_last_step_is_no_interrupted_one_once_it_is_ended(
    config: TrainConfig,
) -> None:
    run(config, stopping_at(config.steps))
    summary = Path(str(config.checkpoint), "summary.json")
    before = json.loads(summary.read_bytes())
    assert before["interrupted"]
    assert run(config, resume="yes").summary.tokens == 0
    assert json.loads(summary.read_bytes()) == {**before, "interrupted": False}


def test_a_run_with_nothing_left_to_train_says_so_and_has_no_speed(config: TrainConfig) -> None:
    trained = text_of_summary(run(config).summary)
    assert "tokens/s" in trained
    assert "nothing left" not in trained
    again = text_of_summary(run(config, resume="yes").summary)
    assert re.search(r"steps .* nothing is left to train: 6 steps are done", again)
    for row in ("tokens/s", "stalled", "peak"):
        assert row not in again
    assert "loss, first to last" in again


def test_refused_budget_does_not_cost_the_run_to_be_overwritten(config: TrainConfig) -> None:
    run(config)

    def refuse(_: TrainConfig) -> FakeEngine:
        raise ConfigError("does not fit")

    with pytest.raises(ConfigError, match="does not fit"):
        run(config, refuse, overwrite=True)
    assert run(config, resume="yes").summary.first_step == 6


def test_a_run_with_more_steps_follows_their_schedule_from_the_next_step_on(config: TrainConfig) -> None:
    whole = run(config, steps=9, checkpoint=f"{config.checkpoint}-whole").summary.checkpoint
    assert whole is not None
    rates = [
        json.loads(line)["lr"] for line in (Path(whole).parent / "metrics.jsonl").read_text().splitlines()
    ]
    run(config)
    longer = run(config, resume="yes", steps=9)
    assert [record["lr"] for record in metrics(config)][6:] == rates[6:]
    said = [note for note in longer.summary.notes if "changed from 6 to 9" in note]
    assert len(said) == 1
    assert said[0].endswith(f"the next step has {rates[6]:.3g} instead of {config.lr / 10:.3g}")


def test_resume_and_verify_say_what_they_need(config: TrainConfig) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        run(config, resume="yes")
    run(config)
    with pytest.raises(ConfigError, match="--steps changed from 6 to 8"):
        run(config, resume="yes", steps=8, verify=True)
    with pytest.raises(ConfigError, match="at step 6, past --steps 3"):
        run(config, resume="yes", steps=3)
    assert run(config, resume="yes", steps=8).summary.last_step == 8
    assert config.checkpoint is not None
    assert saved_options(config.checkpoint, TrainConfig, "gemini train")["steps"] == 8


def test_a_run_of_two_kinds_of_devices_goes_on_and_is_not_verified(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("job", "engine"):
        monkeypatch.setattr(f"gemini.jobs.gpt.{module}.resolve_device", lambda _device: torch.device("cpu"))
    run(config, stopping_at(3))
    with pytest.raises(ConfigError, match="it moved from cpu to cuda, and"):
        run(config, resume="yes", device="cuda", verify=True)
    assert run(config, resume="yes", device="cuda:1").summary.last_step == 6
    with pytest.raises(ConfigError, match="it moved from cpu to cuda, and"):
        run(config, resume="yes", device="cpu", verify=True)


def test_loss_that_is_not_finite_stops_the_run_before_it_is_saved(config: TrainConfig) -> None:
    class Exploding(FakeEngine):
        def step(self) -> None:
            super().step()
            if self.steps == 3:
                with torch.no_grad():
                    self._updated()[0].fill_(float("nan"))

    with pytest.raises(ConfigError, match="became nan at step 4"):
        run(config, Exploding, checkpoint_every=2)
    assert run(config, resume="yes").summary.first_step == 2


def test_metrics_of_a_killed_run_end_at_the_checkpoint(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, fake_is_complete)
    directory.start({}, {})
    for step in (1, 2, 3):
        directory.append_metrics({"step": step, "loss": 0.1 + step})
    with directory.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in directory.read_metrics(2)] == [1, 2]
    directory.append_metrics({"step": 3, "loss": 9.0})
    assert [record["loss"] for record in directory.read_metrics(3)] == [1.1, 2.1, 9.0]


def test_starting_a_run_touches_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    directory = RunDirectory(tmp_path, fake_is_complete)
    directory.refuse_older_run()
    directory.start({"seed": 0}, {})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "run.json", "step-00000001"]
