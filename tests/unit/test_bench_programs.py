"""``gemini bench programs``: its cases measure what they say, and notice what they are there to notice."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemini.errors import StateError
from gemini_bench import programs_import, programs_load, programs_loop, programs_resume
from gemini_bench.peaks import PhasePeaks, memory_of
from gemini_bench.session import CaseResult, Session, WorkerFailed, WorkerRun
from gemini_bench.watch import Ending, WatchedRun
from gemini_bench.worker import find_task

MIB = 1 << 20


def here(change: Callable[[str, dict[str, Any], dict[str, Any]], None] = lambda *_: None) -> Any:
    """Stand in for workers: run their tasks in this process, and ``change`` what they return."""

    def run(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
        result = find_task(task)(dict(options))
        change(task, options, result)
        return WorkerRun(result, WatchedRun(Ending.FINISHED, 0, 0.1, 100 * MIB, "", ""))

    return run


def rows_of(result: CaseResult) -> dict[str, Any]:
    """Return the rows by what they say; all have figures."""
    assert not [row.what for row in result.rows if math.isnan(row.value)]
    return {row.what: row for row in result.rows}


# -- loop ----------------------------------------------------------------------------------------


def test_all_three_loops_train_alike_and_are_compared(tmp_path: Path) -> None:
    result = programs_loop.run(Session(tmp_path, quick=True, run=here()))
    rows = rows_of(result)
    for place in programs_loop.PLACES:
        judged = [rows[f"{kind}, {place} / plain loop: time, paired"] for kind in ("engine", "trainer")]
        assert [row.target for row in judged] == [1.02, 1.02]
        assert len(result.measured[place]["seconds"]["trainer"]) == programs_loop.QUICK.rounds
    assert not torch.distributed.is_initialized()


def test_what_a_kind_adds_is_per_step() -> None:
    seconds = {"plain loop": [1.0, 2.0], "engine": [1.02, 2.02], "trainer": [1.2, 2.2]}
    timing = {"seconds": seconds, "nbytes": dict.fromkeys(seconds, 0.0), "batch": 7}
    settings = dataclasses.replace(programs_loop.QUICK, steps=20)
    rows = {row.what: row for row in programs_loop._time_rows(settings, "alone", timing)}
    assert rows["plain loop, alone: step of 7 rows"].value == pytest.approx(75.0)
    assert rows["engine, alone: adds to a step"].value == pytest.approx(1000.0)
    assert rows["engine, alone / plain loop: time, paired"].met
    assert not rows["trainer, alone / plain loop: time, paired"].met


def test_a_loop_that_trains_otherwise_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(job: programs_loop.Job) -> Callable[[], None]:
        return lambda: None

    monkeypatch.setitem(programs_loop.EPOCHS, "engine", idle)
    settings = dataclasses.replace(programs_loop.QUICK, rounds=1, batch=4)
    with pytest.raises(StateError, match="'engine' and 'plain loop' should compute the same"):
        programs_loop.paired({**dataclasses.asdict(settings), "place": "alone"})


def test_a_step_is_as_long_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretended(job: programs_loop.Job) -> Callable[[], float]:
        return lambda: 5 * (0.002 + 1e-4 * (job.loader.batch_size or 0))  # an epoch has 5 steps

    monkeypatch.setattr(programs_loop, "plain_epoch", pretended)
    monkeypatch.setattr(programs_loop, "wall_seconds", lambda epoch: epoch())
    batch = programs_loop.calibrated(dataclasses.replace(programs_loop.QUICK, step_seconds=0.05))
    assert 0.002 + 1e-4 * batch == pytest.approx(0.05, rel=0.05)


# -- resume --------------------------------------------------------------------------------------


@pytest.fixture
def trainers() -> None:
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")


def damage(task: str, options: dict[str, Any], result: dict[str, Any]) -> None:
    """Change a weight and a loss of what resumes."""
    if options["kind"] == "resumed":
        result["digests"]["lm_head.weight"] = "another"
        result["losses"]["5"] += 1e-6


@pytest.mark.usefixtures("trainers")
def test_saving_and_resuming_are_compared_with_not_stopping(tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}

    def keep(task: str, options: dict[str, Any], result: dict[str, Any]) -> None:
        found[options["kind"]] = copy.deepcopy(result)
        damage(task, options, result)

    result = programs_resume.run(Session(tmp_path, quick=True, run=here(keep)))
    rows = [row for row in result.rows if "other bits" in row.what]
    assert [row.value for row in rows] == [0, 2]  # as damaged, and in nothing else
    assert [row.met for row in rows] == [True, False]
    assert "such as lm_head.weight" in rows[1].what
    assert not programs_resume.unlike(found["undisturbed"], found["resumed"])
    assert set(found["resumed"]["losses"]) == {"4", "5"}
    assert {"save", "training"} <= set(found["saving"]["resident"])
    assert {"resume", "training"} <= set(found["resumed"]["resident"])
    names = set(found["undisturbed"]["digests"])
    assert {"lm_head.weight", "exp_avg of parameter 0", "exp_avg_sq of parameter 0"} <= names
    parameters = rows_of(result)["parameters"].value
    assert parameters == programs_resume.QUICK.num_parameters
    assert rows_of(result)["model data on DISK at the end, at least"].value > 0
    assert not list(tmp_path.iterdir())


def test_the_full_model_has_its_states_on_disk_and_no_room_elsewhere() -> None:
    settings = programs_resume.Settings()
    assert 8 * settings.num_parameters >= 0.8e9
    assert (settings.device_bytes, settings.host_bytes) == ("192MiB", "64MiB")


def test_memory_is_compared_within_a_round() -> None:
    training, saving = ({"resident": {"training": 300 * 10**6, "save": peak}} for peak in (0, 390 * 10**6))
    more = {"resident": {"training": 500 * 10**6}}
    found = {"undisturbed": [training, more], "saving": [saving, more]}
    extra = programs_resume._extra(found, "saving", "resident")
    assert (extra.low, extra.high) == (0.0, 90.0)


def test_states_that_only_one_side_has_are_unlike() -> None:
    want = {"digests": {"a": "1", "b": "2"}, "losses": {"1": 3.0, "2": 2.0}}
    got = {"digests": {"a": "1", "c": "2"}, "losses": {"2": 2.0}}
    assert programs_resume.unlike(want, got) == ["b", "c"]
    assert programs_resume.unlike(want, {**want, "losses": {"2": 2.5}}) == ["the loss of step 2"]


def wait_for_samples(peaks: PhasePeaks) -> None:
    """Wait until the sampler has slept three times from now on, and so sampled in between."""

    def slept() -> int:
        lines = Path(f"/proc/{peaks._sampler.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    enough = slept() + 3
    while slept() < enough:
        time.sleep(0.001)


def test_peaks_are_of_their_phase() -> None:
    with PhasePeaks() as peaks:
        peaks.end("before")
        held = b"x" * (96 * MIB)
        wait_for_samples(peaks)
        del held
        peaks.end("holding")
        peaks.end("after")
    assert peaks.resident["holding"] >= peaks.resident["after"] + 90 * MIB
    assert peaks.unmapped["holding"] >= peaks.unmapped["before"] + 90 * MIB


def test_pages_of_mapped_files_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * (32 * MIB))
    before = memory_of(os.getpid())
    mapped = torch.from_file(str(file), shared=True, size=32 * MIB, dtype=torch.uint8)
    assert mapped.sum(dtype=torch.int64) > 0
    after = memory_of(os.getpid())
    assert after[0] - before[0] > 30 * MIB
    assert after[1] - before[1] < 8 * MIB
    assert memory_of(2**22 + 1) == (0, 0)


# -- load ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trainers")
def test_a_load_reads_all_files_and_writes_nothing(tmp_path: Path) -> None:
    settings = programs_load.QUICK
    rows = rows_of(programs_load.run(Session(tmp_path, quick=True, run=here())))
    assert rows["files"].value > 1
    assert rows["bytes of the files"].value >= 2 * settings.num_parameters
    assert rows["written to DISK by a load"].value == 0
    assert [row.what for row in rows.values() if row.target is not None] == [
        "loading and the first use of every weight / reading",
        "memory beyond the budget and the largest tensor",
    ]


@pytest.mark.parametrize(("seconds", "grown", "met"), [(1.3, 460, [True, True]), (1.4, 461, [False, False])])
def test_a_load_is_judged_by_reading_and_by_its_budget(seconds: float, grown: int, met: list[bool]) -> None:
    settings = dataclasses.replace(programs_load.QUICK, device_bytes="300MB")
    found = {
        "seconds": {programs_load.READ: [1.0], programs_load.LOAD: [0.1], programs_load.USE: [seconds]},
        "files": 4,
        "file_bytes": 1,
        "spilled_bytes": 1,
        "largest_tensor_bytes": 100_000_000,
        "grown_bytes": grown * 1_000_000,
    }
    judged = [row for row in programs_load.rows(settings, found) if row.target is not None]
    assert [row.met for row in judged] == met


# -- import --------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that can be imported, in the place of gemini."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "light.py").write_text("import time\ntime.sleep(0.05)\n")
    (place / "laden.py").write_text("import xml.dom.minidom\n")
    (place / "broken.py").write_text("raise RuntimeError('no such luck')\n")
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return place


def imported(tmp_path: Path, package: str) -> dict[str, Any]:
    session = Session(tmp_path)
    heavy = ("xml", "sqlite3", "gemini_none_such")
    settings = programs_import.Settings(first="json", package=package, pairs=2, heavy=heavy)
    return rows_of(programs_import.measure(session, settings))


def test_an_import_is_timed_after_what_comes_before_it_with_its_bytecode(
    tmp_path: Path, package: Path
) -> None:
    rows = imported(tmp_path, "light")
    assert rows["import light after it, in the process"].low >= 0.05
    assert rows["import light after it, in the process"].target == programs_import.IMPORT_SECONDS
    assert rows["import light: loaded of 2 large packages"].met
    assert list((tmp_path / "bytecode").rglob("light.*.pyc"))


def test_a_large_package_that_is_loaded_is_named(tmp_path: Path, package: Path) -> None:
    row = imported(tmp_path, "laden")["import laden: loaded of 2 large packages: xml"]
    assert (row.value, row.met) == (1, False)


def test_an_import_that_fails_is_heard(tmp_path: Path, package: Path) -> None:
    with pytest.raises(WorkerFailed, match="no such luck"):
        imported(tmp_path, "broken")


def test_nothing_large_comes_with_gemini() -> None:
    assert {"transformers", "accelerate", "peft", "safetensors", "rich"} <= set(programs_import.HEAVY)
    assert programs_import.loaded_of(["torch._inductor", "rich"], ["torch._inductor.x", "richer"]) == [
        "torch._inductor"
    ]
