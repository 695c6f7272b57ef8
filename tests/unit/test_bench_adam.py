"""``gemini bench adam``: which figures follow, what is refused, tiny runs of all."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import first
from rich.console import Console

from gemini.errors import ConfigError
from gemini.jobs.gpt.model import GPTConfig
from gemini_bench import (
    adam,
    adam_cases,
    adam_cuda,
    adam_measure,
    adam_peers,
    adam_quality,
    adam_small,
    paired,
)
from gemini_bench import adam_ours as ours
from gemini_bench.adam_measure import Settings, measure, parse_count, require_memory
from gemini_bench.adam_peers import DEEPSPEED, TORCH, mixed_name, own_bf16_name
from gemini_bench.cli import bench as command
from gemini_bench.paired import AbsentRow, Spread, Timings, spread_row, unmeasured_row
from gemini_bench.record import Row
from gemini_bench.session import CaseResult, Session, WorkerRun
from gemini_bench.table import render
from gemini_bench.watch import Ending, WatchedRun

LAYOUTS = [
    ours.FP32,
    ours.COPY,
    ours.SPLIT,
    ours.ALONE,
    ours.COPY_INT8,
    ours.SPLIT_INT8,
    ours.COPY_BF16,
    ours.SPLIT_BF16,
]
ABSENT = {"absent": {DEEPSPEED: "is not installed"}, "versions": {}}


@pytest.fixture(autouse=True)
def _quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nobody's threads, and leave this process its own number of threads."""
    monkeypatch.setattr(paired, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(adam_measure, "use_threads", lambda _count: None)
    monkeypatch.setattr(adam_quality, "use_threads", lambda _count: None)


def times_of(seconds: Mapping[str, list[float]], nbytes: Mapping[str, float] | None = None) -> Timings:
    return Timings({"seconds": seconds, "nbytes": nbytes or dict.fromkeys(seconds, 28.0)})


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "step_bytes"), list(zip(LAYOUTS, [28, 28, 26, 22, 16.0625, 14.0625, 20, 18], strict=True))
)
def test_layout_counts_the_bytes_of_its_arrays(layout: ours.Layout, step_bytes: float) -> None:
    numel = 2048
    held = sum(array.numel() * array.element_size() for array in ours._arrays(layout, numel).values())
    assert held == layout.held_bytes * numel
    assert layout.step_bytes == step_bytes
    assert ours.kernel_contender(layout, numel).nbytes == step_bytes * numel


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_steps_against_its_gradient(layout: ours.Layout) -> None:
    numel, steps = 4096 + 37, 3
    contender = ours.kernel_contender(layout, numel)
    assert contender.sample is not None
    before = contender.sample().float().clone()
    for _ in range(steps):
        contender.run()
    signs = ours.start_grad(numel, layout.grad_dtype)[: before.numel()].float().sign()
    moved = ((before - contender.sample().float()) * signs).mean().item()
    assert 0.6 < moved / (steps * adam_peers.HYPER.lr) < 1.4


def test_split_parameter_keeps_the_exact_master() -> None:
    numel = 4096
    split, copy = (ours.kernel_contender(layout, numel) for layout in (ours.SPLIT, ours.COPY))
    assert split.sample is not None
    assert copy.sample is not None
    copy.sample().copy_(split.sample())  # where both start
    for _ in range(5):
        split.run()
        copy.run()
    assert torch.equal(split.sample(), copy.sample())


def test_small_tensors_are_many_and_add_up() -> None:
    sizes = adam_small.sizes(100_000_000)
    assert len(sizes) == adam_small.NUM_TENSORS
    assert math.isclose(sum(sizes), 100_000_000, rel_tol=0.001)


# -- tiny runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", first(adam_cases.TASKS))
@pytest.mark.parametrize("peers", ["found", "absent"])
def test_case_runs_and_gives_figures(case: str, peers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_small, "NUM_TENSORS", 80)
    if peers == "absent":
        for module in (adam_cases, adam_small):
            monkeypatch.setattr(module, "find_peers", lambda: ([adam_peers.torch_peer()], ABSENT))
    found = json.loads(json.dumps(adam_cases.TASKS[case]({"numel": 5000, "threads": 1, "repeats": 2})))
    rows = adam_cases.ROWS[case]("1 thread: ", Timings(found), found["absent"])
    assert rows
    assert all(row.what.startswith("1 thread: ") for row in rows)
    assert len({row.what for row in rows}) == len(rows)
    assert all(row.value > 0 for row in rows if not math.isnan(row.value) and row.unit != "us")


@pytest.mark.parametrize("state_dtype", adam_quality.STATE_DTYPES)
def test_training_is_the_same_every_time(state_dtype: str) -> None:
    model = GPTConfig(vocab=256, layers=1, hidden=16, heads=2, seq=8)
    options = {**vars(adam_quality.QUICK), "model": vars(model), "threads": 1, "state_dtype": state_dtype}
    losses = adam_quality.train(options)["losses"]
    assert len(losses) == adam_quality.QUICK.steps
    assert losses == adam_quality.train(options)["losses"]


