"""docs/fit.md: its arithmetic is right, its command plans, and its program is refused and then fits."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from programs import run_python

import gemini

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "fit.md").read_text()
ROWS = re.findall(
    r"^\| .* \| ([\d.]+) billion \| (\d+) \| ([\d.]+) GB \| (\d+) GB \| ([\d.]+) GB \|$", PAGE, re.M
)


def run(arguments: list[str], directory: Path) -> str:
    """Run Python in ``directory``, with this gemini; return its output."""
    ours = {**os.environ, "PYTHONPATH": str(Path(gemini.__file__).parents[1])}
    done = run_python(arguments, cwd=directory, env=ours)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_table_has_all_its_rows() -> None:
    assert len(ROWS) == 5


@pytest.mark.parametrize(("billions", "each", "total", "above", "below"), ROWS)
def test_the_disk_holds_what_the_other_tiers_do_not(
    billions: str, each: str, total: str, above: str, below: str
) -> None:
    assert float(total) == pytest.approx(float(billions) * int(each), abs=0.051)
    assert float(below) == pytest.approx(max(0.0, float(total) - int(above)), abs=0.001)


def test_the_program_is_refused_with_the_budget_that_then_suffices(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    refused, wrapped = run(["-c", program], tmp_path).splitlines()
    assert "give disk_dir and disk_bytes of at least" in refused
    assert "'budget_bytes': 4194304" in wrapped
    assert list(tmp_path.iterdir()) == []


def test_the_described_laptop_plans_the_command_of_the_page(tmp_path: Path) -> None:
    (machine,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "laptop.json").write_text(machine)
    (line,) = re.findall(r"^    gemini (plan .*)$", PAGE, re.M)
    small = "gpt:layers=4,hidden=256,heads=4,vocab=1000"  # the model of the page takes half a minute
    words = [small if word == "gpt2-xl" else word for word in shlex.split(line)]
    assert small in words
    output = run(["-c", f"import sys; from gemini.cli.main import main; sys.exit(main({words}))"], tmp_path)
    assert "It fits." in output
    assert "nothing was timed" in output
