"""Case ``managed``: GeminiDDP with its optimizer states on DISK, against computing and moving the bytes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gemini.jobs.gpt.model import num_parameters
from gemini.optim.managed_groups import Overlap
from gemini_bench.nvme_bare import BareDisk, process_io
from gemini_bench.nvme_blocks import StepTimes, bare_seconds, batches_of, median_of, run_blocks, timed
from gemini_bench.nvme_plain import require_disk, require_equal_losses
from gemini_bench.nvme_settings import STATE_BYTES, Settings
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import Batch, ManagedTrainee, PlainTrainee, model_data_bytes, timed_step

TIME_RATIO = 1.05
# When updates run, by the values of GeminiOptimizer's ``overlap``.
MODES: dict[str, Overlap] = {"updates in backward": "backward", "updates in forward": True}
_LINKS = ("disk_read", "disk_write")


class _Resident:
    """The same training with everything resident, which follows the managed one block by block."""

    def __init__(self, settings: Settings) -> None:
        self._trainee = PlainTrainee(settings.model)
        self._batches = iter(batches_of(settings))
        self.losses: list[float] = []

    def catch_up(self, num_steps: int) -> float:
        """Train on the next batches; return the seconds of a step, the first one not counted."""
        found = [timed_step(self._trainee, next(self._batches)) for _ in range(num_steps)]
        self.losses += [loss for loss, _seconds in found]
        return statistics.median(seconds for _loss, seconds in found[1:])


def managed_task(options: dict[str, Any]) -> dict[str, Any]:
    """Train with ``device_bytes`` on DEVICE and the rest on DISK.

    ``compared``: between the blocks, the bare disk and the same training with everything resident.
    """
    settings, directory = Settings.from_options(options), options["directory"]
    resident = _Resident(settings) if options["compared"] else None
    trainee = ManagedTrainee(
        settings.model,
        overlap=options["overlap"],
        device_bytes=options["device_bytes"],
        host_bytes=0,
        non_model_bytes=0,
        disk_dir=directory,
    )

    def step(batch: Batch) -> StepTimes:
        return timed(lambda: trainee.step(batch), lambda: None)

    def open_bare() -> BareDisk:
        state_bytes = STATE_BYTES * num_parameters(settings.model)
        return BareDisk.of_new_file(directory, state_bytes, settings.batch_bytes, settings.ring_bytes)

    def counters() -> dict[str, float]:
        stats = trainee.model.stats()
        moved = {link: float(stats[link]["bytes"]) for link in _LINKS}
        return {**process_io(), **moved, "stall_seconds": float(stats["stall_seconds"])}

    try:
        found = run_blocks(
            step,
            settings,
            open_bare=open_bare if resident else None,
            beside=resident.catch_up if resident else None,
            counters=counters,
        )
        if resident:
            require_equal_losses({"resident": resident.losses, "managed": found["losses"]})
        return {**found, "device_peak_bytes": trainee.model.stats()["device"]["peak_bytes"]}
    finally:
        trainee.close()


def managed_options(
    session: Session, settings: Settings, device_bytes: int, *, compared: bool, overlap: Overlap = True
) -> dict[str, Any]:
    """Return what ``managed_task`` gets."""
    directory = os.fspath(session.disk_dir)
    return settings.to_options(
        device_bytes=device_bytes, directory=directory, compared=compared, overlap=overlap
    )


def run(session: Session, settings: Settings) -> CaseResult:
    """Time resident and managed training in turns, in one process: processors drift more than a target. Each
    way to run updates has processes of its own.

    DEVICE holds parameters and gradients and has room for some states, not for all: those go to DISK. What
    the model computes with is not counted there.
    """
    settings = settings.quick() if session.quick else settings
    device_bytes = int((0.5 + settings.room_share) * model_data_bytes(settings.model))
    require_disk("managed", session, 4 * STATE_BYTES * num_parameters(settings.model))
    rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(settings.rounds):
        for mode, overlap in MODES.items():
            session.progress(
                f"managed: resident and on DISK, {mode}, round {number + 1} of {settings.rounds}"
            )
            options = managed_options(session, settings, device_bytes, compared=True, overlap=overlap)
            run = session.run("nvme_managed.train", options, sample_seconds=TIMING_SAMPLE_SECONDS)
            rounds[mode].append(run.data())
    measured = {"rounds": rounds, "device_bytes": device_bytes}
    table = [row for mode, found in rounds.items() for row in rows(mode, found)]
    return CaseResult(table, settings.to_options()["settings"], measured)


def rows(mode: str, rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return times of a mode, and each block's step over the longer of computing and moving its bytes."""
    floors, ratios, computes = [], [], []
    for found in rounds:
        for block in found["blocks"]:
            compute = statistics.fmean(block["beside_seconds"])
            moved = sum(block["per_step"][link] for link in _LINKS)
            floor = moved / found["bare_bytes"] * bare_seconds(block)
            computes.append(compute)
            floors.append(floor)
            ratios.append(median_of([block], "whole") / max(compute, floor))
    blocks = [block for found in rounds for block in found["blocks"]]
    rates = [found["bare_bytes"] / bare_seconds(block) / 1e9 for found in rounds for block in found["blocks"]]
    return [
        spread_row(f"{mode}: computing, a step with everything resident", Spread.of(computes), "s"),
        spread_row(f"{mode}: step", Spread.of([median_of([b], "whole") for b in blocks]), "s"),
        *(
            spread_row(f"{mode}: {what} per step", Spread.of([b["per_step"][link] for b in blocks]), "bytes")
            for link, what in zip(_LINKS, ("read", "written"), strict=True)
        ),
        spread_row(
            f"{mode}: stalled per step",
            Spread.of([b["per_step"]["stall_seconds"] for b in blocks]),
            "s",
        ),
        spread_row(f"{mode}: bare disk", Spread.of(rates), "GB/s"),
        spread_row(f"{mode}: I/O floor, bytes moved at the bare disk's speed", Spread.of(floors), "s"),
        spread_row(
            f"{mode}: step / max(computing, I/O floor), per block", Spread.of(ratios), "x", TIME_RATIO
        ),
    ]


TASKS = {"train": managed_task}