@pytest.mark.cuda
def test_cuda_case_runs_and_gives_figures() -> None:
    found = json.loads(json.dumps(adam_cuda.fp32({"numel": 5000, "repeats": 2})))
    assert all(row.value > 0 for row in adam_cuda.cuda_rows(Timings(found)))


# -- figures -------------------------------------------------------------------------------------


def judged(rows: list[Row]) -> dict[str, bool]:
    return {row.what: row.met for row in rows if row.met is not None}


@pytest.mark.parametrize(
    ("torch_seconds", "deepspeed_seconds", "met"), [(1.0, 2.0, True), (2.0, 0.9, False), (0.98, 1.0, True)]
)
def test_fp32_is_judged_by_the_fastest_peer(
    torch_seconds: float, deepspeed_seconds: float, met: bool
) -> None:
    seconds = {
        ours.PATTERN: [0.96],
        ours.FP32.name: [1.0],
        adam_cases.FP32_STEP: [1.0],
        TORCH: [torch_seconds],
        DEEPSPEED: [deepspeed_seconds],
    }
    verdicts = judged(adam_cases.fp32_rows("", times_of(seconds), {}))
    fastest = TORCH if torch_seconds < deepspeed_seconds else DEEPSPEED
    assert verdicts == {
        "share of the limit": True,
        f"ours / the fastest peer ({fastest}), equal within 3 %": met,
    }


def test_fp32_without_deepspeed_is_judged_by_torch_and_says_so() -> None:
    names = (ours.PATTERN, ours.FP32.name, adam_cases.FP32_STEP, TORCH)
    rows = adam_cases.fp32_rows("", times_of({name: [1.0] for name in names}), ABSENT["absent"])
    assert [row.what for row in rows if isinstance(row, AbsentRow)] == [f"{DEEPSPEED} is not installed"]
    assert f"ours / the fastest peer ({TORCH}; {DEEPSPEED} is not installed), equal within 3 %" in judged(
        rows
    )


@pytest.mark.parametrize("torch_seconds", [0.5, 2.0])
def test_bf16_without_deepspeed_has_targets_but_no_verdicts(torch_seconds: float) -> None:
    names = (ours.PATTERN, ours.COPY.name, ours.SPLIT.name, ours.ALONE.name)
    times = times_of({**{name: [1.0] for name in names}, mixed_name(TORCH): [torch_seconds]})
    rows = adam_cases.bf16_rows("", times, ABSENT["absent"])
    assert judged(rows) == {}
    aimed = [row.to_dict() for row in rows if row.target is not None]
    assert [row["not_measured"] for row in aimed] == [f"{DEEPSPEED} is not installed"] * 2
    assert all(DEEPSPEED in row["what"] and row["value"] is None for row in aimed)


def test_small_is_judged_through_step_and_not_by_the_kernel_call() -> None:
    many = {adam_small.MANY: [1.2], adam_small.KERNEL: [1.0], TORCH: [1.0]}
    short = {adam_small.SHORT_ONE: [1.0], adam_small.SHORT_MANY: [1.0]}
    rows = adam_small.rows("", times_of({adam_small.ONE: [1.0], **many, **short}), {})
    assert judged(rows) == {"10,000 tensors / one, through step()": False}
    assert math.isclose(next(row.value for row in rows if row.unit == "us"), 20.0)


def test_bf16_is_judged_against_both_ways_of_deepspeed() -> None:
    layouts = {layout.name: [0.9] for layout in (ours.COPY, ours.SPLIT, ours.ALONE)}
    same, own = mixed_name(DEEPSPEED), own_bf16_name(DEEPSPEED)
    times = times_of({ours.PATTERN: [0.9], **layouts, mixed_name(TORCH): [1.0], same: [1.0], own: [0.8]})
    verdicts = judged(adam_cases.bf16_rows("", times, {}))
    assert list(verdicts.values()) == [True, False]
    assert [same in what for what in verdicts] == [True, False]
    assert [own in what for what in verdicts] == [False, True]


@pytest.mark.parametrize(("final", "met"), [(2.019, True), (1.981, True), (2.03, False), (1.97, False)])
def test_quality_is_the_same_loss_not_only_a_low_one(final: float, met: bool) -> None:
    losses = {"fp32": [5.0, 2.0, 2.0], "bf16": [5.0, 2.0, 2.0], "int8": [5.0, final, final]}
    verdicts = judged(adam_quality.quality_rows(losses, 2))
    assert verdicts == {
        "bf16 states, difference from fp32": True,
        "int8 states, difference from fp32": met,
    }


def test_cuda_is_judged_by_copy_bandwidth_and_torch() -> None:
    seconds = {adam_cuda.COPY: [0.8], **{name: [3.0] for name in adam_cuda.NAMES}, TORCH: [3.5]}
    nbytes = {**dict.fromkeys(seconds, 28.0), adam_cuda.COPY: 8.0}
    verdicts = judged(adam_cuda.cuda_rows(times_of(seconds, nbytes)))
    assert list(verdicts.values()) == [True, True]


