"""What ``gemini finetune`` trains, for the loop of :mod:`gemini.jobs.run.training`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gemini.jobs.finetune.checkpoint_directory import ModelDirectory
from gemini.jobs.finetune.config import FineTuneConfig
from gemini.jobs.finetune.engine import PretrainedEngine
from gemini.jobs.finetune.samples import IGNORED, Batch, Order, Samples, num_learned
from gemini.jobs.run.training import RunOptions, shaped_factor


class FineTuneWork:
    """A model on tokens of its tokenizer; at the end it is exported to ``target``.

    Raises:
        ConfigError: model, tokenizer or data will not do; nothing was loaded.
    """

    command = "gemini finetune"

    def __init__(self, config: FineTuneConfig, target: Path, *, resume: bool, scratch: Path | None) -> None:
        self.config = config
        self.target = target
        model = ModelDirectory(config)
        self._fingerprint = model.fingerprint()
        self.seq = model.seq()
        self._tokenizer = model.tokenizer()
        pad = None if config.packing else self._tokenizer.pad_token_id
        tokens = model.tokens(self._tokenizer)
        self.samples = Samples(tokens, seq=self.seq, pad=pad, directory=scratch)
        self._order = Order(self.samples.num_rows, eval_share=config.eval_share, seed=config.seed)
        self._rows_per_step = config.batch * config.accumulate
        steps = math.ceil(config.epochs * len(self._order.learned) / self._rows_per_step)
        self.num_parameters = 0
        self.finished = False
        self.options = RunOptions(
            steps if config.steps is None else config.steps,
            config.checkpoint_every,
            resume,
            config.overwrite,
            config.device_kind,
            config.options(),
        )

    def describe(self) -> str:
        """Return a line on data and steps."""
        held = len(self._order.held_out)
        return (
            f"{self.samples.num_tokens:,} tokens of {self.config.data} in {self.samples.num_rows:,} rows of "
            f"{self.seq}{f', {held:,} of them held out' if held else ''}; {self.options.steps:,} steps of "
            f"{self._rows_per_step:,} row{'' if self._rows_per_step == 1 else 's'}"
        )

    def identity(self) -> dict[str, Any]:
        """Return what the numbers depend on."""
        own = {**self.config.identity(), "seq": self.seq}
        return {**own, "model": self._fingerprint, "tokens": self.samples.fingerprint}

    def engine(self) -> PretrainedEngine:
        """Load the model onto its tiers."""
        engine = PretrainedEngine(self.config)
        self.num_parameters = engine.num_parameters[0]
        return engine

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the scheduler of the learning rate."""
        steps = self.options.steps
        warmup = round(self.config.warmup * steps)
        factor = partial(shaped_factor, steps=steps, warmup=warmup, shape=self.config.schedule)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(self, engine: PretrainedEngine, step: int) -> tuple[float, int]:
        """Train on the rows of a step, of which every token counts the same."""
        batches = [self._batch(step, micro) for micro in range(self.config.accumulate)]
        shares = [num_learned(batch) for batch in batches]

        def train() -> float:
            total = 0.0
            for batch, share in zip(batches, shares, strict=True):
                loss = engine.loss(batch) * (share / sum(shares))
                engine.backward(loss)
                total += loss.item()
            engine.step()
            return total

        tokens = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        return engine.run_step(train), tokens

    def evaluate(self, engine: PretrainedEngine, step: int) -> float | None:
        """Return the loss on what is held out, after every ``eval_every`` steps and at the end."""
        held, every = self._order.held_out, self.config.eval_every
        is_due = step + 1 == self.options.steps or (every and (step + 1) % every == 0)
        if not len(held) or not is_due:
            return None
        size = self.config.batch
        return engine.evaluate(
            self.samples.rows(held[first : first + size].tolist()) for first in range(0, len(held), size)
        )

    def check_history(self, horizons: list[int], devices: list[str]) -> None:
        """Go on with any."""

    def finish(self, engine: PretrainedEngine) -> None:
        """Export what was trained."""
        engine.export(self.target, self._tokenizer, merge=self.config.merge)
        self.finished = True

    def _batch(self, step: int, micro: int) -> Batch:
        first = step * self._rows_per_step + micro * self.config.batch
        return self.samples.rows(self._order[first + row] for row in range(self.config.batch))
