"""How a job trains, evaluates and exports a model of transformers, whatever ranks share it."""

from __future__ import annotations

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.comm.ranks import Rank
from gemini.errors import ConfigError
from gemini.jobs.finetune.held_out import BEST, BestWeights
from gemini.jobs.finetune.preferences import Rewards
from gemini.jobs.finetune.samples import Batch
from gemini.system.durable import put_in_place, temporary_of
from gemini.system.files import io_errors

SHARD = "2GB"  # of what is exported, and so of what is in memory at once
BETAS = (0.9, 0.999)
_BLOCK = 2**20  # bytes of a file that is copied
_PROBED = 4  # tokens of a document that shows whether others see it


class TuningEngine(ABC):
    """A model under training and its optimizer. ``rank``: this process among those that train it; all of them
    make the same calls. Checkpoints say which weights were ``best``.

    ``rewards`` are those of the pairs of the last step, of all ranks.
    """

    def __init__(self, best: BestWeights | None, rank: Rank) -> None:
        self.best = best
        self.rank = rank
        self.rewards = Rewards()

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """What a learning-rate scheduler drives."""

    @property
    @abstractmethod
    def num_parameters(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many of them train."""

    @abstractmethod
    def train(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Train a step on the batches of this rank, in which every learned token of all ranks counts the
        same; return the mean loss over these, and how many tokens all have seen."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Callable[[], Batch]]) -> float:
        """Return the mean loss over all tokens of ``batches``; no weight and no random state changes. All
        ranks are given all batches, and share them."""

    @abstractmethod
    def reference(self, batch: Batch) -> Tensor:
        """Return the log probability of each answer of pairs by the reference, float32 ``[batch]``."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters, see ``GeminiDDP.stats``."""

    @abstractmethod
    def timeline(self) -> list[dict[str, Any]]:
        """Return bytes per tier at every moment of the last complete step."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; the engine cannot be used afterwards."""

    # -- checkpoints -----------------------------------------------------------------------------

    @abstractmethod
    def _save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint into ``directory``, complete or not at all."""

    @abstractmethod
    def _load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Restore a checkpoint, return its ``extra``. Raise CheckpointError if it is another."""

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Stream everything to ``directory``, with what is known of the best weights."""
        if self.best is None:
            self._save(directory, scheduler, extra)
        else:
            self._save(directory, scheduler, {**extra, BEST: self.best.state()})
            self.best.saved()

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Stream everything back."""
        extra = self._load(directory, scheduler)
        if self.best is not None:
            self.best.restore(extra.get(BEST))
        return extra

    # -- what is exported ------------------------------------------------------------------------

    @abstractmethod
    def _write_trained(self, made: Path, tokenizer: Any) -> None:
        """Write the model, or its adapters where those train, to a directory to make. The first rank
        writes."""

    @abstractmethod
    def _write_merged(self, made: Path, tokenizer: Any, kept: Path | None) -> None:
        """Write the model with its adapters merged in, or with those that were ``kept``."""

    def keep(self, target: Path, tokenizer: Any) -> None:
        """Write what :meth:`export` needs to return to these weights; the run goes on."""
        with self._written(target) as made:
            self._write_trained(made, tokenizer)

    def export(
        self, target: Path, tokenizer: Any, *, merge: bool, card: str, kept: Path | None = None
    ) -> None:
        """Write a directory that transformers loads to ``target``, whole or not at all: the model, or its
        adapters, with a model card. With ``merge`` adapters become part of the weights, and nothing can be
        trained after. ``kept``: what :meth:`keep` has written of other weights, which take the place of
        these."""
        with self._written(target) as made:
            if merge:
                self._write_merged(made, tokenizer, kept)
            elif kept is None:
                self._write_trained(made, tokenizer)
            elif not self.rank.index:
                _copy(kept, made)
            if not self.rank.index:
                (made / "README.md").unlink(missing_ok=True)  # PEFT has written one
                (made / "README.md").write_text(card, encoding="utf-8")

    @contextmanager
    def _written(self, target: Path) -> Iterator[Path]:
        """Yield the name of a directory to make, which becomes ``target``. Only the first rank makes it."""
        made = temporary_of(target)
        with io_errors("write the trained model", target):
            if not self.rank.index:
                shutil.rmtree(made, ignore_errors=True)
            yield made
            if not self.rank.index:
                put_in_place(made, target)
            self.rank.agree(lambda: "")  # it is there for all

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sums of what all ranks give here."""
        if self.rank.is_alone:
            return list(values)
        said = [json.loads(text) for text in self.rank.collect(lambda: json.dumps(values))]
        return [math.fsum(each) for each in zip(*said, strict=True)]


def refuse_mixed_documents(model: nn.Module, logits_of: Callable[[Batch], Tensor]) -> None:
    """Raise ConfigError where a document sees the one that is packed before it: masks are made by each
    model's own code, and layers without attention have none. It takes one pass over 16 tokens."""
    batch = probe()
    trains = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = logits_of(batch).reshape(*batch.inputs["input_ids"].shape, -1)
    finally:
        model.train(trains)
    one, other = logits[:, -_PROBED:].float().unbind()
    near = 8 * torch.finfo(logits.dtype).eps * one.abs().max().item()
    if (one - other).abs().max().item() > near:
        raise ConfigError(
            f"{type(model).__name__} does not keep packed documents apart: one sees those before "
            "it in a row, although its positions begin at 0; give --no-packing (a document in each row), "
            "or --documents joined if each may look at those before it"
        )


def probe() -> Batch:
    """Return two rows of two documents each; the second documents are the same."""
    first = torch.arange(_PROBED)
    rows = torch.stack([torch.cat([first + shift, first]) for shift in (0, _PROBED)])
    positions = first.repeat(2, 2)
    return Batch({"input_ids": rows, "position_ids": positions}, rows.numel())


def _copy(kept: Path, made: Path) -> None:
    """Copy a directory that is not yet published."""
    made.mkdir()
    for entry in kept.iterdir():
        if entry.is_dir():
            _copy(entry, made / entry.name)
            continue
        with entry.open("rb") as source, (made / entry.name).open("wb") as target:
            while block := source.read(_BLOCK):
                target.write(block)
