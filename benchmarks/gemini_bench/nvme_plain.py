"""Case ``plain``: a plain model whose optimizer keeps its states in a file, against states in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPT, language_loss, num_parameters
from gemini.optim import HybridAdam
from gemini_bench.cases import require_space
from gemini_bench.nvme_bare import BareDisk
from gemini_bench.nvme_blocks import (
    StepTimes,
    bare_seconds,
    batches_of,
    held_bytes,
    median_of,
    run_blocks,
    timed,
)
from gemini_bench.nvme_settings import STATE_BYTES, Settings
from gemini_bench.paired import Spread, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import Batch

TIME_RATIO = 1.10
MEMORY_SHARE = 0.95
MEMORY, DISK = "memory", "disk"
KINDS = (MEMORY, DISK)
_FRACTIONS = {MEMORY: 0.0, DISK: 1.0}
_SEED = 1234
_LEARNING_RATE = 1e-4
_SPARE_BYTES = 100_000_000


class PlainTrainee:
    """Plain torch with HybridAdam, its states in memory or in a file."""

    def __init__(self, settings: Settings, kind: str, directory: str) -> None:
        torch.manual_seed(_SEED)
        self._model = GPT(settings.model)
        self._optimizer = HybridAdam(
            self._model.parameters(),
            lr=_LEARNING_RATE,
            nvme_offload_fraction=_FRACTIONS[kind],
            nvme_offload_dir=directory,
        )

    def bare_disk(self, ring_bytes: int) -> BareDisk:
        """Return the disk below the states, which a step has written."""
        return BareDisk.of_states(self._optimizer, ring_bytes)

    def step(self, batch: Batch) -> StepTimes:
        """Train on one batch."""

        def forward_backward() -> float:
            loss = language_loss(self._model(batch[0]), batch[1])
            loss.backward()
            return float(loss.detach())

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        return timed(forward_backward, update)


# -- tasks ---------------------------------------------------------------------------------------


def train_task(options: dict[str, Any]) -> dict[str, Any]:
    """Time one kind of training; with states in a file also the bare disk between the blocks."""
    settings, kind, directory = Settings.from_options(options), options["kind"], options["directory"]
    trainee = PlainTrainee(settings, kind, directory)
    if kind == MEMORY:
        return run_blocks(trainee.step, settings)
    return run_blocks(trainee.step, settings, open_bare=lambda: trainee.bare_disk(settings.ring_bytes))


def memory_task(options: dict[str, Any]) -> dict[str, Any]:
    """Train one kind for the watch to see its peak; return the bytes held after every step."""
    settings = Settings.from_options(options)
    trainee = PlainTrainee(settings, options["kind"], options["directory"])
    losses, rss = [], []
    for batch in batches_of(settings)[: settings.warmup_steps]:
        losses.append(trainee.step(batch).loss)
        rss.append(held_bytes())
    return {"losses": losses, "rss_bytes": rss}


# -- the case ------------------------------------------------------------------------------------


def run(session: Session, settings: Settings) -> CaseResult:
    """Time both kinds in processes that take turns, then measure the memory of each."""
    settings = settings.quick() if session.quick else settings
    state_bytes = STATE_BYTES * num_parameters(settings.model)
    require_disk("plain", session, 2 * state_bytes)
    rounds = []
    for number in range(settings.rounds):
        session.progress(f"plain: states in memory and in a file, round {number + 1} of {settings.rounds}")
        found = {kind: _run(session, settings, kind) for kind in in_order(KINDS, number)}
        require_equal_losses({kind: one["losses"] for kind, one in found.items()})
        rounds.append(found)
    memory = []
    for number in range(settings.rounds):
        session.progress(f"plain: memory of both, round {number + 1} of {settings.rounds}")
        memory.append({kind: _memory_of(session, settings, kind) for kind in KINDS})
    measured = {"rounds": rounds, "memory": memory, "state_bytes": state_bytes}
    rows = [*time_rows(rounds), *memory_rows(memory, state_bytes)]
    return CaseResult(rows, settings.to_options()["settings"], measured)


def require_disk(case: str, session: Session, need_bytes: int) -> None:
    """Raise ConfigError with the numbers if a case does not fit the disk."""
    require_space(case, need_bytes + _SPARE_BYTES, session.disk_dir, "pass another --dir")


def in_order(names: Sequence[str], number: int) -> list[str]:
    """Return who comes first in a round: they take turns."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def require_equal_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raise StateError where training differs: then its times compare nothing."""
    if len({tuple(found) for found in losses.values()}) > 1:
        raise StateError(f"the losses differ: {dict(losses)}")


