"""Case ``loop``: the time that an engine and a trainer add to the steps of a plain loop."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from gemini.parallel.engine import Engine, get_dist_logger, initialize, launch_from_torch, shutdown
from gemini.parallel.trainer import Accuracy, MultiTimer, Trainer, hooks
from gemini_bench.paired import (
    Contender,
    Spread,
    Timings,
    require_same_job,
    run_paired,
    spread_row,
    wall_seconds,
)
from gemini_bench.record import Row
from gemini_bench.session import TIMING_SAMPLE_SECONDS, CaseResult, Session

TIME_RATIO = 1.02
KINDS = ("plain loop", "engine", "trainer")
PLACES = ("alone", "launched")  # launched: one rank of one, whose gradients go through torch's DDP
_CALIBRATIONS = 6
_NEAR = 0.05  # a step so much shorter or longer than it should be is good enough


@dataclass(frozen=True)
class Settings:
    """An MLP of ``layers`` of ``width``, AdamW, epochs of ``steps`` steps of ``step_seconds``, of which
    ``rounds`` per contender count. ``batch``: rows of a step; 0: as many as take that time."""

    width: int = 512
    layers: int = 6
    classes: int = 10
    steps: int = 5
    rounds: int = 101
    step_seconds: float = 0.05
    batch: int = 0


QUICK = Settings(width=32, layers=2, steps=3, rounds=3, step_seconds=0.001)


def run(session: Session) -> CaseResult:
    """Time all three in one process, an epoch each in turns, alone and launched; then see the peak memory of
    each in a process of its own."""
    settings = QUICK if session.quick else Settings()
    options = dataclasses.asdict(settings)
    rows: list[Row] = []
    measured: dict[str, Any] = {}
    for place in PLACES:
        session.progress(f"loop: plain loop, engine and trainer, epochs in turns in one process, {place}")
        asked = {**options, "place": place}
        found = session.run("programs_loop.paired", asked, sample_seconds=TIMING_SAMPLE_SECONDS).data()
        measured[place] = found
        rows += _time_rows(settings, place, found)
        options["batch"] = found["batch"]  # the next ones train the same
    peaks: dict[str, int] = {}
    for kind in KINDS:
        session.progress(f"loop: peak memory, {kind}")
        worker = session.run("programs_loop.memory", {**options, "kind": kind})
        worker.data()
        peaks[kind] = worker.peak_rss_bytes
        rows.append(Row(f"{kind}, launched: peak memory", peaks[kind], "bytes"))
    return CaseResult(rows, options, {**measured, "peak_rss_bytes": peaks})


def _time_rows(settings: Settings, place: str, timing: dict[str, Any]) -> list[Row]:
    times, plain = Timings(timing), KINDS[0]
    step = Spread.of([1e3 * seconds / settings.steps for seconds in timing["seconds"][plain]])
    rows: list[Row] = [spread_row(f"{plain}, {place}: step of {timing['batch']} rows", step, "ms")]
    for kind in KINDS[1:]:
        added, ratio = times.excess(kind, plain, settings.steps), times.ratio(kind, plain)
        rows += [
            spread_row(f"{kind}, {place}: adds to a step", added, "us"),
            spread_row(f"{kind}, {place} / {plain}: time, paired", ratio, "x", TIME_RATIO),
        ]
    return rows


# -- the same job three times ----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A model with its optimizer, scheduler, data and criterion; equal in every call."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: StepLR
    loader: DataLoader[Any]
    criterion: nn.Module

    @classmethod
    def make(cls, settings: Settings) -> Job:
        """Make it of seeds of its own."""
        torch.manual_seed(0)
        widths = [settings.width] * settings.layers
        layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for width in widths)
        model = nn.Sequential(*layers, nn.Linear(settings.width, settings.classes))
        rows = torch.randn(settings.steps * settings.batch, settings.width)
        labels = torch.randint(0, settings.classes, (len(rows),))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        return cls(
            model,
            optimizer,
            StepLR(optimizer, step_size=1, gamma=0.99),
            DataLoader(TensorDataset(rows, labels), batch_size=settings.batch),
            nn.CrossEntropyLoss(),
        )

    def engine(self) -> Engine:
        """Return the result of ``initialize``."""
        return initialize(self.model, self.optimizer, self.criterion, self.loader, config={})[0]

    def sample(self) -> Tensor:
        """Return all weights."""
        return torch.cat([param.detach().flatten() for param in self.model.parameters()])


def plain_epoch(job: Job) -> Callable[[], None]:
    """Return an epoch by torch alone."""

    def epoch() -> None:
        job.model.train()
        for rows, labels in job.loader:
            job.optimizer.zero_grad()
            loss = job.criterion(job.model(rows), labels)
            loss.backward()
            job.optimizer.step()
        job.scheduler.step()

    return epoch


def engine_epoch(job: Job) -> Callable[[], None]:
    """Return the same epoch by an engine, in a loop of the program's own."""
    engine = job.engine()
    assert engine.criterion is not None
    criterion = engine.criterion

    def epoch() -> None:
        engine.train()
        for rows, labels in job.loader:
            engine.zero_grad()
            loss = criterion(engine(rows), labels)
            engine.backward(loss)
            engine.step()
        job.scheduler.step()

    return epoch


