"""``gemini bench parallel``: both sides compute the same, verdicts follow, failures are heard."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pairs import first

from gemini.cli.main import main
from gemini.errors import StateError
from gemini_bench import parallel
from gemini_bench.parallel_ranks import RankFailed, fork_ranks
from gemini_bench.session import Session, WorkerRun
from gemini_bench.watch import Ending, WatchedRun


def measured(change: str = "") -> Any:
    """Stand in for a worker: who comes first takes 0.8 of the time and 0.75 of the memory of the others;
    ``change`` has another loss."""

    def run(_task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
        names = options["names"]
        seconds = {name: [8.0, 1.6] if index == 0 else [10.0, 2.0] for index, name in enumerate(names)}
        losses = {name: [4.0, 3.001 if name == change else 3.0] for name in names}
        peaks = {name: 75 if index == 0 else 100 for index, name in enumerate(names)}
        result = {
            "seconds": seconds,
            "losses": losses,
            "memory_losses": losses if options["memory"] else {},
            "peak_rss_bytes": peaks if options["memory"] else {},
        }
        return WorkerRun(result, WatchedRun(Ending.FINISHED, 0, 0.1, 0, "", ""))

    return run


@pytest.mark.dear("one real run of a case, with ranks of its own")
@pytest.mark.parametrize("case", first(parallel.CASES))
def test_a_quick_run_measures_every_row_of_a_case(case: str, capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    assert main(["bench", "parallel", "--quick", "--only", case, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)["cases"][case]
    assert found["rows"]
    assert all(row["value"] > 0 for row in found["rows"])
    assert json.loads(out.read_text())["cases"][case] == found
    assert "gemini-bench-" not in out.read_text()  # a directory of this machine


def test_time_is_compared_step_by_step_and_memory_by_rank(tmp_path: Path) -> None:
    rows = {row.what: row for row in parallel.tensor(Session(tmp_path, run=measured())).rows}
    time_row = rows["ours / parallelize_module: step, paired"]
    assert time_row.value == 0.8
    assert time_row.met
    assert rows["ours / parallelize_module: peak memory"].value == 0.75
    assert rows["ours / parallelize_module: peak memory"].met
    assert not rows["our layers, torch's AdamW / parallelize_module: step, paired"].met


def test_what_has_no_target_of_memory_is_not_measured_alone(tmp_path: Path) -> None:
    rows = parallel.single(Session(tmp_path, run=measured())).rows
    assert not [row.what for row in rows if "memory" in row.what]


@pytest.mark.parametrize("odd", ["ours", "FSDP2 x TP"])
def test_contenders_that_compute_something_else_are_not_compared(odd: str, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="'FSDP2 x TP' differ from those of 'ours'"):
        parallel.hybrid(Session(tmp_path, run=measured(odd)))


def _be_or_fail(how: str, rank: int) -> int:
    if rank == 1 and how == "raise":
        raise ValueError("a bad batch")
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 if how != "" else 0)
    return rank


@pytest.mark.parametrize(("how", "said"), [("raise", "ValueError: a bad batch"), ("die", "rank 1 died")])
def test_a_rank_that_fails_ends_the_others(how: str, said: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=said):
        fork_ranks(lambda rank: _be_or_fail(how, rank), 2)
    assert time.monotonic() - begin < 50


def test_ranks_return_what_they_found_in_order() -> None:
    runs = fork_ranks(lambda rank: _be_or_fail("", rank), 2)
    assert [run.result for run in runs] == [0, 1]
    assert all(run.peak_rss_bytes > 0 for run in runs)
