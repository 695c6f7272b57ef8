"""gemini plan --operators: the plan as JSON and as text, and a budget that is too small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from operator_models import machine

from gemini.cli.main import main

MODEL = ["plan", "gpt:layers=1,hidden=32,heads=2,vocab=32", "--seq", "8", "--batch", "4"]


def run(tmp_path: Path, *options: str) -> int:
    described = tmp_path / "machine.json"
    machine().save(described)
    return main([*MODEL, "--ranks", "2", "--operators", "--machine", str(described), *options])


def test_the_plan_has_a_row_for_each_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--device-bytes", "1GiB", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["sizes"] == [2]
    assert len(plan["rows"]) == len(plan["choices"])
    assert plan["seconds"] < plan["whole_seconds"]


def test_it_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--device-bytes", "1GiB") == 0
    assert "rules cover every operator" in capsys.readouterr().out


@pytest.mark.parametrize("unused", [["--save-plan", "plan.json"], ["--measure", "2"], ["--pin", "tp=2"]])
def test_options_that_it_would_not_follow_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unused: list[str]
) -> None:
    assert run(tmp_path, *unused) != 0
    assert f"--operators does not go with {unused[0]}" in capsys.readouterr().err
