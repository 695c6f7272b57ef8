"""The machinery of ``gemini bench``: the watch, the record, the choice of cases, the tasks on tiny models."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gemini.errors import ConfigError, IoError, StateError
from gemini.jobs.gpt.model import GPTConfig, num_parameters
from gemini_bench import endurance, largest, loss, many, offload, preop, resident, runtime
from gemini_bench.cases import run_cases
from gemini_bench.cli import bench as command
from gemini_bench.cli.output import command as command_line
from gemini_bench.cli.output import publish
from gemini_bench.record import Row, environment
from gemini_bench.session import CaseResult, Session, WorkerFailed, WorkerRun, measure_bare_bytes, run_worker
from gemini_bench.table import render, value_text
from gemini_bench.trainee import GPT2_124M, ManagedTrainee, PlainTrainee, make_batches, train
from gemini_bench.watch import Ending, WatchedRun, run_watched
from gemini_bench.worker import find_task

MIB = 1 << 20
TINY = GPTConfig(vocab=32, layers=1, hidden=16, heads=2, seq=8)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def watched(ending: Ending = Ending.FINISHED, peak: int = 0) -> WatchedRun:
    return WatchedRun(ending, 0 if ending is Ending.FINISHED else -9, 0.1, peak, "", "reason")


# -- the watch -----------------------------------------------------------------------------------


def test_watch_kills_a_process_over_its_limit() -> None:
    grow = "held = []\nwhile True: held.append(bytearray(b'x') * (1 << 20))"
    run = run_watched(python(grow), limit_bytes=64 * MIB, timeout_seconds=60)
    assert run.ending is Ending.OVER_LIMIT
    assert run.exit_code == -9
    assert run.peak_rss_bytes > 64 * MIB


def test_watch_kills_a_process_over_its_time() -> None:
    run = run_watched(python("while True: pass"), timeout_seconds=0.3)
    assert run.ending is Ending.OUT_OF_TIME
    assert run.exit_code == -9


def test_watch_kills_a_process_that_it_is_told_to_stop() -> None:
    stop = threading.Event()
    stop.set()
    run = run_watched(python("while True: pass"), timeout_seconds=60, stop=stop)
    assert run.ending is Ending.STOPPED
    assert run.exit_code == -9


def test_a_killed_process_takes_its_children_along(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    spawn = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )

    class Told(threading.Event):
        def is_set(self) -> bool:
            return told.exists() and told.read_text() != ""

    assert run_watched(python(spawn), timeout_seconds=60, stop=Told()).ending is Ending.STOPPED
    with contextlib.suppress(ProcessLookupError):  # it is gone
        ends = select.poll()
        ends.register(os.pidfd_open(int(told.read_text())))
        assert ends.poll(30_000)


def test_watch_sees_memory_that_was_given_back_before_the_end() -> None:
    hold = "import time; held = bytearray(b'x') * (96 << 20); time.sleep(0.2); del held; time.sleep(0.1)"
    run = run_watched(python(hold), limit_bytes=1024 * MIB)
    assert run.ending is Ending.FINISHED
    assert run.peak_rss_bytes > 96 * MIB


def test_watch_reports_output_and_failure() -> None:
    assert run_watched(python("print('done')")).output == "done\n"
    run = run_watched(python("raise SystemExit('reason')"))
    assert (run.ending, run.exit_code, run.error_tail) == (Ending.FAILED, 1, "reason\n")


# -- workers -------------------------------------------------------------------------------------


def test_worker_result_is_kept_apart_from_what_libraries_print() -> None:
    options = {"layers": 2, "repeats": 1, "warmup_steps": 1, "chunks": 4, "moments": 8}
    run = run_worker("preop.core", options, timeout_seconds=120)
    assert set(run.data()) == {"called_us", "traced_us", "empty_calls_us"}


def test_worker_without_a_result_raises_with_its_reason() -> None:
    with pytest.raises(WorkerFailed, match=r"over the memory limit.*\n?reason"):
        WorkerRun(None, watched(Ending.OVER_LIMIT)).data()


@pytest.mark.parametrize("name", ["resident.nothing", "nothing.paired", "record.paired", "resident"])
def test_unknown_task_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no benchmark task"):
        find_task(name)


# -- tasks on tiny models ------------------------------------------------------------------------


def test_gpt2_has_its_published_size() -> None:
    assert num_parameters(GPT2_124M) == 124_439_808


@pytest.mark.parametrize("keep_gradients", [False, True])
def test_trainees_compute_the_same_losses(keep_gradients: bool, tmp_path: Path) -> None:
    batches = make_batches(TINY, count=4, batch=2, seq=8)
    managed = ManagedTrainee(TINY, device_bytes="64KiB", non_model_bytes=0, disk_dir=str(tmp_path))
    try:
        losses = train(managed, batches)
    finally:
        managed.close()
    assert losses == train(PlainTrainee(TINY, keep_gradients=keep_gradients), batches)


def test_a_gpu_changes_nothing_for_what_measures_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemini.system.device.current_device", lambda: torch.device("cuda", 0))
    managed = ManagedTrainee(TINY)
    assert managed.model.device.type == "cpu"
    managed.close()


def test_batches_longer_than_the_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="9 tokens"):
        make_batches(TINY, count=1, batch=1, seq=9)


def options_of(settings: Any, **more: Any) -> dict[str, Any]:
    """Return what a worker gets: through JSON, as it would."""
    options: dict[str, Any] = json.loads(
        json.dumps({**vars(settings), "model": vars(settings.model), **more})
    )
    return options


def test_paired_task_times_every_measured_step_of_both() -> None:
    found = resident.paired(
        options_of(resident.Settings(TINY, batch=2, seq=8, warmup_steps=2, measured_steps=3))
    )
    assert len(found["plain_seconds"]) == len(found["managed_seconds"]) == 3
    assert len(found["losses"]) == 5


def test_offload_task_counts_traffic_within_its_budget(tmp_path: Path) -> None:
    settings = offload.Settings(TINY, batch=2, seq=8, warmup_steps=2, measured_steps=2)
    found = offload.managed(options_of(settings, device_bytes=40_000, disk_dir=str(tmp_path)))
    assert found["disk_read"]["bytes"] > 0
    assert found["device_peak_bytes"] <= 40_000
    assert found["losses"] == offload.plain(options_of(settings))["losses"]


@pytest.mark.parametrize("path", ["resident", "traced"])
def test_operator_task_takes_the_path_it_measures(path: str) -> None:
    found = preop.operators({**vars(preop.Settings(layers=32, repeats=2)), "path": path})
    assert found["preops_per_operator"] == 4  # forward, backward, and the gradients of weight and bias
    assert found["traced_steps"] == (1 if path == "resident" else 4 + 2)


def test_many_parameters_are_trained_by_both_and_what_runs_is_counted() -> None:
    found = many.measure({"count": 60, "numel": 8, "steady_steps": 1})
    assert set(found["managed"]) == {"wrap", "make the optimizer", *found["plain"]}
    entered = many.entered({})
    assert 0 < entered["forward"] < entered["wrap"]
    table = {row.what: row for row in many.rows({"30": [found], "60": [found]}, {**entered, "forward": 8})}
    assert table["first step: 60 / 30, per parameter"].value == 1.0
    assert table["files entered: forward"].met is True
    assert table["files entered: wrap"].met is (entered["wrap"] <= 30)
    slow = {"plain": found["plain"], "managed": {**found["managed"], "wrap": 60.1}}
    assert many.rows({"30": [slow], "60": [slow]}, entered)[3].met is False


def test_losses_are_measured_side_by_side(tmp_path: Path) -> None:
    def run(task: str, options: dict[str, Any], **_: Any) -> WorkerRun:
        return WorkerRun(find_task(task)(options), watched())

    result = loss.run(Session(tmp_path, quick=True, run=run))
    table = {row.what: row for row in result.rows}
    assert table["tiny: gradients, difference from the plain ones"].met is True
    losses = [runs[0]["loss"] for runs in result.measured["runs"]["tiny"].values()]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-5)
    slow = {
        "plain": [{"cpu_seconds": 1.0, "peak_bytes": 20.0}],
        "tiled": [{"cpu_seconds": 1.1, "peak_bytes": 1.1}],
    }
    rows = {row.what: row.met for row in loss.rows({"any": slow}, {"any": {"loss": 0.0, "weight": 2e-6}})}
    assert [met for met in rows.values() if met is not None] == [False] * 3


def test_endurance_task_reads_files_without_a_name(tmp_path: Path) -> None:
    settings = endurance.Settings(TINY, batch=1, seq=8, share=0.6, checkpoints=(2, 4))
    found = endurance.steps(options_of(settings, disk_dir=str(tmp_path)))
    first, last = found["readings"]
    assert first["file_bytes"] > 0
    assert first["file_bytes"] == last["file_bytes"]
    assert first["open_files"] == last["open_files"]
    assert not list(tmp_path.iterdir())


def test_bare_process_is_measured_without_this_package() -> None:
    assert 50 * MIB < measure_bare_bytes() < 2048 * MIB


def test_offload_case_compares_growth_with_the_stated_bound(tmp_path: Path) -> None:
    model_data = 16 * num_parameters(offload.QUICK.model)

    def run(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
        peak = 300 * MIB + model_data if task == "offload.plain" else 400 * MIB + options["device_bytes"]
        traffic = {"bytes": 8, "seconds": 2.0}
        found = {
            "losses": [1.0],
            "seconds": [1.0],
            "stall_seconds": 0.5,
            "disk_read": traffic,
            "disk_write": traffic,
        }
        return WorkerRun(found, watched(peak=peak))

    result = offload.run(Session(tmp_path, quick=True, bare_bytes=lambda: 200 * MIB, run=run))
    for found in result.measured["shares"].values():
        assert found["growth_bytes"] == 200 * MIB + found["device_bytes"]
        assert found["bound_bytes"] == found["device_bytes"] + 100 * MIB + 150_000_000
    assert [row.met for row in result.rows if row.target is not None] == [True, True]


# -- the ladder ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", range(-1, 7))
def test_bisection_finds_the_highest_rung_that_fits(reached: int) -> None:
    assert largest.highest(7, lambda index: index <= reached) == reached


def test_ladder_rises_in_small_steps() -> None:
    sizes = [num_parameters(rung) for rung in largest.ladder(largest.Settings())]
    above = [size for size in sizes if size > 20_000_000]
    assert all(1 < high / low < 1.25 for low, high in itertools.pairwise(above))


@pytest.mark.parametrize("parameters", [2e8, 1e9, 3e9])
def test_rung_has_the_parameters_it_was_asked_for(parameters: float) -> None:
    assert math.isclose(num_parameters(largest.rung(parameters)), parameters, rel_tol=0.03)


def fake_runs(fits_below: int, losses: list[float]) -> Callable[..., WorkerRun]:
    """Return a stand-in for run_worker: plain torch fits below a size in parameters, managed always."""

    def run(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
        if task == "largest.plain" and num_parameters(GPTConfig(**options["model"])) >= fits_below:
            return WorkerRun(None, watched(Ending.OVER_LIMIT))
        if task == "largest.floor":
            return WorkerRun({"bytes_per_second": 40.0}, watched())
        found = {"losses": losses, "seconds": [9.0, 4.0], "disk_budget_bytes": 1, "disk_peak_bytes": 1}
        found |= {"step_bytes": 80, "model_data_bytes": 83_000_000}
        return WorkerRun(found, watched(peak=5))

    return run


def test_largest_case_reports_the_ratio_of_parameters(tmp_path: Path) -> None:
    session = Session(
        tmp_path, quick=True, bare_bytes=lambda: 200 * MIB, run=fake_runs(5_000_000, [5.0, 4.0])
    )
    result = largest.run(session)
    measured = result.measured
    assert measured["plain_parameters"] < 5_000_000 <= measured["next_rung_parameters"]
    assert measured["ratio"] == measured["managed_parameters"] / measured["plain_parameters"]
    assert all(row.met is not False for row in result.rows)


def test_compact_case_counts_the_bytes_of_a_parameter_and_the_floor_of_the_disk(tmp_path: Path) -> None:
    session = Session(
        tmp_path, quick=True, bare_bytes=lambda: 200 * MIB, run=fake_runs(5_000_000, [5.0, 4.0])
    )
    result = largest.run_compact(session)
    values = {row.what: row.value for row in result.rows}
    assert values["managed, model data"] == 83_000_000 / result.measured["managed_parameters"]
    assert values["the bare disk, for as many bytes"] == 80 / 40
    assert values["managed, median step / that floor"] == 4.0 / 2.0


@pytest.mark.parametrize("losses", [[5.0, math.nan], [5.0, 5.0]])
def test_largest_case_refuses_a_model_that_does_not_learn(losses: list[float], tmp_path: Path) -> None:
    with pytest.raises(StateError, match="does not learn"):
        largest.run(
            Session(tmp_path, quick=True, bare_bytes=lambda: 200 * MIB, run=fake_runs(5_000_000, losses))
        )


@pytest.mark.parametrize("fits_below", [0, 10**12])
def test_largest_case_needs_both_ends_of_the_ladder(fits_below: int, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="choose another limit"):
        largest.run(
            Session(tmp_path, quick=True, bare_bytes=lambda: 200 * MIB, run=fake_runs(fits_below, [5.0, 4.0]))
        )


def test_limit_below_a_bare_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="importing torch"):
        largest.run(Session(tmp_path, limit_bytes=340 * MIB, bare_bytes=lambda: 200 * MIB))


# -- the record ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "met"),
    [
        (Row("a", 1.0, "x", 1.0), True),
        (Row("a", 1.1, "x", 1.0), False),
        (Row("a", 19.9, "x", 20.0, at_least=True), False),
        (Row("a", 20.0, "x", 20.0, at_least=True), True),
        (Row("a", math.nan, "x", 1.0), False),
        (Row("a", 1.0, "x"), None),
    ],
)
def test_verdict_follows_from_value_and_target(row: Row, met: bool | None) -> None:
    assert row.met is met


def test_environment_says_what_ran_where() -> None:
    found = environment(["gemini", "bench"])
    assert found["command"] == "gemini bench"
    assert found["cores"] > 0
    assert found["ram_bytes"] > 0
    assert json.loads(json.dumps(found)) == found


def test_failed_case_leaves_the_others_and_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_session: Session) -> CaseResult:
        raise StateError("broken")

    def measure(session: Session) -> CaseResult:
        (session.disk_dir / "left").touch()
        return CaseResult([Row("speed [raw]", 2.0, "s", 1.0)], {}, {})

    monkeypatch.setattr(runtime, "CASES", {"bad": fail, "good": measure})
    record = runtime.run(Session(tmp_path), ["bad", "good"], ["gemini"])
    assert record["failed"] == ["bad"]
    assert record["missed"] == ["good: speed [raw]"]
    assert not list(tmp_path.iterdir())
    console = Console(record=True, width=160)
    render(record, console)
    text = console.export_text()
    assert all(part in text for part in ("StateError: broken", "failed", "speed [raw]", "missed"))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (3 * MIB, "bytes", "3.0 MiB"),
        (0.256, "share", "25.6%"),
        (124e6, "parameters", "124,000,000 parameters"),
    ],
)
def test_figures_are_scaled_for_people(value: float, unit: str, text: str) -> None:
    assert value_text(value, unit) == text


# -- the command ---------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "runtime", *arguments])


def test_unknown_case_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown case 'speed'; choose from resident, offload"):
        command.run(parse("--only", "preop", "speed"))


def test_paths_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--disk-dir"):
        command.run(parse("--disk-dir", str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="--out"):
        command.run(parse("--out", str(tmp_path / "none" / "record.json")))
    with pytest.raises(ConfigError, match="is a directory; name a file"):
        command.run(parse("--out", str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be written"):
        command.run(parse("--out", "/proc/sys/record.json"))  # which not even root can make


def test_figures_are_printed_although_their_record_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = {"failed": [], "missed": [], "quick": True}
    with pytest.raises(IoError, match="cannot write the record"):
        publish(record, argparse.Namespace(out=Path("/dev/full"), json=True))
    assert json.loads(capsys.readouterr().out) == record


def test_exit_code_says_whether_targets_were_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def miss(_session: Session) -> CaseResult:
        return CaseResult([Row("speed", 2.0, "s", 1.0)], {}, {})

    monkeypatch.setattr(runtime, "CASES", {"speed": miss})
    out = tmp_path / "record.json"
    assert command.run(parse("--json", "--disk-dir", str(tmp_path), "--out", str(out))) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    assert command.run(parse("--quick", "--disk-dir", str(tmp_path))) == 0


def test_a_record_is_kept_case_by_case(tmp_path: Path) -> None:
    record = tmp_path / "record.json"

    def measured(_session: Session) -> CaseResult:
        return CaseResult([Row("steps", 3, "")], {}, {})

    def interrupted(_session: Session) -> CaseResult:
        raise KeyboardInterrupt

    session = Session(tmp_path, record=record)
    with pytest.raises(KeyboardInterrupt):
        run_cases("some", session, {"first": measured, "second": interrupted, "third": measured}, [])
    kept = json.loads(record.read_text())
    assert kept["cases"]["first"]["rows"][0]["value"] == 3
    assert kept["not_run"] == ["second", "third"]
    assert "not_run" not in run_cases("some", session, {"first": measured}, [])


def test_a_record_names_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    given = [
        "bench",
        "io",
        "--out",
        str(tmp_path / "there" / "x.json"),
        "--disk-dir",
        str(tmp_path / "here" / "d"),
    ]
    monkeypatch.setattr(sys, "argv", ["gemini", *given])
    assert command_line() == ["gemini", "bench", "io", "--out", "x.json", "--disk-dir", "d"]
