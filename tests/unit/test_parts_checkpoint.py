"""Checkpoints of a model in parts: complete or not there, the two newest kept, damage refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.cli.main import main
from gemini.comm.ranks import Rank
from gemini.errors import CheckpointError, IoError
from gemini.jobs.finetune import parts_checkpoint
from gemini.jobs.run.run_directory import RunDirectory

TWO_STAGES = {"tp": 1, "pp": 2, "sp": 1}


def save(directory: Path, step: int, text: str = "weights") -> None:
    extra = {"step": step, "horizons": [9]}

    def write(made: Path) -> None:
        _write(made / "model", text)

    parts_checkpoint.save(directory, Rank(), step, extra, write, sizes=TWO_STAGES)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def load(directory: Path, **sizes: int) -> tuple[dict[str, Any], str]:
    found: list[str] = []

    def read(path: Path) -> None:
        found.append((path / "model").read_text())

    return parts_checkpoint.load(directory, Rank(), read, sizes=TWO_STAGES | sizes), found[0]


def test_the_newest_checkpoint_is_loaded_and_two_stay(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save(tmp_path, step, f"weights {step}")
    drawn = torch.rand(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    assert load(tmp_path) == ({"step": 10, "horizons": [9]}, "weights 10")
    assert torch.equal(torch.rand(3), drawn), "random numbers go on where they were"


def test_ranks_with_other_parts_keep_their_own_random_numbers(tmp_path: Path) -> None:
    save(tmp_path, 1)
    state = torch.get_rng_state()
    drawn = torch.rand(3)
    torch.set_rng_state(state)
    torch.rand(1)
    load(tmp_path, tp=2, pp=1)
    assert not torch.equal(torch.rand(3), drawn)
    load(tmp_path)
    assert torch.equal(torch.rand(3), drawn)


def test_what_fails_while_it_is_written_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(made: Path) -> None:
        (made / "model").write_text("half")
        raise IoError(28, "no space", "model")

    with pytest.raises(IoError):
        parts_checkpoint.save(tmp_path, Rank(), 2, {"step": 2}, fail, sizes=TWO_STAGES)
    assert load(tmp_path)[1] == "weights"
    save(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_run_killed_before_its_first_checkpoint_has_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoint" / "step-00000001.partial").mkdir(parents=True)
    directory = RunDirectory(tmp_path, parts_checkpoint.is_complete, extra_of=parts_checkpoint.extra_of)
    assert not directory.resumes("auto", overwrite=False)
    save(directory.checkpoint, 4)
    assert directory.resumes("auto", overwrite=False)
    assert directory.saved_step() == 4
    directory.release()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "gemini-finetune-parts-2"}',
        '{"format": "gemini-finetune-parts-1", "extra": {}}',
        json.dumps({"format": "gemini-finetune-parts-1", "rng": {}, "extra": {"type": "dict", "items": []}}),
        json.dumps({"format": "gemini-finetune-parts-1", "rng": ["x"], "extra": 3}),
    ],
    ids=range(6),
)
def test_a_damaged_record_is_a_checkpoint_error_in_one_line(text: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / "run.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
@pytest.mark.parametrize("place", ["", "checkpoint", "checkpoint/step-00000001"])
def test_gemini_ckpt_says_what_it_is(
    command: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "checkpoint", 1)
    target = [str(tmp_path / "target"), "--to", "hf"] if command == "convert" else []
    assert main(["ckpt", command, str(tmp_path / place), *target]) == 2
    assert "whose ranks have parts of the model" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
