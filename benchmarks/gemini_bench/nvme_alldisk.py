"""Case ``alldisk``: all model data on DISK, a quarter of it on DEVICE, against DeepSpeed ZeRO-3 on NVMe."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gemini_bench.nvme_blocks import median_of
from gemini_bench.nvme_deepspeed import FAST, SMALL, VARIANTS
from gemini_bench.nvme_managed import managed_options
from gemini_bench.nvme_plain import in_order, require_disk
from gemini_bench.nvme_settings import Settings
from gemini_bench.paired import Spread, spread_row, unmeasured_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import model_data_bytes

TIME_RATIO = 0.75
MEMORY_RATIO = 0.5
OURS = "ours"
_MEMORY_STEPS = 3


def run(session: Session, settings: Settings) -> CaseResult:
    """Time ours and two configurations of DeepSpeed in processes that take turns; then measure peaks."""
    settings = settings.quick() if session.quick else settings
    device_bytes = int(settings.device_share * model_data_bytes(settings.model))
    require_disk("alldisk", session, 4 * model_data_bytes(settings.model))
    session.progress("alldisk: is DeepSpeed here? its first use compiles for minutes")
    deepspeed = session.run("nvme_deepspeed.usable", {}, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    names = (OURS, *(VARIANTS if deepspeed["absent"] is None else ()))
    rounds = []
    for number in range(settings.rounds):
        found = {}
        for name in in_order(names, number):
            session.progress(f"alldisk: {name}, round {number + 1} of {settings.rounds}")
            task, options = _work(name, session, settings, device_bytes)
            found[name] = session.run(task, options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
        rounds.append(found)
    short = dataclasses.replace(settings, blocks=1, block_steps=_MEMORY_STEPS)
    peaks = {}
    for name in names:
        session.progress(f"alldisk: {name}, peak memory")
        task, options = _work(name, session, short, device_bytes)
        worker = session.run(task, options)
        worker.data()
        peaks[name] = worker.peak_rss_bytes
    measured = {
        "rounds": rounds,
        "peak_rss_bytes": peaks,
        "device_bytes": device_bytes,
        "deepspeed": deepspeed,
    }
    rows = [*time_rows(rounds), *memory_rows(peaks)]
    if deepspeed["absent"] is not None:
        rows += absent_rows(deepspeed["absent"])
    return CaseResult(rows, settings.to_options()["settings"], measured)


def _work(name: str, session: Session, settings: Settings, device_bytes: int) -> tuple[str, dict[str, Any]]:
    if name == OURS:
        return "nvme_managed.train", managed_options(session, settings, device_bytes, compared=False)
    directory = os.fspath(session.disk_dir)
    return "nvme_deepspeed.train", settings.to_options(variant=name, directory=directory)


def time_rows(rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return steps, and ours over each of DeepSpeed's, round by round; the faster one decides."""
    seconds = {
        name: [median_of(found[name]["blocks"], "whole") for found in rounds]
        for name in rounds[0]  # in the first round's order
    }
    rows: list[Row] = [spread_row(f"{name}: step", Spread.of(found), "s") for name, found in seconds.items()]
    rivals = [name for name in VARIANTS if name in seconds]
    if rivals:
        fastest = min(rivals, key=lambda name: statistics.median(seconds[name]))
        ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[fastest], strict=True)]
        what = f"step time, ours / the faster ({fastest})"
        rows.append(spread_row(what, Spread.of(ratios), "x", TIME_RATIO))
    rows += [
        Row(f"{name}: largest difference of a loss from ours", _loss_difference(rounds, name), "")
        for name in rivals
    ]
    return rows


def _loss_difference(rounds: Sequence[Mapping[str, Any]], name: str) -> float:
    return max(
        abs(float(ours) - float(theirs))
        for found in rounds
        for ours, theirs in zip(found[OURS]["losses"], found[name]["losses"], strict=True)
    )


def memory_rows(peaks: Mapping[str, int]) -> list[Row]:
    """Return peaks of resident memory, whole process, and ours over the lower of DeepSpeed's."""
    rows = [Row(f"{name}: peak memory", peak, "bytes") for name, peak in peaks.items()]
    rivals = [name for name in VARIANTS if name in peaks]
    if rivals:
        smallest = min(rivals, key=lambda name: peaks[name])
        what = f"peak memory, ours / the smaller ({smallest})"
        rows.append(Row(what, peaks[OURS] / peaks[smallest], "x", MEMORY_RATIO))
    return rows


def absent_rows(reason: str) -> list[Row]:
    """Return the targets that cannot be judged without DeepSpeed, and why."""
    return [
        unmeasured_row(f"step time, ours / {FAST}", "x", TIME_RATIO, f"DeepSpeed {reason}"),
        unmeasured_row(f"peak memory, ours / {SMALL}", "x", MEMORY_RATIO, f"DeepSpeed {reason}"),
    ]