def _options(session: Session, settings: Settings, kind: str) -> dict[str, Any]:
    return settings.to_options(kind=kind, directory=os.fspath(session.disk_dir))


def _run(session: Session, settings: Settings, kind: str) -> dict[str, Any]:
    options = _options(session, settings, kind)
    return session.run("nvme_plain.train", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()


def _memory_of(session: Session, settings: Settings, kind: str) -> dict[str, Any]:
    worker = session.run("nvme_plain.memory", _options(session, settings, kind))
    return {**worker.data(), "peak_rss_bytes": worker.peak_rss_bytes}


def time_rows(rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return times, and each block's step over forward + backward + max(Adam, bare disk) of its round."""
    ratios, bare, rates = [], [], []
    for found in rounds:
        compute = median_of(found[MEMORY]["blocks"], "compute")
        adam = median_of(found[MEMORY]["blocks"], "update")
        for block in found[DISK]["blocks"]:
            seconds = bare_seconds(block)
            bare.append(seconds)
            rates.append(found[DISK]["bare_bytes"] / seconds / 1e9)
            ratios.append(median_of([block], "whole") / (compute + max(adam, seconds)))

    def spread(kind: str, part: str) -> Spread:
        return Spread.of([median_of([block], part) for found in rounds for block in found[kind]["blocks"]])

    blocks = [block for found in rounds for block in found[DISK]["blocks"]]
    return [
        spread_row("states in memory: forward + backward", spread(MEMORY, "compute"), "s"),
        spread_row("states in memory: Adam", spread(MEMORY, "update"), "s"),
        spread_row("states in memory: step", spread(MEMORY, "whole"), "s"),
        spread_row("states in a file: forward + backward", spread(DISK, "compute"), "s"),
        spread_row("states in a file: Adam", spread(DISK, "update"), "s"),
        spread_row("states in a file: step", spread(DISK, "whole"), "s"),
        *(
            spread_row(
                f"states in a file: {what} per step",
                Spread.of([block["per_step"][name] for block in blocks]),
                "bytes",
            )
            for name, what in (("read_bytes", "read"), ("write_bytes", "written"))
        ),
        spread_row("bare disk: the states once read and written", Spread.of(bare), "s"),
        spread_row("bare disk", Spread.of(rates), "GB/s"),
        spread_row(
            "step / (forward + backward + max(Adam, bare disk)), per block",
            Spread.of(ratios),
            "x",
            TIME_RATIO,
        ),
    ]


def memory_rows(memory: Sequence[Mapping[str, Any]], state_bytes: int) -> list[Row]:
    """Return by how much of the states' bytes resident memory falls: after a step, and at its peak."""
    rows: list[Row] = [Row("bytes of states", state_bytes, "bytes")]
    readings = {
        "after a step": {kind: [found[kind]["rss_bytes"][-1] for found in memory] for kind in KINDS},
        "peak": {kind: [found[kind]["peak_rss_bytes"] for found in memory] for kind in KINDS},
    }
    for what, of in readings.items():
        falls = [(more - less) / state_bytes for more, less in zip(of[MEMORY], of[DISK], strict=True)]
        rows += [
            spread_row(f"resident memory, {what}: states in memory", Spread.of(of[MEMORY]), "bytes"),
            spread_row(f"resident memory, {what}: states in a file", Spread.of(of[DISK]), "bytes"),
            spread_row(
                f"resident memory, {what}: fall / bytes of states",
                Spread.of(falls),
                "share",
                MEMORY_SHARE,
                at_least=True,
            ),
        ]
    return rows


TASKS = {"train": train_task, "memory": memory_task}