def trainer_epoch(job: Job) -> Callable[[], None]:
    """Return the same epoch by a trainer that logs loss, throughput, learning rate and times."""
    trainer = Trainer(job.engine(), timer=MultiTimer(), logger=get_dist_logger())
    used = [
        hooks.LossHook(),
        hooks.AccuracyHook(Accuracy()),
        hooks.ThroughputHook(),
        hooks.LRSchedulerHook(job.scheduler),
        hooks.LogMetricByEpochHook(),
        hooks.LogTimingByEpochHook(),
        hooks.LogMemoryByEpochHook(),
    ]

    def epoch() -> None:
        trainer.fit(job.loader, epochs=trainer.cur_epoch + 1, hooks=used)

    return epoch


EPOCHS = dict(zip(KINDS, (plain_epoch, engine_epoch, trainer_epoch), strict=True))


# -- in the worker ---------------------------------------------------------------------------------


def paired(options: dict[str, Any]) -> dict[str, Any]:
    """Run epochs of all kinds in turns, as ``run_paired`` does.

    Raises:
        StateError: they did not end with the same weights.
    """
    options = dict(options)
    launched = options.pop("place") == "launched"
    settings = Settings(**options)
    if not settings.batch:
        settings = dataclasses.replace(settings, batch=calibrated(settings))
    with launching() if launched else nullcontext():
        contenders = []
        for kind, epoch_of in EPOCHS.items():
            job = Job.make(settings)
            contenders.append(Contender(kind, epoch_of(job), 0.0, job.sample))
        found = run_paired(contenders, settings.rounds)
    require_same_job(contenders, 0.0)
    return {**found, "batch": settings.batch}


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Run two epochs of ``options["kind"]``, for the watch to see their peak."""
    options = dict(options)
    kind = options.pop("kind")
    with launching():
        epoch = EPOCHS[kind](Job.make(Settings(**options)))
        for _ in range(2):
            epoch()
    return {}


@contextmanager
def launching() -> Iterator[None]:
    """Be the only rank of a run, as a program of the documents is that nobody launches."""
    launch_from_torch(config={})
    try:
        yield
    finally:
        shutdown()


def calibrated(settings: Settings) -> int:
    """Find the number of rows with which a step of the plain loop takes ``step_seconds``."""
    batch = 16
    for _ in range(_CALIBRATIONS):
        short = dataclasses.replace(settings, batch=batch, steps=5)
        epoch = plain_epoch(Job.make(short))
        epoch()
        seconds = statistics.median(wall_seconds(epoch) for _ in range(3)) / short.steps
        if math.isclose(seconds, settings.step_seconds, rel_tol=_NEAR):
            break
        batch = max(1, round(batch * min(16.0, settings.step_seconds / seconds)))
    return batch


TASKS = {"paired": paired, "memory": memory}
