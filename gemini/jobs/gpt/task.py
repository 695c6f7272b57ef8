"""The task of ``gemini train`` for the loop of :mod:`gemini.jobs.run.training`: a GPT on bytes. Also records
a few steps of it for ``gemini trace``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.engine import Engine, ManagedEngine, TieredEngine
from gemini.jobs.gpt.model import language_loss
from gemini.jobs.run.display import Display
from gemini.jobs.run.trackers import parse_trackers
from gemini.jobs.run.training import RunOptions, StopRequest, lr_schedule
from gemini.jobs.run.verify import WeightFile
from gemini.system.device import repeatable_operators, resolve_device
from gemini.timeline.event_recorder import TimelineRecorder

EngineFactory = Callable[[TrainConfig], TieredEngine]


class GPTTask:
    """Trains the GPT of ``config`` on ``corpus``. If ``weights`` is given, the final weights are written to
    it."""

    command = "gemini train"

    def __init__(
        self,
        config: TrainConfig,
        corpus: ByteCorpus,
        engine_factory: EngineFactory,
        weights: WeightFile | None,
        *,
        resume: bool,
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._engine_factory = engine_factory
        self._weights = weights
        self.options = RunOptions(
            config.steps,
            config.checkpoint_every,
            resume,
            config.overwrite,
            config.device_kind,
            config.options(),
            parse_trackers(config.report_to),
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on."""
        return {**self._config.identity(), "corpus": self._corpus.fingerprint()}

    def engine(self) -> TieredEngine:
        """Build the model on its tiers."""
        return self._engine_factory(self._config)

    def prepare(self, engine: TieredEngine, display: Display, stop: StopRequest) -> bool:
        """Return True: there is no work before the first step."""
        return True

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the learning rate scheduler."""
        return lr_schedule(optimizer, steps=self._config.steps)

    def step(self, engine: TieredEngine, step: int) -> tuple[float, int]:
        """Train on the batches of a step."""
        return train_step(engine, self._corpus, self._config, step), self._config.tokens_per_step

    def values(self) -> dict[str, float]:
        """Return no further values."""
        return {}

    def evaluate(self, engine: TieredEngine, step: int) -> float | None:
        """Return None: nothing is held out."""
        return None

    def check_history(self, horizons: list[int], devices: list[str]) -> None:
        """Raise ConfigError for ``--verify`` if the number of steps or the device changed on resume: a single
        run cannot repeat these numbers."""
        if not self._config.verify:
            return
        if len(horizons) > 1:
            raise ConfigError(
                f"--verify cannot repeat this run: --steps changed from {horizons[0]} to "
                f"{self._config.steps}, which changed the learning rates; leave out --verify"
            )
        if len(devices) > 1:
            raise ConfigError(
                f"--verify cannot repeat this run: it moved from {devices[0]} to {devices[1]}, and "
                "the last digits of their results differ; leave out --verify"
            )

    def finish(self, engine: TieredEngine) -> None:
        """Write the final weights to the weight file."""
        if self._weights is not None:
            self._weights.write(engine.weights())


def train_step(engine: Engine, corpus: ByteCorpus, config: TrainConfig, step: int) -> float:
    """Run optimizer step ``step`` (from 0) over its micro-batches. Return the mean loss in nats."""
    return engine.run_step(lambda: _train_step(engine, corpus, config, step))


def _train_step(engine: Engine, corpus: ByteCorpus, config: TrainConfig, step: int) -> float:
    total = 0.0
    for micro in range(config.accumulate):
        index = step * config.accumulate + micro
        inputs, targets = corpus.batch(index, batch=config.batch, seq=config.seq, seed=config.seed)
        # Keep no reference to the logits: autograd does not need them, and they may be the largest tensor.
        loss = language_loss(engine.forward(inputs.to(engine.device)), targets.to(engine.device))
        loss = loss / config.accumulate
        engine.backward(loss)
        total += loss.item()
    engine.step()
    return total


def record_training(
    config: TrainConfig, *, warmup: int, display: Display, keep: Callable[[TimelineRecorder], None]
) -> int:
    """Train with ``config``, record all steps after ``warmup``, and pass the recorder to ``keep``.

    Return 0, or 128 + signal if SIGINT or SIGTERM ended it after a step. A second signal raises
    KeyboardInterrupt at once. The steps recorded until then are always kept.

    Raises:
        ConfigError: it ended before recording began.
    """
    corpus = ByteCorpus(config.data)
    corpus.positions(0, batch=1, seq=config.seq, seed=config.seed)  # refuses a short corpus at once
    on_device = repeatable_operators(resolve_device(config.device))
    with display, on_device, StopRequest(display.stopping) as stop:
        engine = ManagedEngine(config)
        with contextlib.ExitStack() as scope:
            scope.callback(engine.close)
            recorder = engine.record_timeline()
            scheduler = lr_schedule(engine.optimizer, steps=config.steps)
            for step in range(config.steps):
                if step == warmup:
                    scope.callback(keep, recorder)
                    scope.enter_context(recorder)
                loss = train_step(engine, corpus, config, step)
                scheduler.step()
                what = "recorded" if step >= warmup else "warmup, not recorded"
                display.note(f"step {step + 1}/{config.steps}  loss {loss:.4f}  {what}")
                if stop.requested:
                    break
            if step < warmup:
                raise ConfigError(f"stopped in step {step + 1}, before recording began; nothing was written")
        return 0 if stop.signum is None else 128 + stop.signum
