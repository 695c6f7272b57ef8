"""The task of ``gemini finetune`` for the loop of :mod:`gemini.jobs.run.training`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gemini.comm.ranks import Rank
from gemini.errors import ConfigError
from gemini.jobs.finetune.adapters import adapts_experts
from gemini.jobs.finetune.checkpoint_directory import ModelDirectory
from gemini.jobs.finetune.config import NO, NO_TARGETS, FineTuneConfig
from gemini.jobs.finetune.encoding import EncodedDocument
from gemini.jobs.finetune.engine import PretrainedEngine, checked_early
from gemini.jobs.finetune.held_out import BEST, BestWeights, HeldOut
from gemini.jobs.finetune.layouts import refuse_unfit_parts, refuse_unread, trains_parts
from gemini.jobs.finetune.preferences import DPO, Rewards
from gemini.jobs.finetune.record_files import DataFiles, find_data
from gemini.jobs.finetune.record_kinds import Documents
from gemini.jobs.finetune.references import PairSet, References, remove_references
from gemini.jobs.finetune.samples import CUT, JOINED, PADDED, PAIRS, WHOLE, Batch, Order, Samples
from gemini.jobs.finetune.token_cache import EVAL_TOKENS, TOKENS, keep_tokens, kept_tokens, key_of
from gemini.jobs.finetune.tuning import TuningEngine
from gemini.jobs.run.display import Display
from gemini.jobs.run.model_card import adapters_named, tuned_card
from gemini.jobs.run.trackers import parse_trackers
from gemini.jobs.run.training import RunOptions, StopRequest, shaped_factor
from gemini.system.files import io_errors

_TOLD_EVERY = 32  # documents between two progress messages
LAYOUTS = {
    WHOLE: "as many whole documents as fit",
    CUT: "documents are cut at the end of a row",
    JOINED: "documents are joined, with attention between them",
    PADDED: "one document per row",
    PAIRS: "one row with the chosen answer, one with the rejected answer",
}


class FineTuneTask:
    """Trains a model on tokens of its tokenizer, and exports it to ``target`` at the end.

    Raises:
        ConfigError: model, tokenizer or data cannot be used; nothing was loaded.
    """

    command = "gemini finetune"

    def __init__(
        self,
        config: FineTuneConfig,
        target: Path,
        *,
        resume: bool,
        scratch: Path | None,
        rank: Rank | None = None,
        refuse: Callable[[Mapping[str, Any]], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read the data and check the options.

        Args:
            rank: this process among those that train together.
            refuse: raises if the run to resume is another one. It gets the part of the identity that is known
                before data is read.
            tell: called with lines about the progress of reading.
        """
        self.config = config
        self.target = target
        self._rank = Rank() if rank is None else rank
        copies = config.data_ranks(self._rank.count)
        self._batch_rows, self._passes = config.rows_of_rank(copies)
        # In the grid of ranks, tp is innermost, then sp, then data, then pp.
        self._data_place = self._rank.index // (config.tp * config.sp) % copies
        model = ModelDirectory(config)
        outline = checked_early(config, ranks=self._rank.count)
        self._adapts_experts = adapts_experts(outline)
        refuse_unread(config)
        self._in_parts = trains_parts(config)
        if self._in_parts:
            self._check_parts(outline)
        with io_errors("read the weights of", model.path):
            self._fingerprint = model.fingerprint()
        self.seq = model.seq()
        layout = model.layout()
        refuse({**config.identity(), "seq": self.seq, "model": self._fingerprint})
        files = find_data(config.data)
        held_out = self._find_eval_data(files)
        self._tokenizer, self._vocabulary = model.tokenizer(), model.vocabulary
        self._encoder = model.encoder(self._tokenizer)
        self._is_dpo = config.objective == DPO
        self._tell = tell
        self._new_tokens: list[
            Callable[..., None]
        ] = []  # write new token caches, once the run's directory exists
        self._rewards = Rewards()
        self._reference = ""  # digest of the reference's weights and pairs, if a reference is stored
        self._documents, self.samples = self._samples(files, layout, scratch)
        self._order = Order(self.samples.num_rows, eval_share=config.eval_share, seed=config.seed)
        owns = self._rank.index == 0
        self._best = BestWeights(target.parent / BEST, owns=owns) if config.keep_best else None
        self._eval_documents: Documents | None = None
        self._eval_samples = self._read_eval_data(held_out, scratch)
        self._rows_per_step = config.batch * config.accumulate
        self.num_parameters = 0
        self.finished = False
        self.options = self._run_options(resume=resume)
        held = self._order.held_out
        if self._eval_samples is not None:
            held = np.arange(self._eval_samples.num_rows)
        self._references = self._make_references(model, held) if config.keeps_reference else None
        self._held_out = HeldOut(
            self._eval_samples or self.samples,
            held,
            every=config.eval_every,
            steps=self.options.steps,
            batch=self._batch_rows,
        )

    def _run_options(self, *, resume: bool) -> RunOptions:
        config = self.config
        steps = math.ceil(config.epochs * len(self._order.learned) / self._rows_per_step)
        return RunOptions(
            steps if config.steps is None else config.steps,
            config.checkpoint_every,
            resume,
            config.overwrite,
            config.device_kind,
            config.options(),
            () if self._rank.index else parse_trackers(config.report_to),
        )

    def _samples(self, files: DataFiles, layout: str, scratch: Path | None) -> tuple[Documents, Samples]:
        """Return the documents of ``files`` and their rows. If the run may resume, its cached tokens are used
        if they are still valid."""
        config = self.config
        documents = Documents(
            files, data_format=config.data_format, keys=config.data_keys, pairs=self._is_dpo
        )
        make = partial(
            Samples,
            seq=self.seq,
            layout=layout,
            pad=filler(self._tokenizer, self._vocabulary),
            directory=scratch,
            option=files.option,
        )
        path = self.target.parent / (TOKENS if files.option == "--data" else EVAL_TOKENS)
        with io_errors("read", files.files[0]):
            key = key_of(files, Path(config.tokenizer or config.model), self._options_of_tokens())
        kept = kept_tokens(path, key) if config.resume != "no" else None
        if kept is not None:
            with suppress(ValueError, OSError):  # the cache was damaged in the meantime
                samples = make(kept)
                if samples.fingerprint == kept.fingerprint:
                    documents.counts.update(kept.counts)
                    if kept.plain_template:
                        self._encoder.use_plain_template()
                    return documents, samples
        samples = make(self._encoded(documents))
        self._new_tokens.append(partial(keep_tokens, path, key, samples, documents.counts))
        return documents, samples

    def _options_of_tokens(self) -> dict[str, Any]:
        names = ("data_format", "data_keys", "objective", "loss_on")
        return {"model": self._fingerprint, **{name: getattr(self.config, name) for name in names}}

    def _keep_tokens(self, display: Display) -> None:
        """Write the token caches for a later resume."""
        try:
            for keep in self._new_tokens:
                keep(plain_template=self._encoder.uses_plain_template)
            if self._eval_samples is None:
                (self.target.parent / EVAL_TOKENS).unlink(missing_ok=True)
        except OSError as error:
            display.note(f"{error}; if this run is resumed, it reads the data again")
        self._new_tokens.clear()

    def _make_references(self, model: ModelDirectory, held: npt.NDArray[np.int64]) -> References:
        """Return the reference for the learned pairs and for the pairs in ``held``. Learned pairs are in the
        order of steps, so that a run with more steps begins with the same passes."""
        count = min(self.options.steps * self._rows_per_step, len(self._order.learned))
        learned = np.asarray([self._order[row] for row in range(count)], dtype=np.int64)
        sets = [PairSet("data", self.samples, learned)]
        samples = [self.samples]
        if self._eval_samples is None:
            sets.append(PairSet("data", self.samples, held))
        else:
            sets.append(PairSet("eval_data", self._eval_samples, held))
            samples.append(self._eval_samples)
        if not self._rank.index:
            with io_errors("read the weights of", model.path):
                weights = model.weights_digest()
            told = [weights, self.seq, self.config.precision, *(each.fingerprint for each in samples)]
            self._reference = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
        directory = self.target.parent
        return References(directory, self._reference, sets, batch=self._batch_rows, rank=self._rank)

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the weights with the lowest held-out loss, if they are kept."""
        if self._best is None or self._best.step is None:
            return None
        return self._best.step, self._best.loss

    def _find_eval_data(self, data: DataFiles) -> DataFiles | None:
        """Return the files of ``--eval-data``. Raise ConfigError if one of them is also in ``data``."""
        if self.config.eval_data is None:
            return None
        files = find_data(self.config.eval_data, "--eval-data")
        learned = {os.path.realpath(file) for file in data.files}
        for file in files.files:
            if os.path.realpath(file) in learned:
                raise ConfigError(
                    f"--eval-data {file} is also in --data, so the held-out loss would be a loss on "
                    "training data; name other files, or give only --eval-share 0.05"
                )
        return files

    def _read_eval_data(self, files: DataFiles | None, scratch: Path | None) -> Samples | None:
        """Return the rows of ``files``, in the same layout as the training data."""
        if files is None:
            return None
        self._eval_documents, samples = self._samples(files, self.samples.layout, scratch)
        return samples

    def _encoded(self, documents: Documents) -> Iterator[EncodedDocument]:
        """Yield the tokens of each document, and report progress."""
        encoded: Iterable[EncodedDocument] = map(self._encoder.encode, documents)
        if self._is_dpo:
            encoded = itertools.chain.from_iterable(map(self._encoder.encode_pair, documents))
        tokens = 0
        for count, each in enumerate(encoded, 1):
            tokens += len(each.ids)
            if count % _TOLD_EVERY == 0:
                noun = "answers" if self._is_dpo else "documents"
                self._tell(f"reading {each.document.place}: {count:,} {noun}, {tokens:,} tokens so far")
            yield each

    @property
    def data(self) -> str:
        """A description of the training data."""
        return self._documents.describe()

    def describe(self) -> list[str]:
        """Return lines about the trained weights, the data, its rows, and the steps."""
        noun = "pair" if self._is_dpo else "row"
        samples, held = self.samples, len(self._order.held_out)
        lines = [
            self._trained(),
            f"data: {self.data}",
            f"data: {samples.num_tokens:,} tokens, {samples.num_learned:,} of them in the loss, in "
            f"{samples.num_rows:,} {'pairs of rows' if self._is_dpo else 'rows'} of {self.seq} "
            f"({LAYOUTS[samples.layout]}){f', {held:,} of them held out' if held else ''}; "
            f"{self.options.steps:,} steps of {self._rows_per_step:,} "
            f"{noun}{'' if self._rows_per_step == 1 else 's'}",
        ]
        if self._eval_samples is not None and self._eval_documents is not None:
            lines.append(
                f"data: held out: {self._eval_documents.describe()}; {self._eval_samples.num_learned:,} "
                f"tokens with a loss, in {self._eval_samples.num_rows:,} {noun}s"
            )
        if samples.num_cut:
            lost = f"; {samples.num_lost:,} of them lost their whole answer" if samples.num_lost else ""
            lines.append(
                f"data: {samples.num_cut:,} documents are longer than --seq {self.seq} and were "
                f"truncated{lost}; use a longer --seq to keep their ends"
            )
        if self._encoder.uses_plain_template:
            lines.append(
                "data: the tokenizer has no chat template, so a plain one is used and saved with the "
                "model (docs/finetune.md); check that you want to tune this model"
            )
        return lines

    def _trained(self) -> str:
        """Return a line about the trained weights and the learning rate."""
        config = self.config
        what, said = "all weights", ""
        if config.lora:
            what = adapters_named(dora=config.dora, rslora=config.rslora)
            scale = config.alpha / (math.sqrt(config.lora) if config.rslora else config.lora)
            said = f" of rank {config.lora}, scaled by {scale:.3g} (alpha {config.alpha})"
            if self._adapts_experts:
                alone = config.lora_targets == NO_TARGETS
                said += ", on expert arrays" + ("" if alone else ", too")
            if config.quantize != NO:
                said += f", on a base model in {config.quantize}"
        if self._is_dpo:
            said += f", by DPO with beta {config.dpo_beta:g}"
        of = "DPO of " if self._is_dpo else ""
        default = f", the default for {of}{what}" if config.lr is None else ""
        return f"training: {what}{said}; learning rate {config.learning_rate:g}{default}"

    def identity(self) -> dict[str, Any]:
        """Return the settings that the numbers depend on."""
        own = {**self.config.identity(), "seq": self.seq}
        evaluated = None if self._eval_samples is None else self._eval_samples.fingerprint
        return {
            **own,
            "model": self._fingerprint,
            "tokens": self.samples.fingerprint,
            "eval_tokens": evaluated,
            "reference": self._reference or None,
        }

    def _check_parts(self, outline: nn.Module) -> None:
        """Raise ConfigError if the model, whole and on ``meta``, cannot be cut as requested."""
        if self._adapts_experts:
            raise ConfigError(
                "adapters on expert arrays cannot be divided over ranks; name other layers with "
                "--lora-targets, such as q_proj,v_proj, or leave out --tp, --pp and --sp"
            )
        refuse_unfit_parts(self.config, outline)

    def engine(self) -> TuningEngine:
        """Load the model onto its tiers."""
        kind: Callable[..., TuningEngine] = PretrainedEngine
        if self._in_parts:
            from gemini.jobs.finetune.parts_engine import PartsEngine as kind  # its imports take a second
        apart = self.samples.layout in (WHOLE, CUT)
        engine = kind(self.config, self._best, self._rank, documents_apart=apart)
        self.num_parameters = engine.num_parameters[0]
        return engine

    def prepare(self, engine: TuningEngine, display: Display, stop: StopRequest) -> bool:
        """Write the token caches, and compute DPO's reference if the model of later steps cannot."""
        if not self._rank.index:
            self._keep_tokens(display)
        if self._references is not None:
            return self._references.complete(engine, display, stop)
        if not self._rank.index:
            remove_references(self.target.parent)
        return True

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the learning rate scheduler."""
        steps = self.options.steps
        warmup = round(self.config.warmup * steps)
        factor = partial(shaped_factor, steps=steps, warmup=warmup, shape=self.config.schedule)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def step(self, engine: TuningEngine, step: int) -> tuple[float, int]:
        """Train on the rows of a step. Every token has equal weight, on every rank."""
        loss, tokens = engine.train([self._batch(step, micro) for micro in range(self._passes)])
        self._rewards = engine.rewards
        return loss, tokens

    def values(self) -> dict[str, float]:
        """Return the rewards of the last step's pairs."""
        return self._rewards.means()

    def evaluate(self, engine: TuningEngine, step: int) -> float | None:
        """Return the held-out loss if it is due: after every ``eval_every`` steps and at the end. Keep the
        weights if it is the lowest and ``--keep-best`` is set."""
        if not self._held_out.is_due(step + 1):
            return None
        loss = engine.evaluate(self._held_out.batches())
        if self._best is not None:
            self._best.offer(step + 1, loss, lambda target: engine.keep(target, self._tokenizer))
        return loss

    def check_history(self, horizons: list[int], devices: list[str]) -> None:
        """Accept any history."""

    def finish(self, engine: TuningEngine) -> None:
        """Export the trained model or adapters."""
        is_adapter = bool(self.config.lora) and not self.config.merge
        card = ""  # only the first rank writes the card
        if not self._rank.index:
            card = tuned_card(self.target.parent, is_adapter=is_adapter, best=self.best)
        is_last = self.best is None or self.best[0] == self.options.steps
        kept = None if self._best is None or is_last else self._best.weights
        engine.export(self.target, self._tokenizer, merge=self.config.merge, card=card, kept=kept)
        self.finished = True

    def _batch(self, step: int, micro: int) -> Batch:
        rows = self._batch_rows
        first = step * self._rows_per_step + (self._data_place * self._passes + micro) * rows
        return self.samples.rows(self._order[first + row] for row in range(rows))


def filler(tokenizer: Any, vocabulary: int) -> int:
    """Return the padding token, which must have an embedding: many tokenizers got their pad token after the
    model was trained. Neither loss nor attention uses it."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None and token < vocabulary:
            return int(token)
    return 0
