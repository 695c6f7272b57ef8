"""``gemini bench checkpoint``: its cases run."""

from __future__ import annotations

import json

import pytest

from gemini.cli.main import main
from gemini_bench.checkpoint import CASES


@pytest.mark.parametrize("case", CASES)
def test_a_quick_run_measures_every_row_of_a_case(capsys, tmp_path, case):
    arguments = ["bench", "checkpoint", "--quick", "--json", "--only", case, "--disk-dir", str(tmp_path)]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["cases"][case]["rows"]
    assert rows
    assert all(row["value"] == row["value"] for row in rows)  # not NaN
    assert not list(tmp_path.iterdir())


def test_no_kills_are_refused(capsys):
    assert main(["bench", "checkpoint", "--kills", "0"]) == 2
    assert "--kills is 0" in capsys.readouterr().err
