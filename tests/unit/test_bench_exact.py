"""``gemini bench exact``: a setting runs, bits decide the verdict, and nothing without a number gets one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.cli.main import main
from gemini_bench import exact, exact_table
from gemini_bench.exact import REFERENCE
from gemini_bench.exact_contenders import CONTENDERS, OUR_ADAM, OURS, PLAIN
from gemini_bench.exact_plain import Recipe
from gemini_bench.exact_settings import SETTINGS
from gemini_bench.session import Session, WorkerRun
from gemini_bench.watch import Ending, WatchedRun


def trained(directory: Path, name: str, weights: list[float], losses: list[list[float]]) -> dict[str, Any]:
    """Stand in for a run."""
    return {"losses": losses, **exact._write({"weight": torch.tensor(weights)}, directory / name)}


def compared(directory: Path, name: str, runs: dict[str, Any], *whom: str) -> list[dict[str, Any]]:
    """Return the rows of a setting with these runs."""

    def run(_task: str, _options: dict[str, Any], **_watch: Any) -> WorkerRun:
        return WorkerRun({"runs": runs}, WatchedRun(Ending.FINISHED, 0, 0.1, 0, "", ""))

    result = exact.compare(name, whom, Session(directory, quick=True, run=run))
    return [row.to_dict() for row in result.rows]


def test_a_quick_run_tells_bits_and_reasons(capsys: Any, tmp_path: Path) -> None:
    arguments = ["bench", "exact", "--quick", "--only", "disk", "--contenders", OURS, "FSDP2", "--json"]
    assert main([*arguments, "--disk-dir", str(tmp_path), "--out", str(tmp_path / "record.json")]) == 0
    ours, theirs = json.loads(capsys.readouterr().out)["cases"]["disk"]["rows"]
    assert (ours["what"], ours["value"], ours["same_bits"], ours["met"]) == (OURS, 0, True, True)
    assert (theirs["value"], theirs["absent"]) == (None, "has no tier on disk")
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_other_bits_miss_the_target_and_say_how_far(tmp_path: Path) -> None:
    runs = {
        REFERENCE: trained(tmp_path, "a", [1.0, -2.0], [[4.0], [2.0]]),
        PLAIN: trained(tmp_path, "b", [1.0, -2.0], [[4.0], [2.0]]),
        OURS: trained(tmp_path, "c", [1.0, -2.5], [[4.0], [3.0]]),
    }
    same, other = compared(tmp_path, "plain", runs, PLAIN, OURS)
    assert (same["value"], same["met"]) == (0, True)
    assert (other["loss"], other["loss_relative"]) == (1.0, 0.5)
    assert (other["weights"], other["weights_relative"], other["met"]) == (0.5, 0.25, False)


@pytest.mark.parametrize(("zero", "met"), [(0.0, True), (-0.0, False)])
def test_equal_values_with_other_bits_are_not_the_same(zero: float, met: bool, tmp_path: Path) -> None:
    runs = {
        REFERENCE: trained(tmp_path, "a", [0.0], [[1.0]]),
        OURS: trained(tmp_path, "b", [zero], [[1.0]]),
    }
    [row] = compared(tmp_path, "plain", runs, OURS)
    assert row["met"] is met


def test_over_ranks_the_twin_is_judged_and_the_reference_told(tmp_path: Path) -> None:
    recipe = CONTENDERS[OUR_ADAM].other_twin(SETTINGS["ranks"])
    assert recipe == Recipe("gemini", order="ranks")
    twin = {**trained(tmp_path, "twin", [1.5], [[1.0, 1.0]]), "recipe": str(recipe)}
    runs = {
        REFERENCE: trained(tmp_path, "a", [1.0], [[1.0]]),
        OUR_ADAM: {**trained(tmp_path, "b", [1.5], [[1.0, 1.0]]), "twin": twin},
    }
    first, second = compared(tmp_path, "ranks", runs, OUR_ADAM)
    assert (first["weights"], first["met"]) == (0.5, None)
    assert (second["same_bits"], second["met"]) == (True, True)
    assert "Adam of gemini, sums rank by rank" in second["what"]


def test_the_page_gives_a_reason_where_there_is_no_number(tmp_path: Path) -> None:
    runs = {
        REFERENCE: trained(tmp_path, "a", [1.0], [[1.0]]),
        OURS: trained(tmp_path, "b", [1.0], [[1.0]]),
        "DeepSpeed": {"absent": "is not installed"},
    }
    rows = compared(tmp_path, "plain", runs, OURS, "DeepSpeed")
    page = exact_table.markdown({"cases": {"plain": {"rows": rows}}})
    assert "| fp32 |  | same bits |  |  |  | none (1) |  |" in page
    assert "1. DeepSpeed is not installed" in page


def test_an_unknown_contender_is_refused(capsys: Any) -> None:
    assert main(["bench", "exact", "--contenders", "horovod"]) == 2
    assert "horovod" in capsys.readouterr().err
