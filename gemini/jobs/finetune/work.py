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
from gemini.jobs.finetune.record_files import find_data
from gemini.jobs.finetune.record_kinds import Documents
from gemini.jobs.finetune.samples import CUT, JOINED, PADDED, WHOLE, Batch, Order, Samples
from gemini.jobs.run.model_card import adapters_named, tuned_card
from gemini.jobs.run.training import RunOptions, shaped_factor

LAYOUTS = {
    WHOLE: "whole documents, as many as fit",
    CUT: "documents are cut where a row ends",
    JOINED: "documents joined, attention goes across them",
    PADDED: "a document in each",
}


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
        layout = model.layout()
        self._tokenizer = model.tokenizer()
        self._encoder = model.encoder(self._tokenizer)
        self._documents = Documents(
            find_data(config.data), data_format=config.data_format, keys=config.data_keys
        )
        self.samples = Samples(
            map(self._encoder.encode, self._documents),
            seq=self.seq,
            layout=layout,
            pad=filler(self._tokenizer),
            directory=scratch,
        )
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

    def describe(self) -> list[str]:
        """Return lines on what trains, the data, the rows that they make, and the steps."""
        samples, held = self.samples, len(self._order.held_out)
        lines = [
            self._trained(),
            f"data: {self._documents.describe()}",
            f"data: {samples.num_tokens:,} tokens, {samples.num_learned:,} of them learned, in "
            f"{samples.num_rows:,} rows of {self.seq} ({LAYOUTS[samples.layout]})"
            f"{f', {held:,} of them held out' if held else ''}; {self.options.steps:,} steps of "
            f"{self._rows_per_step:,} row{'' if self._rows_per_step == 1 else 's'}",
        ]
        if samples.num_cut:
            lost = f", and {samples.num_lost:,} of them their whole answer" if samples.num_lost else ""
            lines.append(
                f"data: {samples.num_cut:,} documents are longer than --seq {self.seq} and lost their "
                f"end{lost}; a longer --seq keeps it"
            )
        if self._encoder.uses_plain_template:
            lines.append(
                "data: the tokenizer has no chat template, so a plain one is used, and is saved with the "
                "model (docs/finetune.md); check that this is the model that you want to tune"
            )
        return lines

    def _trained(self) -> str:
        """Return a line on the weights that train, and how fast."""
        config = self.config
        what, said = "all weights", ""
        if config.lora:
            what = adapters_named(dora=config.dora, rslora=config.rslora)
            scale = config.alpha / (math.sqrt(config.lora) if config.rslora else config.lora)
            said = f" of rank {config.lora}, scaled by {scale:.3g} (alpha {config.alpha})"
        default = f", the default for {what}" if config.lr is None else ""
        return f"training: {what}{said}; learning rate {config.learning_rate:g}{default}"

    def identity(self) -> dict[str, Any]:
        """Return what the numbers depend on."""
        own = {**self.config.identity(), "seq": self.seq}
        return {**own, "model": self._fingerprint, "tokens": self.samples.fingerprint}

    def engine(self) -> PretrainedEngine:
        """Load the model onto its tiers."""
        engine = PretrainedEngine(self.config)
        self.num_parameters = engine.num_parameters[0]
        if self.samples.layout in (WHOLE, CUT):
            try:
                engine.check_documents_are_apart()
            except BaseException:
                engine.close()
                raise
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
        shares = [batch.num_learned for batch in batches]

        def train() -> float:
            total = 0.0
            for batch, share in zip(batches, shares, strict=True):
                loss = engine.loss(batch) * (share / sum(shares))
                engine.backward(loss)
                total += loss.item()
            engine.step()
            return total

        return engine.run_step(train), sum(batch.num_tokens for batch in batches)

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
        is_adapter = bool(self.config.lora) and not self.config.merge
        card = tuned_card(self.target.parent, is_adapter=is_adapter)
        engine.export(self.target, self._tokenizer, merge=self.config.merge, card=card)
        self.finished = True

    def _batch(self, step: int, micro: int) -> Batch:
        first = step * self._rows_per_step + micro * self.config.batch
        return self.samples.rows(self._order[first + row] for row in range(self.config.batch))


def filler(tokenizer: Any) -> int:
    """Return the token that fills rows up. No loss and no attention looks at it."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
