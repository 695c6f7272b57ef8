"""The managed part of a run: step after step, with checkpoints, until the end or a request to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gemini.errors import CheckpointError, ConfigError, IoError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.display import Display
from gemini.jobs.gpt.engine import Engine, TieredEngine
from gemini.jobs.gpt.model import language_loss
from gemini.jobs.gpt.report import StepReport, tier_uses
from gemini.jobs.gpt.run_directory import RunDirectory
from gemini.jobs.gpt.schedule import lr_schedule
from gemini.jobs.gpt.stop import StopRequest
from gemini.jobs.gpt.verify import WeightFile

Value = TypeVar("Value")
EngineFactory = Callable[[TrainConfig], TieredEngine]


@dataclass
class Progress:
    """What a run has come to: losses by 0-based step, resumed ones included; reports of this process."""

    first_step: int = 0
    last_step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Training:
    """One managed run, from building the model to closing it; use once."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: ByteCorpus,
        directory: RunDirectory | None,
        display: Display,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._directory = directory
        self._display = display
        self._stop = stop
        self._progress = Progress()
        self._identity = {**config.identity(), "corpus": corpus.fingerprint()}
        self._horizons = [config.steps]
        self._devices = [config.device_kind]
        self._saved_step: int | None = None
        self._stall_seconds = 0.0

    def run(self, engine_factory: EngineFactory, weights: WeightFile | None) -> Progress:
        """Train, save, and set the final weights aside in ``weights`` where they are wanted."""
        self._check_directory()
        engine = engine_factory(self._config)
        try:
            scheduler = lr_schedule(engine.optimizer, steps=self._config.steps)
            if self._config.resume:
                self._restore(engine, scheduler)
            elif self._directory is not None:
                # Not before the engine stands: a refused budget must not cost the run to be overwritten.
                self._directory.start(self._identity, self._config.options())
            self._stall_seconds = float(engine.stats()["stall_seconds"])
            self._loop(engine, scheduler)
            self._save(engine, scheduler)
            self._progress.stats, self._progress.timeline = engine.stats(), engine.timeline()
            if weights is not None and not self._stop.requested:
                weights.write(engine.weights())
        finally:
            engine.close()
        return self._progress

    def _check_directory(self) -> None:
        if self._directory is None:
            return
        if self._config.resume:
            self._directory.check_resume(self._identity)
        elif not self._config.overwrite:
            self._directory.refuse_older_run()

    def _loop(self, engine: TieredEngine, scheduler: Any) -> None:
        every = self._config.checkpoint_every
        for step in range(self._progress.first_step, self._config.steps):
            report = self._step(engine, scheduler, step)
            self._progress.losses[step] = report.loss
            self._progress.reports.append(report)
            self._progress.last_step = step + 1
            self._record(report)
            self._display.step(report)
            if self._stop.requested:
                return
            if every and (step + 1) % every == 0:
                self._save(engine, scheduler)

    def _record(self, report: StepReport) -> None:
        """Write the metrics of a step; training does not end for want of them."""
        if self._directory is None:
            return
        try:
            self._directory.append_metrics(report.to_metrics())
        except IoError as error:
            if not self._progress.notes:
                self._note(f"{error}; training goes on, lines that were not written come with a later step")

    def _note(self, text: str) -> None:
        self._progress.notes.append(text)
        self._display.note(text)

    def _step(self, engine: TieredEngine, scheduler: Any, step: int) -> StepReport:
        lr = float(engine.optimizer.param_groups[0]["lr"])
        started = time.perf_counter()
        loss = train_step(engine, self._corpus, self._config, step)
        scheduler.step()
        seconds = time.perf_counter() - started
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss became {loss} at step {step + 1} with learning rate {lr:.2e}; "
                "lower --lr or set --clip 1.0; the last checkpoint was not touched"
            )
        stats = engine.stats()
        stalled = float(stats["stall_seconds"]) - self._stall_seconds
        self._stall_seconds += stalled
        tokens = self._config.tokens_per_step
        return StepReport(step + 1, loss, lr, seconds, tokens, stalled, tier_uses(stats))

    def _save(self, engine: TieredEngine, scheduler: Any) -> None:
        step = self._progress.last_step
        if self._directory is None or self._saved_step == step:
            return
        extra = {"step": step, "horizons": self._horizons, "devices": self._devices}
        engine.save(self._directory.checkpoint, scheduler, extra)
        self._saved_step = step
        if self._stop.requested:
            self._display.note(f"saved step {step} in {self._directory.path}; --resume continues from there")

    def _restore(self, engine: TieredEngine, scheduler: Any) -> None:
        assert self._directory is not None
        extra = engine.load(self._directory.checkpoint, scheduler)
        if not {"step", "horizons"} <= extra.keys():
            raise CheckpointError(f"{self._directory.checkpoint} was not written by gemini train")
        step = int(extra["step"])
        if step > self._config.steps:
            raise ConfigError(
                f"{self._directory.path} is at step {step}, past --steps {self._config.steps}; "
                "give more --steps"
            )
        self._check_history(list(extra["horizons"]), list(extra.get("devices", ["cpu"])))
        self._directory.keep_options(self._config.options())
        self._progress.first_step = self._progress.last_step = self._saved_step = step
        for record in self._directory.read_metrics(step):
            self._progress.losses[record["step"] - 1] = float(record["loss"])
        self._display.note(f"resumed after step {step}")

    def _check_history(self, horizons: list[int], devices: list[str]) -> None:
        """Take over how many steps the run was to have and the kinds of devices it was on, from the first on.
        Refuse to verify one that changed on the way: no one run has its learning rates and last digits."""
        self._horizons = _followed_by(horizons, self._config.steps)
        self._devices = _followed_by(devices, self._config.device_kind)
        if not self._config.verify:
            return
        if len(self._horizons) > 1:
            raise ConfigError(
                f"--verify cannot repeat this run: --steps changed from {self._horizons[0]} to "
                f"{self._config.steps} and the learning rates with it; leave out --verify"
            )
        if len(self._devices) > 1:
            raise ConfigError(
                f"--verify cannot repeat this run: it went from {self._devices[0]} to {self._devices[1]}, "
                "and the last digits of their numbers differ; leave out --verify"
            )


def _followed_by(values: list[Value], value: Value) -> list[Value]:
    return values if values[-1] == value else [*values, value]


def train_step(engine: Engine, corpus: ByteCorpus, config: TrainConfig, step: int) -> float:
    """Run optimizer step ``step`` (from 0) over its micro-batches and return the mean loss in nats."""
    return engine.run_step(lambda: _train_step(engine, corpus, config, step))


def _train_step(engine: Engine, corpus: ByteCorpus, config: TrainConfig, step: int) -> float:
    total = 0.0
    for micro in range(config.accumulate):
        index = step * config.accumulate + micro
        inputs, targets = corpus.batch(index, batch=config.batch, seq=config.seq, seed=config.seed)
        # No name for the logits: autograd does not need them, and they may be the largest activation.
        loss = language_loss(engine.forward(inputs.to(engine.device)), targets.to(engine.device))
        loss = loss / config.accumulate
        engine.backward(loss)
        total += loss.item()
    engine.step()
    return total
