"""``gemini bench nvme``: which figures follow, what is refused, tiny runs of all."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pairs import first

from gemini.errors import ConfigError, StateError
from gemini.optim import disk_states
from gemini.optim import disk_states as disk_states_module
from gemini_bench import (
    nvme,
    nvme_alldisk,
    nvme_bare,
    nvme_blocks,
    nvme_deepspeed,
    nvme_managed,
    nvme_plain,
    nvme_stream,
)
from gemini_bench.nvme_settings import STATE_BYTES, Settings
from gemini_bench.record import Row
from gemini_bench.session import Session, WorkerRun
from gemini_bench.watch import Ending, WatchedRun

MIB = 2**20
FINISHED = WatchedRun(Ending.FINISHED, 0, 0.1, 10**9, "", "")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_bare, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(nvme_stream, "SETTLE_SECONDS", 0.0)


def judged(rows: list[Row]) -> dict[str, bool]:
    return {row.what: row.met for row in rows if row.met is not None}


def in_this_process(task: str, options: dict[str, Any], **_watch: Any) -> WorkerRun:
    """Run a worker's task here, its options and result through JSON."""
    module, _, name = task.partition(".")
    tasks = importlib.import_module(f"gemini_bench.{module}").TASKS
    found = json.loads(json.dumps(tasks[name](json.loads(json.dumps(options))), allow_nan=False))
    return WorkerRun(found, FINISHED)


def quick_session(directory: Path) -> Session:
    return Session(directory, quick=True, run=in_this_process)


# -- tiny runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", first(name for name in nvme.CASES if name != "alldisk"))
def test_every_case_of_nvme_runs_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    record = nvme.run(quick_session(tmp_path), Settings(), [case], ["gemini"])
    assert record["failed"] == []
    rows = json.loads(json.dumps(record, allow_nan=False))["cases"][case]["rows"]
    assert len({row["what"] for row in rows}) == len(rows)
    assert list(tmp_path.iterdir()) == []


def test_alldisk_without_deepspeed_has_targets_but_no_verdicts(tmp_path: Path) -> None:
    def run(task: str, options: dict[str, Any], **watch: Any) -> WorkerRun:
        if task == "nvme_deepspeed.usable":
            return WorkerRun({"absent": "is not installed", "version": None}, FINISHED)
        return in_this_process(task, options, **watch)

    session = Session(tmp_path, quick=True, run=run)
    record = nvme.run(session, Settings(), ["alldisk"], ["gemini"])
    assert (record["failed"], record["missed"]) == ([], [])
    assert [text.startswith("alldisk: ") for text in record["not_measured"]] == [True, True]
    assert all("DeepSpeed is not installed" in text for text in record["not_measured"])


# -- the bare disk -------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [4096, 3 * MIB + 4096, 20 * MIB])
def test_bare_disk_moves_every_byte_and_changes_none(nbytes: int, tmp_path: Path) -> None:
    bare = nvme_bare.BareDisk.of_new_file(tmp_path, nbytes, MIB, 4 * MIB)
    before = bare._file.stats()
    bare.run()
    after = bare._file.stats()
    bare.close()
    for counter in ("bytes_read", "bytes_written"):
        assert after[counter] - before[counter] == bare.nbytes == nbytes


def test_bare_disk_has_the_ring_of_the_optimizer() -> None:
    assert Settings().batch_bytes == disk_states_module.MAX_BATCH_BYTES
    assert Settings().ring_bytes == disk_states.NUM_BUFFERS * disk_states_module.MAX_BATCH_BYTES


# -- figures of nvme -----------------------------------------------------------------------------


def blocks(whole: float, **more: Any) -> dict[str, Any]:
    """Return what ``run_blocks`` would for one block of one step."""
    per_step = {
        "read_bytes": 1.0,
        "write_bytes": 1.0,
        "disk_read": 1.0,
        "disk_write": 1.0,
        "stall_seconds": 0.0,
    }
    block = {
        "compute": [2.0],
        "update": [0.5],
        "whole": [whole],
        "per_step": per_step,
        "bare_seconds": [0.9, 1.1],
    }
    return {"losses": [1.0], "blocks": [{**block, **more}], "bare_bytes": 2.0}


@pytest.mark.parametrize(("step", "bare", "met"), [(3.2, 1.0, True), (3.4, 1.0, False), (2.7, 0.1, True)])
def test_plain_is_judged_by_computing_and_the_longer_of_adam_and_disk(
    step: float, bare: float, met: bool
) -> None:
    found = {"memory": blocks(2.5), "disk": blocks(step, bare_seconds=[bare, bare])}
    assert list(judged(nvme_plain.time_rows([found])).values()) == [met]


@pytest.mark.parametrize(("fall", "met"), [(95, True), (94, False)])
def test_memory_must_fall_by_the_bytes_of_states(fall: int, met: bool) -> None:
    found = {
        kind: {"rss_bytes": [0, rss], "peak_rss_bytes": rss + 50}
        for kind, rss in (("memory", 1000), ("disk", 1000 - fall))
    }
    assert list(judged(nvme_plain.memory_rows([found], 100)).values()) == [met, met]


