"""``gemini plan --space`` prints plans of other systems, keeps those that run, and says why others do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_models import machine

from gemini.cli.main import main
from gemini.parallel import ParallelPlan
from gemini.planner.spaces.galvatron_files import GalvatronFile
from gemini.planner.spaces.table import SYSTEMS

MODEL = "gpt:layers=2,hidden=32,heads=4"
STEP = ["--seq", "16", "--batch", "4", "--ranks", "2", "--device-bytes", "1GiB"]


@pytest.fixture
def described(tmp_path: Path) -> list[str]:
    path = tmp_path / "machine.json"
    machine(3).save(path)
    return ["--machine", str(path)]


def asked(space: str, *options: str) -> list[str]:
    return ["plan", MODEL, *STEP, "--space", space, *options]


def test_the_table_names_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--space", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == list(SYSTEMS)
    assert all(each["decides"] and each["runs"] for each in found.values())
    assert main(["plan", "--space", "list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in SYSTEMS)


def test_the_trees_are_listed_with_their_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--space", "galvatron", "--ranks", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (sum(found["all"].values()), sum(found["pruned"].values())) == (34, 22)
    assert len(found["candidates"]) == 22
    assert main(["plan", "--space", "galvatron", "--ranks", "8"]) == 0
    said = capsys.readouterr().out
    assert "34" in said
    assert "22" in said


@pytest.mark.parametrize("space", SYSTEMS)
def test_a_system_prints_its_plan_and_whether_it_runs(
    space: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(space, *described)) == 0
    said = capsys.readouterr().out
    assert "a step is predicted to take" in said
    assert ("This plan runs here" in said) != ("The plan does not run here" in said)


def test_plans_are_kept_exported_and_imported(
    described: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, theirs = tmp_path / "plan.json", tmp_path / "galvatron.json"
    keep = ["--save-plan", str(own), "--export-plan", str(theirs)]
    assert main(asked("galvatron", *keep, *described, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] is True
    plan = ParallelPlan.load(own)
    assert plan.world_size == 2
    assert plan.predicted.step_seconds == pytest.approx(found["step_seconds"])
    assert GalvatronFile.load(theirs).chunks == plan.num_microbatches
    assert main(asked("galvatron", "--import-plan", str(theirs), *described, "--json")) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_seconds"] == pytest.approx(found["step_seconds"])


def test_a_plan_that_is_not_uniform_is_priced_and_not_kept(
    described: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "galvatron.json", tmp_path / "plan.json"
    file = {
        "pp_deg": 1,
        "tp_sizes_enc": "2,1",
        "tp_consecutive_flags": "1,1",
        "dp_types_enc": "0,0",
        "global_bsz": 4,
        "chunks": 1,
        "pipeline_type": "gpipe",
        "default_dp_type": "ddp",
    }
    path.write_text(json.dumps(file))
    options = asked("galvatron", "--import-plan", str(path), *described)
    assert main(options) == 0
    assert "tp must be one, and is 2 in block 0, 1 in block 1" in capsys.readouterr().out
    assert main([*options, "--save-plan", str(kept)]) == 2
    assert "does not run" in capsys.readouterr().err
    assert not kept.exists()


def test_what_does_not_fit_is_exit_code_one(described: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*asked("galvatron", *described), "--device-bytes", "20KiB"]) == 1
    assert "no plan of galvatron fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--space", "tofu"],
        ["--space", "list"],
        ["--space", "alpa", "--tp", "2"],
        ["--space", "alpa", "--search"],
        ["--space", "alpa", "--pin", "tp=2"],
        ["--space", "alpa", "--accumulation", "2"],
        ["--space", "alpa", "--import-plan", "x.json"],
        ["--space", "galvatron", "--import-plan", "none.json"],
        ["--space", "galvatron", "--ranks", "3"],
        ["--export-plan", "x.json"],
    ],
    ids=" ".join,
)
def test_contradictions_are_refused_in_words(
    options: list[str], described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["--seq", "16", "--batch", "4", "--device-bytes", "1GiB", *described]
    assert main(["plan", MODEL, *step, *options]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_space_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--space", "alpa"]) == 2
    assert "needs a MODEL" in capsys.readouterr().err
