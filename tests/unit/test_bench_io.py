"""``gemini bench io``: which figures follow, what is refused, tiny runs; the commands of io and nvme."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first

from gemini.errors import ConfigError, StateError
from gemini_bench import (
    cases,
    io,
    io_cases,
    io_engine,
    io_fio,
    io_own,
    io_peers,
    nvme,
    nvme_alldisk,
)
from gemini_bench.cli import bench as bench_command
from gemini_bench.cli import disk as command
from gemini_bench.io_settings import QUICK, Settings, pieces
from gemini_bench.io_turns import DIRECTIONS, READ, WRITE, Mover, run_turns
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session, WorkerRun
from gemini_bench.watch import Ending, WatchedRun

MIB = 2**20


def judged(rows: list[Row]) -> dict[str, bool]:
    return {row.what: row.met for row in rows if row.met is not None}


def in_this_process(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
    """Run a worker's task here, its options and result through JSON."""
    module, _, name = task.partition(".")
    tasks = importlib.import_module(f"gemini_bench.{module}").TASKS
    found = json.loads(json.dumps(tasks[name](json.loads(json.dumps(options))), allow_nan=False))
    return WorkerRun(found, WatchedRun(Ending.FINISHED, 0, 0.1, 10**9, "", ""))


def quick_session(directory: Path) -> Session:
    return Session(directory, quick=True, run=in_this_process)


# -- tiny runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", first(io.CASES))
def test_every_case_of_io_runs_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    record = io.run(quick_session(tmp_path), Settings(), [case], ["gemini"])
    assert record["failed"] == []
    rows = json.loads(json.dumps(record, allow_nan=False))["cases"][case]["rows"]
    assert len({row["what"] for row in rows}) == len(rows)
    assert all(row["value"] >= 0 for row in rows if row["value"] is not None)
    assert list(tmp_path.iterdir()) == []


# -- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "piece"), [(10, 4), (8, 4), (3, 4)])
def test_pieces_cover_a_file_once_in_order(size: int, piece: int) -> None:
    covered = [offset + byte for offset, nbytes in pieces(size, piece) for byte in range(nbytes)]
    assert covered == list(range(size))


@pytest.mark.parametrize("backend", ["uring", "threads"])
@pytest.mark.parametrize("size_blocks", [1, 37, 64])
def test_own_file_reads_what_it_wrote(backend: str, size_blocks: int, tmp_path: Path) -> None:
    if backend == "uring" and io_own.AsyncFile(tmp_path, 4096).backend != "uring":
        pytest.skip("io_uring cannot be used here")
    settings = Settings(size_blocks * 8192, 1, 8192, depth=3, buffer_bytes=16 * 8192)
    with io_own.OwnFile(tmp_path, settings, backend=backend) as file:
        assert file.verify()
        assert file.read() > 0


def test_descriptor_of_own_file_opens_it(tmp_path: Path) -> None:
    with io_own.OwnFile(tmp_path, QUICK) as file:
        file.verify()
        found = Path(f"/proc/self/fd/{file.descriptor()}").read_bytes()
    assert len(found) == QUICK.size_bytes
    assert found[: 16 * 16] == bytes(range(256))


def test_movers_take_turns_and_every_pass_counts_once() -> None:
    calls: list[str] = []

    def mover(name: str) -> Mover:
        def take(direction: str) -> float:
            calls.append(f"{direction} {name}")
            return 1.0

        return Mover(name, lambda: take(WRITE), lambda: take(READ))

    found = run_turns([mover("a"), mover("b")], 2, 100)
    assert found[WRITE]["seconds"] == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert found[READ]["nbytes"] == {"a": 100, "b": 100}
    assert calls[:4] == ["write a", "write b", "read a", "read b"]
    assert calls[4:8] == ["write b", "write a", "read b", "read a"]


def test_mover_that_reads_something_else_is_refused() -> None:
    with pytest.raises(StateError, match="'a' reads something else"):
        run_turns([Mover("a", lambda: 1.0, lambda: 1.0, lambda: False)], 1, 1)