def test_row_without_a_figure_is_null_and_ranges_are_shown() -> None:
    rows = [AbsentRow("DeepSpeed is not installed"), spread_row("ours", Spread(2.0, 1.5, 3.0), "ms")]
    dicts = json.loads(json.dumps([row.to_dict() for row in rows], allow_nan=False))
    assert [(row["value"], row["met"]) for row in dicts] == [(None, None), (2.0, None)]
    where = {"cpu": "c", "cores": 2, "ram_bytes": 1, "load_average": [0.0], "torch": "t", "date": "d"}
    environment = {**where, "commit": None, "uncommitted_changes": None}
    cases = {"fp32": {"rows": dicts}, "bad": {"error": "StateError: broken"}}
    console = Console(record=True, width=130)
    render({"benchmark": "adam", "quick": True, "environment": environment, "cases": cases}, console)
    text = console.export_text()
    assert all(part in text for part in ("gemini bench adam", "1.5 - 3", "StateError: broken", "caches"))


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "count"), [("65536", 65536), ("100M", 10**8), ("1.5b", 1_500_000_000)])
def test_counts_have_decimal_units(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1M", "1.5", "12X", "M", "nan", "inf"])
def test_bad_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a number of elements"):
        parse_count(text)


@pytest.mark.parametrize("options", [{"numel": 0}, {"repeats": 0}, {"threads": ()}, {"threads": (1, 0)}])
def test_settings_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        Settings(**{"threads": (1,), **options})


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"1000000 threads on \d+ cores"):
        Settings(threads=(1_000_000,))


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"case 'x' needs 3\.0 GB .* 2\.5 GB are free; pass a smaller --numel"
    ):
        require_memory("case 'x'", 2_000_000_000, 2_500_000_000)


def worker(found: dict[str, Any]) -> WorkerRun:
    return WorkerRun(found, WatchedRun(Ending.FINISHED, 0, 0.1, 0, "", ""))


def test_case_that_does_not_fit_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_measure, "free_memory_bytes", lambda: 10**9)
    runs: list[str] = []
    session = Session(tmp_path, run=lambda task, *_rest, **_watch: runs.append(task) or worker({}))
    with pytest.raises(ConfigError, match="--numel"):
        measure(session, Settings(threads=(1,)), "fp32", 10**9, adam_cases.fp32_rows)
    assert not runs


def test_every_number_of_threads_gets_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1})
    asked: list[int] = []

    def run(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
        asked.append(options["threads"])
        return worker(adam_cases.TASKS[task.partition(".")[2]](options))

    settings = Settings(numel=1000, threads=(1, 2), repeats=1)
    result = adam_cases.run("limit", Session(tmp_path, run=run), settings)
    assert asked == [1, 2]
    assert list(result.measured) == ["1 thread", "2 threads"]
    assert len({row.what for row in result.rows}) == len(result.rows)


# -- the command ---------------------------------------------------------------------------------


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "adam", "--threads", "1", *arguments])


@pytest.mark.parametrize("device", adam.CASES)
def test_unknown_case_is_refused_with_the_names_of_the_device(device: str) -> None:
    names = ", ".join(adam.CASES[device])
    with pytest.raises(ConfigError, match=f"unknown case 'speed' for --device {device}; choose from {names}"):
        command.run_adam(parse("--only", "speed", "--device", device))


def test_help_explains_every_case() -> None:
    for cases in adam.CASES.values():
        for name in cases:
            assert f"\n  {name} " in command.ADAM_HELP


def test_cuda_without_a_gpu_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam_cuda.device, "cuda_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* sees no GPU"):
        command.run_adam(parse("--device", "cuda"))


@pytest.mark.parametrize(("numel", "code"), [("100M", 1), ("1M", 0)])
def test_exit_code_says_whether_targets_were_met_where_they_count(
    numel: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def miss(_session: Session, settings: Settings) -> CaseResult:
        return CaseResult([Row("speed", 2.0, "s", 1.0)], {"numel": settings.numel}, {})

    cases: dict[str, dict[str, Callable[..., CaseResult]]] = {"cpu": {"speed": miss}, "cuda": {}}
    monkeypatch.setattr(adam, "CASES", cases)
    out = tmp_path / "record.json"
    assert command.run_adam(parse("--json", "--numel", numel, "--out", str(out))) == code
    record = json.loads(out.read_text())
    assert record["benchmark"] == "adam"
    assert record["missed"] == ["speed: speed"]
    assert record == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("target", "code"), [(3.0, 0), (1.0, 1)])
def test_unmeasured_targets_are_counted_in_words_and_are_no_failure(
    target: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("speed", 2.0, "s", target), *(unmeasured_row(what, "x", 0.95, "none here") for what in "ab")]
    cases = {"cpu": {"speed": lambda *_: CaseResult(rows, {}, {})}, "cuda": {}}
    monkeypatch.setattr(adam, "CASES", cases)
    assert command.run_adam(parse("--json")) == code
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["not_measured"] == [f"speed: {what}: not measured, none here" for what in "ab"]
    assert "2 targets not measured: install deepspeed" in printed.err
    assert "step()" in record["how"]