@pytest.mark.parametrize(
    ("step", "moved_bytes", "met"), [(2.6, 1.0, True), (2.7, 1.0, False), (5.2, 10.0, True)]
)
def test_managed_is_judged_by_the_longer_of_computing_and_moving(
    step: float, moved_bytes: float, met: bool
) -> None:
    per_step = {"disk_read": moved_bytes / 2, "disk_write": moved_bytes / 2, "stall_seconds": 0.0}
    found = blocks(step, per_step=per_step, beside_seconds=[2.4, 2.6])
    assert list(judged(nvme_managed.rows("updates in backward", [found])).values()) == [met]


def test_alldisk_is_judged_by_the_faster_and_the_smaller_of_deepspeeds() -> None:
    steps = {"ours": 3.0, nvme_deepspeed.FAST: 4.0, nvme_deepspeed.SMALL: 9.0}
    rows = nvme_alldisk.time_rows([{name: blocks(step) for name, step in steps.items()}])
    rows += nvme_alldisk.memory_rows({"ours": 6, nvme_deepspeed.FAST: 20, nvme_deepspeed.SMALL: 10})
    assert judged(rows) == {
        "step time, ours / the faster (DeepSpeed for speed)": True,
        "peak memory, ours / the smaller (DeepSpeed for memory)": False,
    }


@pytest.mark.parametrize("variant", nvme_deepspeed.VARIANTS)
def test_deepspeed_gets_the_same_job(variant: str) -> None:
    settings = Settings()
    found = nvme_deepspeed.configuration(settings, variant, "/disk")
    zero = found["zero_optimization"]
    assert found["train_micro_batch_size_per_gpu"] == settings.batch
    assert found["gradient_clipping"] == 0.0
    assert {zero[part]["device"] for part in ("offload_optimizer", "offload_param")} == {"nvme"}
    assert zero["offload_param"]["max_in_cpu"] == 0
    assert not {"fp16", "bf16"} & set(found)


@pytest.mark.parametrize(("step", "met"), [(1.0, True), (1.2, False)])
def test_stream_is_judged_turn_by_turn(step: float, met: bool) -> None:
    found = {"seconds": {"step": [step, 2 * step], "bare": [1.0, 2.0]}, "bare_bytes": 16.0}
    assert judged(nvme_stream.stream_rows(found, 1, "")) == {"step / bare disk": met}


def test_stream_takes_what_fits_and_refuses_next_to_nothing() -> None:
    gigabyte = 10**9
    assert nvme_stream.fitting_numel(gigabyte, 30 * gigabyte, 30 * gigabyte) == gigabyte
    assert nvme_stream.fitting_numel(gigabyte, 6 * gigabyte, 30 * gigabyte) == gigabyte // 2
    assert nvme_stream.fitting_numel(gigabyte, 30 * gigabyte, 2_100_000_000) == gigabyte // 5
    with pytest.raises(ConfigError, match="does not fit"):
        nvme_stream.fitting_numel(gigabyte, gigabyte, 30 * gigabyte)
    with pytest.raises(ConfigError, match=r"case 'memory' needs 18\.0 GB"):
        nvme_stream.require_memory(gigabyte, 17 * gigabyte)


@pytest.mark.parametrize(
    ("added", "met"),
    [((32, 34), [True, True, True]), ((32, 60), [True, True, False]), ((65, 66), [False, False, True])],
)
def test_memory_added_is_bounded_and_the_same_for_every_size(added: tuple[int, int], met: list[bool]) -> None:
    found = {}
    for numel, mib in zip((1000, 4000), added, strict=True):
        resident, on_disk = 10**9 + STATE_BYTES * numel, 10**9 + mib * MIB
        found[str(numel)] = [
            {kind: {"after": rss, "peak": rss} for kind, rss in (("memory", resident), ("disk", on_disk))}
        ]
    assert list(judged(nvme_stream.memory_rows(found)).values()) == met * 2


def test_blocks_count_what_a_step_leaves_to_the_next() -> None:
    settings = Settings(warmup_steps=1, blocks=2, block_steps=2).quick()
    seen: list[int] = []

    def step(_batch: Any) -> nvme_blocks.StepTimes:
        seen.append(len(seen))
        return nvme_blocks.StepTimes(float(len(seen)), 1.0, 1.0, 2.0)

    found = nvme_blocks.run_blocks(step, settings, counters=lambda: {"steps": float(len(seen))})
    assert len(seen) == len(found["losses"]) == settings.num_steps
    assert [block["per_step"] for block in found["blocks"]] == [{"steps": 1.0}] * settings.blocks


def test_steps_beside_a_block_are_those_taken_since_and_time_it_from_both_sides() -> None:
    settings = Settings(warmup_steps=2, blocks=2, block_steps=3)
    taken: list[int] = []

    def step(_batch: Any) -> nvme_blocks.StepTimes:
        taken.append(0)
        return nvme_blocks.StepTimes(1.0, 1.0, 1.0, 2.0)

    def beside(num_steps: int) -> float:
        assert len(taken) == num_steps
        taken.clear()
        return float(num_steps)

    found = nvme_blocks.run_blocks(step, settings, beside=beside)
    assert [block["beside_seconds"] for block in found["blocks"]] == [[2.0, 4.0], [4.0, 4.0]]


def test_training_that_differs_is_no_comparison() -> None:
    with pytest.raises(StateError, match="losses differ"):
        nvme_plain.require_equal_losses({"a": [1.0], "b": [math.nextafter(1.0, 2.0)]})
