"""TuningEngine: trains, evaluates and exports a transformers model, regardless of how ranks share it."""

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

SHARD = "2GB"  # size of an exported file, which limits the memory of an export
BETAS = (0.9, 0.999)
CUT_INTO = "parts"  # the key of the sizes of --tp, --pp and --sp in a checkpoint's extra data
_BLOCK = 2**20  # bytes to copy at a time
_PROBED = 4  # tokens of each document in probe()


class TuningEngine(ABC):
    """A model under training with its optimizer.

    Attributes:
        rank: this process among those that train the model. All of them make the same calls.
        best: the weights with the lowest held-out loss; checkpoints include their state. None: they are not
            kept.
        rewards: rewards of the last step's pairs, over all ranks.
    """

    def __init__(self, best: BestWeights | None, rank: Rank) -> None:
        self.best = best
        self.rank = rank
        self.rewards = Rewards()

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that a learning-rate scheduler drives."""

    @property
    @abstractmethod
    def num_parameters(self) -> tuple[int, int]:
        """The number of parameters, and how many of them train."""

    @abstractmethod
    def train(self, batches: Sequence[Batch]) -> tuple[float, int]:
        """Train one step on this rank's batches. Every learned token of all ranks has equal weight. Return
        the mean loss over these tokens, and the number of tokens of all ranks."""

    @abstractmethod
    def evaluate(self, batches: Sequence[Callable[[], Batch]]) -> float:
        """Return the mean loss over all tokens of ``batches``, without changing weights or random state. All
        ranks get all batches, and divide them."""

    @abstractmethod
    def reference(self, batch: Batch) -> Tensor:
        """Return the reference's log probability of each answer of pairs, float32 ``[batch]``."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the runtime's counters, see ``GeminiDDP.stats``."""

    @abstractmethod
    def timeline(self) -> list[dict[str, Any]]:
        """Return bytes per tier at every moment of the last complete step."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; the engine cannot be used afterwards."""

    # -- checkpoints -----------------------------------------------------------------------------

    @abstractmethod
    def _save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint into ``directory``, atomically."""

    @abstractmethod
    def _load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Restore a checkpoint, and return its ``extra`` data. Raise CheckpointError if it does not match."""

    def save(self, directory: Path, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Write a checkpoint to ``directory``, with the state of the best weights."""
        if self.best is None:
            self._save(directory, scheduler, extra)
        else:
            self._save(directory, scheduler, {**extra, BEST: self.best.state()})
            self.best.saved()

    def load(self, directory: Path, scheduler: Any) -> dict[str, Any]:
        """Restore the checkpoint in ``directory``, and return its ``extra`` data."""
        extra = self._load(directory, scheduler)
        if self.best is not None:
            self.best.restore(extra.get(BEST))
        return extra

    # -- export ----------------------------------------------------------------------------------

    @abstractmethod
    def _write_trained(self, made: Path, tokenizer: Any) -> None:
        """Write the model, or its adapters if only these train, to a new directory. Collective; the first
        rank writes."""

    @abstractmethod
    def _write_merged(self, made: Path, tokenizer: Any, kept: Path | None) -> None:
        """Write the model with its adapters merged in; ``kept``: the directory of other adapters to merge
        instead."""

    def keep(self, target: Path, tokenizer: Any) -> None:
        """Write the current weights for a later :meth:`export`. Training can continue."""
        with self._written(target) as made:
            self._write_trained(made, tokenizer)

    def export(
        self, target: Path, tokenizer: Any, *, merge: bool, card: str, kept: Path | None = None
    ) -> None:
        """Write a directory for transformers to ``target``, atomically: the model, or its adapters, with a
        model card.

        Args:
            merge: merge the adapters into the weights; the engine cannot train afterwards.
            card: text of the model card.
            kept: a directory that :meth:`keep` wrote; its weights are exported instead of the current ones.
        """
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
        """Yield the path of a directory to make, which is renamed to ``target`` at the end. Only the first
        rank makes it."""
        made = temporary_of(target)
        with io_errors("write the trained model", target):
            if not self.rank.index:
                shutil.rmtree(made, ignore_errors=True)
            yield made
            if not self.rank.index:
                put_in_place(made, target)
            self.rank.agree(lambda: "")  # no rank continues before the directory exists

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sum of each value over all ranks. Collective."""
        if self.rank.is_alone:
            return list(values)
        said = [json.loads(text) for text in self.rank.collect(lambda: json.dumps(values))]
        return [math.fsum(each) for each in zip(*said, strict=True)]


def refuse_mixed_documents(model: nn.Module, logits_of: Callable[[Batch], Tensor]) -> None:
    """Raise ConfigError if a document sees the document that is packed before it.

    Masks are made by each model's own code, and layers without attention have none. The check takes one pass
    over 16 tokens.
    """
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
            f"{type(model).__name__} does not keep packed documents apart: a document attends to "
            "earlier ones in its row, although its positions start at 0; give --no-packing (one "
            "document per row), or --documents joined to allow that"
        )


def probe() -> Batch:
    """Return two rows of two documents each. The second documents are equal."""
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
