"""``gemini bench zero``: its cases run, its verdicts follow from its figures, what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from pairs import first

from gemini.cli.main import main
from gemini.errors import StateError
from gemini_bench import zero_step, zero_volume
from gemini_bench.session import Session, WorkerFailed, WorkerRun
from gemini_bench.watch import Ending, WatchedRun
from gemini_bench.zero_ranks import run_ranks

SECONDS = {"ours": 8.0, "ours, few whole": 9.0, "FSDP2": 10.0, "DDP": 5.0}
PEAKS = {"ours": 60, "ours, few whole": 50, "FSDP2": 100, "DDP": 200}


def ended(result: dict[str, Any] | None, peak: int = 0) -> WorkerRun:
    ending = Ending.FINISHED if result is not None else Ending.FAILED
    return WorkerRun(result, WatchedRun(ending, 0, 0.1, peak, "", "reason"))


def trained(_task: str, options: dict[str, Any], *, loss: float = 1.0, **_watch: Any) -> WorkerRun:
    """Stand in for a rank: the second one needs a byte more."""
    kind = options["kind"]
    seconds = [SECONDS[kind]]
    found = {"losses": [loss], "seconds": seconds, "forward": seconds, "backward": seconds, "update": seconds}
    return ended(found, PEAKS[kind] + options["rank"])


def figures(rows: Any) -> dict[str, Any]:
    return {row.what: row for row in rows}


@pytest.mark.dear("two ranks train with FSDP2 and with ours")
@pytest.mark.parametrize("case", first(["fsdp2", "volume"]))
def test_a_quick_run_measures_every_row_of_a_case(case: str, capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    arguments = ["bench", "zero", "--quick", "--rounds", "1", "--only", case, "--json", "--out", str(out)]
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out)["cases"][case]["rows"]
    assert rows
    assert all(row["value"] > 0 for row in rows)
    assert json.loads(out.read_text())["cases"][case]["rows"] == rows


def test_time_and_memory_are_compared_within_a_round(tmp_path: Path) -> None:
    found = figures(zero_step.run(Session(tmp_path, quick=True, run=trained), 2).rows)
    assert found["ours / FSDP2: step"].value == 0.8
    assert found["ours / FSDP2: step"].met
    assert found["ours / FSDP2: peak"].value == 61 / 101
    assert found["ours, few whole / DDP: peak"].value == 51 / 201
    assert found["ours, few whole / DDP: peak"].met is None


def test_contenders_that_compute_something_else_are_not_compared(tmp_path: Path) -> None:
    def run(task: str, options: dict[str, Any], **watch: Any) -> WorkerRun:
        return trained(task, options, loss=2.0 if options["kind"] == "DDP" else 1.0, **watch)

    with pytest.raises(StateError, match="losses of 'DDP' differ"):
        zero_step.run(Session(tmp_path, quick=True, run=run), 1)


def test_a_rank_without_a_result_fails_the_case(tmp_path: Path) -> None:
    def run(task: str, options: dict[str, Any], **watch: Any) -> WorkerRun:
        return ended(None) if options["rank"] == 1 else trained(task, options, **watch)

    with pytest.raises(WorkerFailed, match="reason"):
        zero_step.run(Session(tmp_path, quick=True, run=run), 1)


def test_the_first_failure_ends_the_other_ranks_and_is_the_one_reported(tmp_path: Path) -> None:
    def run(_task: str, options: dict[str, Any], *, stop: threading.Event, **_watch: Any) -> WorkerRun:
        if options["rank"] == 0:
            assert stop.wait(60)
            return WorkerRun(None, WatchedRun(Ending.STOPPED, -9, 0.1, 0, "", "another reason"))
        return ended(None)

    with pytest.raises(WorkerFailed, match=r"failed.*\n?reason"):
        run_ranks(Session(tmp_path, run=run), "task", {}, 2)


@pytest.mark.parametrize(("sent", "met"), [(3.0, True), (3.1, False)])
def test_bytes_sent_are_judged_by_two_gathers_and_one_reduction(sent: float, met: bool) -> None:
    once = 4 * 1000 * 3 / 4
    least = {
        "gathered_bytes": once,
        "reduced_bytes": once,
        "rounds": 1,
        "peak_bytes": 4000,
        "gather_room_bytes": 100,
        "gradient_room_bytes": 100,
    }
    most = {**least, "gathered_bytes": once * (sent - 1), "peak_bytes": 4410}
    found = figures(zero_volume.rows_of([least, least, most, least], 1000))
    assert found["4 ranks: sent / two gathers and one reduction"].met is met
    memory = found["4 ranks: peak / (total / 4 + room for what is whole)"]
    assert memory.value == pytest.approx(4410 / 4200)
    assert memory.met


def test_rounds_below_one_are_refused(capsys: Any) -> None:
    assert main(["bench", "zero", "--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
