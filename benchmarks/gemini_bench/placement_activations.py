"""Case ``activations``: real steps that keep, offload or recompute activations as chosen, against offloading
all that does not fit and recomputing every block."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPTConfig
from gemini_bench.paired import Spread, in_turn, spread_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import GPT2_124M, ManagedTrainee, make_batches, timed_step

WORSE = 1.05

_NARROW = GPTConfig(vocab=1024, layers=24, hidden=128, heads=2, seq=128)
_MODES: Mapping[str, dict[str, Any]] = {
    "offload": {"activation_offload": "auto"},
    "recompute": {},  # by torch.utils.checkpoint around every block
    "chosen": {"activation_offload": "auto", "activation_recompute": True},
}


@dataclass(frozen=True)
class Settings:
    """One job; ``warmup_steps`` are recorded, timed and planned in, ``steps`` after them count."""

    model: GPTConfig
    device_bytes: str
    batch: int
    seq: int
    rounds: int = 2
    warmup_steps: int = 11
    steps: int = 5
    keywords: dict[str, Any] = field(default_factory=dict)


RUNS = {
    "GPT-2 124M, 4 x 128": Settings(GPT2_124M, "1200MiB", 4, 128),
    "24 layers of 128, 64 x 128": Settings(_NARROW, "700MiB", 64, 128, keywords={"min_chunk_size_mb": 1}),
}
QUICK = {
    "tiny": Settings(
        GPTConfig(layers=4, hidden=128, heads=2),
        "40MiB",
        2,
        32,
        rounds=1,
        steps=1,
        keywords={"search_range_mb": 1, "min_chunk_size_mb": 0.25},
    ),
}


def activations(session: Session) -> CaseResult:
    """Train every job in each way, in processes that take turns.

    Raises:
        StateError: losses differ between the ways.
    """
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    runs = QUICK if session.quick else RUNS
    for name, settings in runs.items():
        rounds = []
        for number in range(settings.rounds):
            found = {}
            for mode in in_turn(list(_MODES), number):
                session.progress(f"activations: {name}, {mode}, round {number + 1} of {settings.rounds}")
                options = {**asdict(settings), "mode": mode, "disk_dir": os.fspath(session.disk_dir)}
                task = "placement_activations.train"
                found[mode] = session.run(task, options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
            rounds.append({mode: found[mode] for mode in _MODES})
        _require_same_losses(name, rounds)
        measured[name] = rounds
        rows += rows_of(name, rounds)
    return CaseResult(rows, {name: asdict(settings) for name, settings in runs.items()}, measured)


def rows_of(name: str, rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the median steps of each way, and the chosen one over the faster of the others by round."""
    seconds = {mode: [statistics.median(found[mode]["seconds"]) for found in rounds] for mode in rounds[0]}
    fixed = [mode for mode in seconds if mode != "chosen"]
    fastest = min(fixed, key=lambda mode: statistics.median(seconds[mode]))
    ratios = [ours / theirs for ours, theirs in zip(seconds["chosen"], seconds[fastest], strict=True)]
    chosen = rounds[0]["chosen"]
    return [
        *(spread_row(f"{name}: {mode}: step", Spread.of(found), "s") for mode, found in seconds.items()),
        Row(f"{name}: chosen: blocks recomputed", chosen["recomputed"], f"of {chosen['blocks']}"),
        spread_row(f"{name}: chosen / the faster ({fastest})", Spread.of(ratios), "x", WORSE),
    ]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train in one way; return the seconds of the steps that count, all losses, and what was recomputed."""
    mode = options["mode"]
    config = dataclasses.replace(GPTConfig(**options["model"]), checkpoint_activations=mode == "recompute")
    trainee = ManagedTrainee(
        config,
        device_bytes=options["device_bytes"],
        host_bytes=0,
        disk_dir=options["disk_dir"],
        **_MODES[mode],
        **options["keywords"],
    )
    count = options["warmup_steps"] + options["steps"]
    batches = make_batches(config, count=count, batch=options["batch"], seq=options["seq"])
    steps = [timed_step(trainee, batch) for batch in batches]
    report = trainee.model.plan().recompute
    stats = trainee.model.stats()
    trainee.close()
    return {
        "seconds": [seconds for _, seconds in steps[options["warmup_steps"] :]],
        "losses": [loss for loss, _ in steps],
        "blocks": report.num_blocks if report is not None else 0,
        "recomputed": len(report.names) if report is not None else 0,
        "disk_bytes": stats["disk_read"]["bytes"] + stats["disk_write"]["bytes"],
        "peak_bytes": stats["device"]["peak_bytes"],
    }


def _require_same_losses(name: str, rounds: Sequence[Mapping[str, Any]]) -> None:
    losses = {tuple(found[mode]["losses"]) for found in rounds for mode in found}
    if len(losses) != 1:
        raise StateError(f"{name}: the losses differ between ways to hold activations")


TASKS = {"train": train}
