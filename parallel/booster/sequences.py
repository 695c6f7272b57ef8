"""Batches and losses for plugins that give each rank a part of every sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.sequence.outline import SequenceOutline
from gemini.parallel.sequence.parallelize import SequenceParallel

Criterion = Callable[[Any, Any], torch.Tensor]
Count = Callable[[Any], float]


def own_part(sequence: SequenceParallel | SequenceOutline, batch: Any) -> dict[str, torch.Tensor]:
    """Return this rank's part of a batch of whole sequences, by the names of the model's keywords. Raises
    ConfigError as :meth:`SequenceParallel.cut`, and if the batch is no dict.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            "with sp_size above 1 a batch is a dict of the model's keywords, as transformers names them "
            f"(input_ids, labels, attention_mask, position_ids); this batch is a {type(batch).__name__}"
        )
    return sequence.cut(batch)


def mean_over_tokens(sequence: SequenceParallel, criterion: Criterion) -> Criterion:
    """Convert a criterion that averages over this rank's labels to one over all ranks' labels."""

    def mean(output: Any, batch: Any) -> torch.Tensor:
        if "labels" not in batch:
            raise ConfigError(
                "with sp_size above 1 a loss is the mean over the counted labels, but the batch has no "
                f"labels; it has {', '.join(batch)}"
            )
        return sequence.mean_loss(criterion(output, batch), batch["labels"])

    return mean


def count_of_all(axis: Axis | None, count: Count) -> Count:
    """Return a function that sums the results of ``count`` over the ranks of ``axis``. Collective."""

    def total(batch: Any) -> float:
        counted = torch.tensor([float(count(batch))], dtype=torch.float64, device="cpu")
        if axis is not None:
            axis.all_reduce(counted)
        return float(counted)

    return total
