"""A run of GeminiTrainer that is killed at any moment goes on from its newest whole checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))

from trainer_runs import arguments, ours

from gemini.integrations import trainer_files

KILLS = int(os.environ.get("GEMINI_TEST_KILLS", "4"))


def train(run: Path, *, resume: bool) -> None:
    """Train, with a checkpoint after each step, and write the losses down."""
    args = arguments(run, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer = ours(args, resume=resume or None)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    (run / "losses.json").write_text(json.dumps(losses))


def in_child(run: Path, *, resume: bool, kill: tuple[int, float] | None = None) -> bool:
    """Train in a child; say whether it came to its end. ``kill``: it is killed so many seconds after it has
    begun to write the checkpoint of that step."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(run, resume=resume)
            code = 0
        finally:
            os._exit(code)
    if kill is not None:
        step, seconds = kill
        names = (f".checkpoint-{step}.partial", f"checkpoint-{step}", "losses.json")
        while not any((run / name).exists() for name in names):
            time.sleep(0.001)
        time.sleep(seconds)  # when the kill comes is what is tried
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def _resumes(run: Path) -> bool:
    return trainer_files.newest(run) is not None


def test_losses_after_any_kill_are_those_of_a_run_that_nobody_killed(tmp_path: Path) -> None:
    assert in_child(tmp_path / "whole", resume=False)
    want = json.loads((tmp_path / "whole" / "losses.json").read_text())
    moments, kills = random.Random(KILLS), 0
    for number in range(KILLS):
        run = tmp_path / f"run-{number}"
        kill = (moments.randint(1, 6), moments.uniform(0, 0.1))
        kills += not in_child(run, resume=False, kill=kill)
        assert in_child(run, resume=_resumes(run))
        assert json.loads((run / "losses.json").read_text()) == want
        assert not list(run.glob(".checkpoint-*"))
    assert kills > 0