# -- fio -----------------------------------------------------------------------------------------


def report(*jobs: tuple[int, int]) -> str:
    return "note: about clocks\n" + json.dumps(
        {"jobs": [{"write": {"io_bytes": nbytes, "runtime": ms}} for nbytes, ms in jobs]}
    )


def test_fio_takes_as_long_as_its_slowest_job() -> None:
    assert io_fio.seconds(report((50, 1200), (50, 1500)), WRITE, 100) == 1.5


def test_fio_that_moved_too_little_is_refused() -> None:
    with pytest.raises(StateError, match="60 bytes instead of 100"):
        io_fio.seconds(report((60, 10)), WRITE, 100)


@pytest.mark.parametrize(("most", "count"), [(8, 8), (7, 4), (1, 1)])
def test_jobs_of_fio_divide_the_blocks_evenly(most: int, count: int) -> None:
    assert io_fio.shared_by(most, QUICK) == count
    arguments = io_fio.arguments(io_fio.Job("psync", count), 3, QUICK, READ)
    assert f"--size={QUICK.size_bytes // count}" in arguments
    assert f"--numjobs={count}" in arguments


# -- figures of io -------------------------------------------------------------------------------


def moved(seconds: dict[str, float], absent: dict[str, str] | None = None) -> dict[str, Any]:
    passes = {
        "seconds": {name: [value] for name, value in seconds.items()},
        "nbytes": dict.fromkeys(seconds, 1),
    }
    return {**dict.fromkeys(DIRECTIONS, passes), "default": "ours, uring", "absent": absent or {}}


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.05, True), (1.1, False)])
def test_direct_is_judged_by_the_best_peer_each_way(ours: float, met: bool) -> None:
    found = moved({"ours, uring": ours, "ours, threads": 0.5, "fio io_uring": 1.0, "DeepSpeed aio": 3.0})
    verdicts = judged(io_cases.rows(found))
    assert verdicts == {
        f"{way}: ours, uring (the default) / the best peer (fio io_uring)": met for way in DIRECTIONS
    }


def test_direct_without_peers_has_targets_but_no_verdicts() -> None:
    rows = io_cases.rows(moved({"ours, uring": 1.0}, {"fio": io_fio.INSTALL}))
    assert judged(rows) == {}
    dicts = [row.to_dict() for row in rows]
    assert [row["target"] for row in dicts if "not_measured" in row] == [">= 0.95"] * 2
    assert any("fio is not installed: apt-get install fio" in row["what"] for row in dicts)


@pytest.mark.parametrize("name", [io_peers.DEEPSPEED, io_peers.TENSORNVME])
def test_missing_peer_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Mover:
        raise ModuleNotFoundError(name="deepspeed")

    absent: dict[str, str] = {}
    assert io_peers.try_peer(name, make, absent) == []
    assert absent[name].startswith("is not installed: pip install")


def test_peer_that_breaks_says_why() -> None:
    def make() -> Mover:
        raise RuntimeError("no compiler\n here")

    absent: dict[str, str] = {}
    assert io_peers.try_peer(io_peers.DEEPSPEED, make, absent) == []
    assert absent == {io_peers.DEEPSPEED: "does not work here: RuntimeError: no compiler here"}


@pytest.mark.parametrize(("depth", "calls", "met"), [(7.7, 200, [True, True]), (7.0, 201, [False, False])])
def test_depth_and_calls_are_judged_for_the_default(depth: float, calls: int, met: list[bool]) -> None:
    stats = {"mean_depth": depth, "system_calls": calls, "batches": 100, "requests": 800}
    found = {"stats": {"ours, uring": stats, "ours, threads": stats}, "default": "ours, uring", "depth": 8}
    verdicts = judged(io_engine.depth_rows(found))
    assert list(verdicts.values()) == met
    assert all(what.startswith("ours, uring") for what in verdicts)


