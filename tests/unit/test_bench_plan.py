"""``gemini bench plan``: its cases run, its verdicts follow from its figures, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import first

from gemini.cli.main import main
from gemini_bench import plan
from gemini_bench.plan_predicted import Choice, summary


@pytest.mark.dear("two ranks train by eight plans")
@pytest.mark.parametrize("case", first(plan.CASES))
def test_a_quick_run_measures_every_row_of_a_case(
    case: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "record.json"
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "plan", "--quick", "--only", case, "--json", "--out", str(out)]) == 0
    rows = json.loads(capsys.readouterr().out)["cases"][case]["rows"]
    assert rows
    assert all(row["value"] is not None for row in rows)
    assert json.loads(out.read_text())["cases"][case]["rows"] == rows
    assert list(tmp_path.iterdir()) == [out]


def test_regret_is_of_what_was_predicted_to_be_the_fastest() -> None:
    predicted = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    measured = {"a": 2.0, "b": 2.0, "c": 1.6, "d": 1.0}
    choice = Choice.of(predicted, measured)
    assert choice.errors == pytest.approx((0.5, 0.0, 0.875, 3.0))
    assert choice.regret == pytest.approx(1.0)
    assert choice.regret_of_best == pytest.approx(0.6)


@pytest.mark.parametrize("judged", [True, False])
def test_all_models_are_summed_up_and_ranks_that_share_a_core_are_not_judged(judged: bool) -> None:
    good = {
        "predicted": {"a": {"step_seconds": 1.0}, "b": {"step_seconds": 2.0}},
        "seconds": {"a": [1.0], "b": [2.0]},
    }
    bad = {"predicted": good["predicted"], "seconds": {"a": [9.0, 2.0, 1.0], "b": [1.0]}}
    rows = {row.what: row for row in summary({"x": good, "y": bad}, judged=judged)}
    assert rows["mean absolute error"].value == pytest.approx((0 + 0 + 0.5 + 1.0) / 4)
    assert rows["models whose fastest layout is the one predicted"].value == 0.5
    assert rows["regret of the pick, mean"].value == pytest.approx(0.5)
    assert rows["regret of the pick, highest"].value == pytest.approx(1.0)
    assert rows["regret with the best 3 measured, mean"].value == 0
    assert rows["mean absolute error"].met is (False if judged else None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "speed"], "predicted, search, architectures"),
        (["--models", "llama"], "llama 4x256"),
        (["--rounds", "0"], "--rounds is 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], said: str, capsys: Any) -> None:
    assert main(["bench", "plan", *arguments]) == 2
    assert said in capsys.readouterr().err
