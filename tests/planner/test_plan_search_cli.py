"""``gemini plan --search`` prints, keeps and refuses in words what the search finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_models import machine
from torch import nn

import gemini
from gemini.cli.main import main
from gemini.parallel import ParallelPlan
from gemini.system.config import parse_bytes

pytestmark = pytest.mark.usefixtures("kept_records")
MODEL = "gpt:layers=4,hidden=32,heads=4"
STEP = ["--seq", "16", "--batch", "8"]


@pytest.fixture
def described(tmp_path: Path) -> list[str]:
    path = tmp_path / "machine.json"
    machine(3).save(path)
    return ["--machine", str(path)]


def asked(*options: str) -> list[str]:
    return ["plan", MODEL, *STEP, "--search", *options]


def test_the_plan_is_explained_and_kept(
    described: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "plan.json"
    assert main(asked("--ranks", "4", "--device-bytes", "1GiB", "--save-plan", str(kept), *described)) == 0
    said = capsys.readouterr().out
    plan = ParallelPlan.load(kept)
    assert kept.name in said.replace("\n", "")  # a long path is broken
    assert plan.world_size == 4
    assert plan.num_microbatches * plan.microbatch_size * plan.layout.dp == 8
    assert plan.explain().splitlines()[0] in said
    for words in ("Runners-up", "a step is predicted to take", "combinations were evaluated"):
        assert words in said


def test_json_is_the_plan(described: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked("--ranks", "2", "--device-bytes", "1GiB", "--pin", "dp=2", "--json", *described)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] is True
    assert document["layout"] == {"dp": 2, "pp": 1, "sp": 1, "tp": 1}
    assert document["predicted"]["step_seconds"] > 0


def test_what_does_not_fit_is_exit_code_one_and_the_relaxation_it_names_does(
    described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked("--ranks", "2", "--device-bytes", "20KiB", "--json", *described)) == 1
    why = json.loads(capsys.readouterr().out)["why"]
    assert "For each rank --device-bytes" in why
    needed = why.partition(" would do")[0].rpartition(" ")[2]
    assert main(asked("--ranks", "2", "--device-bytes", needed, "--json", *described)) == 0
    less = str(int((parse_bytes(needed) or 0) * 0.99) - 1)
    assert main(asked("--ranks", "2", "--device-bytes", less, "--json", *described)) == 1


def test_tiers_below_device_are_found_where_it_is_too_small(
    described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--ranks", "1", "--device-bytes", "400KiB", "--json", *described)
    assert main(asked(*options)) == 1
    capsys.readouterr()
    assert main(asked(*options, "--disk-bytes", "1GiB")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["zero_stage"] == 3
    assert document["budgets"]["disk_bytes"] == 2**30
    assert document["predicted"]["ranks"][0]["disk_bytes"] > 0
    assert document["predicted"]["ranks"][0]["device_bytes"] <= 400 * 1024


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "2"], "--ranks belongs to a search; add --search"),
        (["--pin", "tp=2"], "--pin belongs to a search"),
        (["--search", "--ranks", "2", "--tp", "2"], "write --pin tp=2 instead of --tp"),
        (["--search", "--checkpointing"], "leave out --accumulation and --checkpointing"),
        (["--search", "--ranks", "4", "--pin", "tp=3"], "no layout of 4 ranks has what is pinned: tp=3"),
        (["--search", "--pin", "depth=3"], "the names are tp, pp, sp, dp"),
    ],
)
def test_what_contradicts_a_search_is_refused_in_words(
    options: list[str], words: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", MODEL, *STEP, "--device-bytes", "1GiB", *options, *described]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_machine_without_speeds_between_ranks_is_refused_with_how_to_measure_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    document = {
        "format": "gemini-machine-1",
        "name": "alone",
        "matmul_flops": {"fp32": 1e11},
        "memory_bytes_per_second": 1e10,
        "adam_bytes_per_second": 1e10,
        "device_bytes": 2**30,
    }
    path.write_text(json.dumps(document))
    assert main(asked("--ranks", "2", "--machine", str(path))) == 2
    assert "gemini plan --measure-ranks N --save-machine FILE" in " ".join(capsys.readouterr().err.split())
    assert main(asked("--ranks", "1", "--machine", str(path))) == 0


def test_a_disk_without_a_budget_is_one_that_a_rank_can_be_given(
    described: list[str], tmp_path: Path
) -> None:
    kept = tmp_path / "plan.json"
    lower = [
        "--disk-dir",
        str(tmp_path),
        "--pin",
        "tiers=lower",
        "--pin",
        "zero=3",
        "--device-bytes",
        "256KiB",
    ]
    assert main(asked("--ranks", "1", *lower, "--save-plan", str(kept), *described)) == 0
    plan = ParallelPlan.load(kept)
    assert plan.budgets.disk_bytes > 0
    options = {**plan.managed_options("manage()"), "disk_dir": tmp_path}
    handle = gemini.manage(nn.Linear(4, 4), non_model_bytes=0, **options)
    assert handle.stats()["disk"]["budget_bytes"] == plan.budgets.disk_bytes
    handle.close()
