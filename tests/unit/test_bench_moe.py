"""``gemini bench moe``: its case runs, and its verdicts follow from its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import first

from gemini.chunk.cpu_memory import CpuDevice
from gemini.cli.main import main
from gemini.errors import OutOfBudgetError
from gemini_bench import moe, moe_floor, moe_mixture, moe_training

TINY = moe_mixture.Mixture(width=64, expert_width=64, experts=8, head=16, vocabulary=64)


@pytest.mark.dear("one real run of a case: a program that imports transformers and looks for a budget")
@pytest.mark.parametrize("case", first(moe.CASES))
def test_a_quick_run_measures_every_row_of_a_case(case: str, capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out, disk = tmp_path / "record.json", tmp_path / "disk"
    disk.mkdir()
    command = [
        "bench",
        "moe",
        "--quick",
        "--only",
        case,
        "--json",
        "--out",
        str(out),
        "--disk-dir",
        str(disk),
    ]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in record["cases"][case]["rows"]}
    assert all(row["value"] is not None for row in rows.values())
    for exact in ("runs with the losses and weights of plain torch, bit for bit", "128 tokens: experts used"):
        assert next(row["value"] for what, row in rows.items() if what.startswith(exact)) == 1
    assert not list(disk.iterdir())


def _run(tokens: int, mine: float, others: float, *, equal: bool = True) -> dict[str, Any]:
    readings = {"by the expert": [mine] * 3, "whole arrays": [others] * 3}
    return {
        **dict.fromkeys(("seconds", "cpu_seconds", "moved_bytes"), readings),
        "tokens": tokens,
        "device_bytes": 100,
        "peak_bytes": {"by the expert": 90, "whole arrays": 100},
        "used_share": min(1.0, tokens / 16),
        "equal": equal,
    }


@pytest.mark.parametrize(
    ("few", "many", "least", "equal", "met"),
    [((3, 10), (21, 20), 120, True, True), ((5, 10), (22, 20), 121, False, False)],
)
def test_verdicts_follow_from_bytes_times_budgets_and_bits(
    few: tuple[int, int], many: tuple[int, int], least: int, equal: bool, met: bool
) -> None:
    floor = {"least_bytes": least, "expert_bytes": 80, "dense_bytes": 20, "equal": True}
    found = {"few": _run(4, *few), "many": _run(1024, *many, equal=equal), "floor": floor}
    verdicts = {row.what: row.met for row in moe_training.rows_of(found) if row.met is not None}
    fixed = [what for what in verdicts if what.endswith(("most on DEVICE / budget", "used by a step"))]
    assert [verdicts.pop(what) for what in fixed] == [True, True, True]
    assert len(verdicts) == 4
    assert set(verdicts.values()) == {met}


@pytest.mark.parametrize("least", [1, 4096, 4097, 77 * 4096, 1000 * 4096])
def test_the_least_budget_is_found_to_the_page(least: int) -> None:
    assert moe_floor.least_budget(lambda budget: budget >= least, 1000 * 4096) == -(-least // 4096) * 4096


@pytest.mark.dear("imports transformers")
def test_only_the_arrays_of_one_side_are_cut(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    where = {"device_bytes": 96 * 1024, "disk_dir": str(tmp_path)}  # a row of 32 KiB, not an array of 256
    tokens = TINY.tokens(1, 4, seed=0)
    with moe_mixture.Trainee(TINY, "by the expert", **where) as trainee:
        assert trainee.step(tokens) > 0
    with pytest.raises(OutOfBudgetError), moe_mixture.Trainee(TINY, "whole arrays", **where) as trainee:
        trainee.step(tokens)
    assert CpuDevice.cuts_chunks