@pytest.mark.parametrize(("default", "count"), [("ours, uring", 4), ("ours, threads", 2)])
def test_processor_time_of_the_kernel_counts_for_io_uring(default: str, count: int) -> None:
    costs = {way: {"engine": [0.01], "process": [0.06], "seconds": [1.0]} for way in DIRECTIONS}
    found = {"costs": {"ours, uring": costs, "ours, threads": costs}, "default": default}
    verdicts = judged(io_engine.cpu_rows(found))
    assert len(verdicts) == count
    assert all(met == ("engine" in what) for what, met in verdicts.items())


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "--depth is 0"),
        ({"repeats": 0}, "--repeats is 0"),
        ({"block_bytes": 1000}, "--block is 1000 bytes; it must be a multiple of 4096"),
        ({"size_bytes": MIB + 4096}, "--size is .* must be a multiple of --block"),
    ],
)
def test_settings_that_cannot_be_measured_with_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**options)


def test_files_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"case 'x' needs 1000000\.0 GB .* are free; pass less"):
        cases.require_space("x", 10**15, tmp_path, "pass less")


# -- the commands --------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


@pytest.mark.parametrize(("name", "module"), [("io", io), ("nvme", nvme)])
def test_unknown_case_is_refused_with_the_names(name: str, module: Any) -> None:
    options = parse(name, "--only", "speed")
    with pytest.raises(ConfigError, match=f"unknown case 'speed'; choose from {', '.join(module.CASES)}"):
        options.run(options)


def test_help_explains_every_case() -> None:
    for text, module in ((command.IO_HELP, io), (command.NVME_HELP, nvme)):
        assert all(f"\n  {case} " in text for case in module.CASES)


@pytest.mark.parametrize("name", ["io", "nvme"])
def test_paths_are_checked_before_anything_is_measured(name: str, tmp_path: Path) -> None:
    for arguments, option in (
        (["--dir", str(tmp_path / "none")], "--dir"),
        (["--dir", str(tmp_path), "--out", str(tmp_path / "none" / "record.json")], "--out"),
    ):
        options = parse(name, *arguments)
        with pytest.raises(ConfigError, match=option):
            options.run(options)


def test_zero_size_is_refused(tmp_path: Path) -> None:
    options = parse("io", "--dir", str(tmp_path), "--size", "0")
    with pytest.raises(ConfigError, match="--size is '0'; it must be positive"):
        options.run(options)


@pytest.mark.parametrize(("name", "module", "install"), [("io", io, "fio"), ("nvme", nvme, "deepspeed")])
@pytest.mark.parametrize(("value", "code"), [(0.5, 0), (2.0, 1)])
def test_exit_code_says_whether_targets_were_met(
    name: str,
    module: Any,
    install: str,
    value: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def case(_session: Session, _settings: Any) -> CaseResult:
        rows = [Row("speed", value, "s", 1.0), *nvme_alldisk.absent_rows("is not installed")]
        return CaseResult(rows, {}, {})

    monkeypatch.setattr(module, "CASES", {"speed": case})
    out = tmp_path / "record.json"
    options = parse(name, "--json", "--dir", str(tmp_path), "--out", str(out))
    assert options.run(options) == code
    printed = capsys.readouterr()
    record = json.loads(out.read_text())
    assert record == json.loads(printed.out)
    assert (record["benchmark"], record["missed"]) == (name, ["speed: speed"] if code else [])
    assert f"2 targets not measured: install {install}" in printed.err
    assert options.quick or parse(name, "--quick").quick
    quick = parse(name, "--quick", "--dir", str(tmp_path))
    assert quick.run(quick) == 0
    assert "only that the cases run" in capsys.readouterr().out


def test_torch_counts_pages_of_the_buffer() -> None:
    buffer = io_own.page_aligned(MIB)
    assert buffer.data_ptr() % 4096 == 0
    assert buffer.dtype == torch.uint8
