"""What ``gemini train`` trains: a GPT on bytes, for the loop of :mod:`gemini.jobs.run.training`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.jobs.gpt.config import TrainConfig
from gemini.jobs.gpt.data import ByteCorpus
from gemini.jobs.gpt.engine import Engine, TieredEngine
from gemini.jobs.gpt.model import language_loss
from gemini.jobs.run.schedule import lr_schedule
from gemini.jobs.run.training import RunOptions
from gemini.jobs.run.verify import WeightFile

EngineFactory = Callable[[TrainConfig], TieredEngine]


class GPTWork:
    """A GPT as ``config`` says, on ``corpus``; its final weights are set aside in ``weights`` where those are
    wanted."""

    command = "gemini train"

    def __init__(
        self,
        config: TrainConfig,
        corpus: ByteCorpus,
        engine_factory: EngineFactory,
        weights: WeightFile | None,
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._engine_factory = engine_factory
        self._weights = weights
        self.options = RunOptions(
            config.steps,
            config.checkpoint_every,
            config.resume,
            config.overwrite,
            config.device_kind,
            config.options(),
        )

    def identity(self) -> dict[str, Any]:
        """Return what the numbers depend on."""
        return {**self._config.identity(), "corpus": self._corpus.fingerprint()}

    def engine(self) -> TieredEngine:
        """Build the model on its tiers."""
        return self._engine_factory(self._config)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the scheduler of the learning rate."""
        return lr_schedule(optimizer, steps=self._config.steps)

    def step(self, engine: TieredEngine, step: int) -> tuple[float, int]:
        """Train on the batches of a step."""
        return train_step(engine, self._corpus, self._config, step), self._config.tokens_per_step

    def evaluate(self, engine: TieredEngine, step: int) -> float | None:
        """Hold nothing out."""
        return None

    def check_history(self, horizons: list[int], devices: list[str]) -> None:
        """Refuse to verify a run that changed on the way: no one run has its learning rates and last
        digits."""
        if not self._config.verify:
            return
        if len(horizons) > 1:
            raise ConfigError(
                f"--verify cannot repeat this run: --steps changed from {horizons[0]} to "
                f"{self._config.steps} and the learning rates with it; leave out --verify"
            )
        if len(devices) > 1:
            raise ConfigError(
                f"--verify cannot repeat this run: it went from {devices[0]} to {devices[1]}, "
                "and the last digits of their numbers differ; leave out --verify"
            )

    def finish(self, engine: TieredEngine) -> None:
        """Set the final weights aside."""
        if self._weights is not None:
            self._weights.write(engine.weights())


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
