"""The examples of docs/autoplan.md run as printed, and give what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.cli.main import main

pytestmark = pytest.mark.usefixtures("kept_records")
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "autoplan.md").read_text()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands about the described machine, and its file."""
    monkeypatch.chdir(tmp_path)
    machine = re.search(r"```json\n(.*?)```", PAGE, flags=re.S)
    assert machine is not None
    (tmp_path / "machine.json").write_text(machine[1])
    found = re.findall(r"^    gemini (plan .*--machine machine\.json.*)$", PAGE, flags=re.M)
    return [shlex.split(each) for each in found]


def test_the_program_trains_as_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    program = re.search(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert program is not None
    defined: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(program[1], defined)
    assert "Plan for 1 rank: tp 1, pp 1, sp 1, dp 1" in capsys.readouterr().out
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    inputs = torch.randn(16, 64)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
    assert float(defined["loss"]) == pytest.approx(loss.item(), rel=1e-5)


def planned(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main([*command, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.dear("the three searches of the page run as printed")
def test_the_examples_give_what_the_page_says(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    roomy, tight, disk = commands
    code, plan = planned(roomy, capsys)
    assert code == 0
    (rank, *_) = plan["predicted"]["ranks"]
    assert rank["device_bytes"] < 2**32
    code, plan = planned(tight, capsys)
    assert code == 0
    assert all(each["device_bytes"] <= 32 * 2**20 for each in plan["predicted"]["ranks"])
    assert plan["layout"]["pp"] > 1 or plan["zero_stage"] > 0 or plan["recompute"]
    code, plan = planned(disk, capsys)
    assert code == 0
    assert plan["zero_stage"] == 3
    assert plan["budgets"]["disk_bytes"] == 2**30
    assert plan["num_microbatches"] > 1


@pytest.mark.dear("a search for the budgets that would do, and one with them")
def test_what_would_do_does(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    _, tight, _ = commands
    less = [each.replace("32MiB", "8MiB") for each in tight]
    code, said = planned(less, capsys)
    assert code == 1
    enough = said["why"].partition("--device-bytes ")[2].partition(" ")[0]
    code, _ = planned([each.replace("32MiB", enough) for each in tight], capsys)
    assert code == 0
