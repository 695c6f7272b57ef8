"""The job on the real runtime: budgets, stopping and resuming never change a number."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.errors import OutOfBudgetError
from gemini.jobs.gpt import job, task
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.model import language_loss
from gemini.jobs.run.display import SilentDisplay
from gemini.jobs.run.report import StepReport

TINY = TrainConfig(layers=2, hidden=32, heads=2, seq=32, batch=2, steps=6)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog; " * 200)
    return dataclasses.replace(
        TINY, data=str(text), disk_dir=str(tmp_path / "disk"), device_bytes=2**18, host_bytes=0
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"accumulate": 2, "clip": 0.1},
        {"activation_checkpointing": True, "policy": "cpu", "host_bytes": 2**20},
        {"device_bytes": None, "disk_dir": None, "policy": "cuda", "clip": 0.0},
        {"activations": "offload", "device_bytes": 2**26, "accumulate": 2},
        {"activations": "plan", "device_bytes": 2**26},
    ],
)
def test_any_budget_gives_the_numbers_of_the_unmanaged_run(
    config: TrainConfig, changes: dict[str, Any]
) -> None:
    result = job.run(dataclasses.replace(config, verify=True, **changes))
    verdict = result.summary.verify
    assert verdict is not None
    assert verdict.identical, verdict.differences
    assert (verdict.losses_compared, result.exit_code) == (6, 0)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "changes",
    [
        {"host_bytes": None, "disk_dir": None},
        {"precision": "bf16", "accumulate": 2, "clip": 0.1, "layers": 4},
        {"activations": "offload"},
    ],
)
def test_a_gpu_gives_the_numbers_of_the_unmanaged_run_there(
    config: TrainConfig, changes: dict[str, Any]
) -> None:
    config = dataclasses.replace(config, device="cuda", device_bytes=2**26, hidden=64, verify=True)
    verdict = job.run(dataclasses.replace(config, **changes)).summary.verify
    assert verdict is not None
    assert verdict.identical, verdict.differences
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_that_runs_out_of_memory_is_repeated_whole(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, accumulate=2)
    want = job.run(config).losses
    calls = itertools.count()

    def lacking(*arguments: Any) -> Any:
        if next(calls) in (1, 7):
            raise torch.OutOfMemoryError("no memory")
        return language_loss(*arguments)

    monkeypatch.setattr(task, "language_loss", lacking)
    assert job.run(config).losses == want
    assert next(calls) == 2 * config.steps + 2 + 2


class CtrlC(SilentDisplay):
    """Press Ctrl-C when ``step`` is shown."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, report: StepReport) -> None:
        if report.step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_interrupted_and_resumed_run_equals_the_whole_one(
    config: TrainConfig, tmp_path: Path, precision: str
) -> None:
    kept = dataclasses.replace(config, precision=precision, checkpoint=str(tmp_path / "run"))
    stopped = job.run(kept, display=CtrlC(3))
    resumed = job.run(dataclasses.replace(kept, resume="yes", verify=True, device_bytes=2**19))
    assert (stopped.exit_code, stopped.summary.last_step) == (130, 3)
    assert resumed.summary.first_step == 3
    assert resumed.summary.verify is not None
    assert resumed.summary.verify.identical, resumed.summary.verify.differences


def test_summary_says_how_far_the_model_is_above_its_budget(config: TrainConfig, tmp_path: Path) -> None:
    summary = job.run(dataclasses.replace(config, checkpoint=str(tmp_path / "run"))).summary
    assert summary.ratio == summary.model_data_bytes / 2**18
    assert 0 < summary.peak_bytes["device"] <= 2**18
    assert summary.link_bytes["disk_read"] > 0
    assert summary.last_loss is not None


def test_budget_that_cannot_work_is_refused_before_training(config: TrainConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(OutOfBudgetError, match="device_bytes"):
        job.run(dataclasses.replace(config, device_bytes=4096, checkpoint=str(run)))
    assert not run.exists()
