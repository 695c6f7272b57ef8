"""The tools of the loop: pairs of parameters, tests chosen by change, reasons of dear cases; and the demo."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_times import without_reason
from import_graph import ROOT
from pairs import pairs

sys.path.insert(0, str(ROOT / "scripts"))
import affected

GEMINI = """#!/bin/sh
echo "$@" >> calls
mkdir -p demo-output/run/checkpoint/step-00000002$PARTIAL
touch demo-output/run/checkpoint/step-00000002$PARTIAL/seal.json
exit $CODE
"""


def test_demo_continues_a_stopped_run_with_the_same_options_only(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo.sh", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program = tmp_path / ".venv" / "bin" / "gemini"
    program.write_text(GEMINI)
    program.chmod(0o755)

    def demo(code: int, steps: str = "40", partial: str = "") -> tuple[str, str]:
        command = [str(tmp_path / "scripts" / "demo.sh"), "--steps", steps]
        environ = {**os.environ, "CODE": str(code), "PARTIAL": partial}
        ended = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert ended.returncode == code, ended.stderr
        return (tmp_path / "calls").read_text().splitlines()[-1].split()[-1], ended.stdout

    how, said = demo(130, partial=".partial")  # killed within its first save
    assert (how, "1 to 3 minutes on two cores" in said) == ("--overwrite", True)
    assert demo(130)[0] == "--overwrite"  # nothing complete was saved
    how, said = demo(130)
    assert (how, "Going on" in said) == ("--resume", True)
    assert demo(130, steps="10")[0] == "--overwrite"
    assert demo(0, steps="10")[0] == "--resume"
    assert demo(1, steps="10")[0] == "--overwrite"
    assert demo(0, steps="10")[0] == "--overwrite"  # a verdict ended the one before


@pytest.mark.parametrize("sizes", [(2, 3), (2, 3, 2), (4, 4, 3), (2, 2, 3, 2, 2)])
def test_every_two_values_meet_and_rows_are_fewer_than_the_product(sizes: tuple[int, ...]) -> None:
    mark = pairs(**{f"p{place}": range(size) for place, size in enumerate(sizes)})
    rows = [param.values for param in mark.args[1]]
    for one, two in itertools.combinations(range(len(sizes)), 2):
        assert len({(row[one], row[two]) for row in rows}) == sizes[one] * sizes[two]
    product = len(list(itertools.product(*map(range, sizes))))
    assert len(rows) < product or len(sizes) == 2 or len(rows) == product == len(set(rows))


def test_rows_keep_the_marks_and_names_of_their_values() -> None:
    skipped = pytest.param(8, id="eight", marks=pytest.mark.xfail)
    rows = pairs(size=[4, skipped], kind=["a"]).args[1]
    assert [row.id for row in rows] == ["4-a", "eight-a"]
    assert [len(row.marks) for row in rows] == [0, 1]


def test_values_meet_in_rows_that_no_mark_skips() -> None:
    skipped = pytest.param("cuda", marks=pytest.mark.cuda)
    mark = pairs("gpu", gpu=["a", "b", skipped], kind=range(3), budget=range(3))
    assert mark.kwargs == {"indirect": ["gpu"]}
    rows = mark.args[1]
    run = [row.values for row in rows if not row.marks]
    assert {values[1:] for values in run} == set(itertools.product(range(3), range(3)))
    for one, two in ((0, 1), (0, 2)):
        assert len({(row.values[one], row.values[two]) for row in rows}) == 9


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("gemini/optim/lion.py", "tests/training/test_rules.py"),
        ("parallel/pipeline/tied_weights.py", "tests/parallel/test_pipeline_training.py"),
        ("gemini/cli/trace.py", "tests/unit/test_trace_cli.py"),  # run as a command
        ("tests/faults/injected_faults.py", "tests/faults/test_injected_faults.py"),  # run as a program
        ("csrc/aio/async_file.cpp", "tests/unit/test_async_file.py"),
        ("gemini/compat/adapters/__init__.py", "tests/parallel/test_compat.py"),  # imported by name
        ("gemini/planner/auto.py", "tests/planner/test_auto.py"),  # as gemini.autoparallelize
        ("gemini/planner/auto.py", "tests/parallel/test_compat.py"),
        ("recipes/lora.toml", "tests/unit/test_finetune_recipe.py"),
    ],
)
def test_a_change_reaches_the_tests_of_what_it_changes(changed: str, reached: str) -> None:
    assert (ROOT / changed).exists(), "name another file"
    assert reached in affected.distances([changed])


def test_tests_of_a_change_are_nearer_than_others_and_many_are_not_reached() -> None:
    found = affected.distances(["parallel/pipeline/orders.py"])
    assert found["tests/parallel/test_pipeline_orders.py"] == 1
    assert found["tests/parallel/test_document_programs.py"] > 1
    assert "tests/training/test_rules.py" not in found
    assert affected.distances([]) == {}


def test_a_dear_case_without_a_reason_is_named(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    rows = {"cheap": {"seconds": 1}, "dear": {"seconds": 99}, "said": {"seconds": 99, "reason": "ranks"}}
    file.write_text(json.dumps(rows))
    assert without_reason(file) == ["99 s: dear"]
