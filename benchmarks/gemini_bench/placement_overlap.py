"""Case ``overlap``: real steps with updates that wait until their chunks are needed, against updates at a
barrier.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch

from gemini.errors import StateError
from gemini.jobs.gpt.model import GPTConfig
from gemini_bench.paired import Spread, in_turn, spread_row, unmeasured_row
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session
from gemini_bench.trainee import GPT2_124M, ManagedTrainee, StepParts, make_batches, model_data_bytes

GAIN = 0.60

_NAMES = {True: "overlap", False: "barrier"}


@dataclass(frozen=True)
class Settings:
    """Two equal models take turns; each has ``share`` of its model data on DEVICE: parameters, gradients and
    some of the states.

    A turn is one step that does not count, for what the other has left in caches, and ``turn_steps`` that
    do. One thread computes, so a second core is free for transfers.
    """

    model: GPTConfig = GPT2_124M
    share: float = 0.65
    batch: int = 4
    seq: int = 128
    max_norm: float = 1.0
    threads: int = 1
    warmup_steps: int = 6
    rounds: int = 5
    turn_steps: int = 1
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """The steps of each model."""
        return self.warmup_steps + self.rounds * (1 + self.turn_steps)


QUICK = Settings(
    GPTConfig(layers=4, hidden=128, heads=2),
    seq=32,
    rounds=1,
    keywords={"search_range_mb": 1, "min_chunk_size_mb": 0.25},
)


def overlap(session: Session) -> CaseResult:
    """Train both models in turns in one process and compare their steps."""
    settings = QUICK if session.quick else Settings()
    session.progress("overlap: pending updates and the barrier, in turns in one process")
    options = {**asdict(settings), "disk_dir": os.fspath(session.disk_dir)}
    found = session.run("placement_overlap.train", options, sample_seconds=TIMING_SAMPLE_SECONDS).data()
    cores = len(os.sched_getaffinity(0))
    return CaseResult(rows(found, has_free_core=cores > settings.threads), asdict(settings), found)


def rows(found: Mapping[str, Any], *, has_free_core: bool) -> list[Row]:
    """Return the times of both, and what of the hideable was hidden in each round.

    ``found`` has, per model and round, the mean seconds of forward, backward, update and the whole step.
    """
    late, barrier = found["overlap"], found["barrier"]
    hideable = [min(one["update"], one["forward"]) for one in barrier]
    gains = [theirs["whole"] - ours["whole"] for ours, theirs in zip(late, barrier, strict=True)]
    shares = [gain / most for gain, most in zip(gains, hideable, strict=True)]
    what = "gain / min(update, forward)"
    return [
        *(
            spread_row(f"{name}: {part}", Spread.of([one[part] for one in found[name]]), "s")
            for name in ("barrier", "overlap")
            for part in ("whole", "forward", "backward", "update", "stalled")
        ),
        spread_row("gain: step of the barrier less step with overlap", Spread.of(gains), "s"),
        spread_row("most that can be hidden: min(update, forward) of the barrier", Spread.of(hideable), "s"),
        spread_row(what, Spread.of(shares), "share", GAIN, at_least=True)
        if has_free_core
        else unmeasured_row(what, "share", GAIN, "no core is free to transfer on"),
    ]


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train both models; return the mean times of each turn.

    Raises:
        StateError: losses or weights differ between them, or an update did not wait.
    """
    settings = _settings(options)
    torch.set_num_threads(settings.threads)
    config = settings.model
    batches = make_batches(config, count=settings.num_steps, batch=settings.batch, seq=settings.seq)
    trainees = {
        name: ManagedTrainee(
            config,
            overlap=waits,
            max_norm=settings.max_norm,
            device_bytes=int(settings.share * model_data_bytes(config)),
            host_bytes=0,
            non_model_bytes=0,
            disk_dir=options["disk_dir"],
            **settings.keywords,
        )
        for waits, name in _NAMES.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in trainees}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in trainees}
    try:
        for name, trainee in trainees.items():
            losses[name] += [trainee.step(batch) for batch in batches[: settings.warmup_steps]]
        for number in range(settings.rounds):
            begin = settings.warmup_steps + number * (1 + settings.turn_steps)
            for name in in_turn(list(trainees), number):
                steps, stalled = _turn(trainees[name], batches[begin : begin + 1 + settings.turn_steps])
                losses[name] += [step.loss for step in steps]
                turns[name].append(_means(steps[1:], stalled))
        _require_same(trainees, losses)
        plans = {name: _plan_of(trainee) for name, trainee in trainees.items()}
    finally:
        for trainee in trainees.values():
            trainee.close()
    return {**turns, "losses": losses["overlap"], "plans": plans}


def _turn(trainee: ManagedTrainee, batches: Sequence[Any]) -> tuple[list[StepParts], float]:
    """Train on each batch; return the steps, and the seconds of waiting for transfers after the first."""
    first = trainee.step_in_parts(batches[0])
    before = trainee.model.stats()["stall_seconds"]
    steps = [trainee.step_in_parts(batch) for batch in batches[1:]]
    after = trainee.model.stats()["stall_seconds"]
    trainee.model.manager.chunks.drain()  # what it leaves under way is not to slow the other
    return [first, *steps], after - before


def _means(steps: Sequence[StepParts], stalled: float) -> dict[str, float]:
    parts = ("whole", "forward", "backward", "update")
    means = {part: fmean(getattr(step, part) for step in steps) for part in parts}
    return {**means, "stalled": stalled / len(steps)}


def _require_same(trainees: Mapping[str, ManagedTrainee], losses: Mapping[str, list[float]]) -> None:
    late, barrier = (trainees[name].model for name in ("overlap", "barrier"))
    if late.stats()["pending_updates"] == 0 or barrier.stats()["pending_updates"]:
        raise StateError("updates waited under the barrier, or did not with overlap")
    if losses["overlap"] != losses["barrier"]:
        raise StateError(f"the losses differ: {dict(losses)}")
    theirs = barrier.state_dict()
    for name, tensor in late.state_dict().items():
        if not torch.equal(tensor, theirs[name]):
            raise StateError(f"with equal losses {name!r} differs after the same steps")


def _plan_of(trainee: ManagedTrainee) -> dict[str, Any] | None:
    """Return the promise of the plan in force; None if no step is planned."""
    step = trainee.model.plan().step
    if step is None:
        return None
    promised = step.promise.simulation
    return {
        "name": step.chosen.name,
        "seconds": promised.step_seconds,
        "compute_seconds": promised.compute_seconds,
        "link_bytes": promised.link_bytes,
    }


def _settings(options: Mapping[str, Any]) -> Settings:
    values = {name: value for name, value in options.items() if name != "disk_dir"}
    return Settings(**{**values, "model": GPTConfig(**values["model"])})


TASKS = {"train": train}
