"""Cutting batches of whole sequences into each rank's part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.sequence.loss import IGNORED
from gemini.parallel.sequence.order import Order


class Batch(NamedTuple):
    """A rank's part of a batch: tokens, what each is to predict, where each is, each (batch, length, ...)."""

    inputs: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor


def cut_batch(
    inputs: torch.Tensor,
    labels: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    order: Order,
    rank: int,
    shifts_labels: bool = True,
    padding: float = 0,
) -> Batch:
    """Return the part of whole sequences (batch, length, ...) that ``rank`` has.

    Args:
        labels: token by token, those to ignore -100. With ``shifts_labels`` each token's is that of the one
            behind it, as a language model predicts it; they are shifted before they are cut.
        positions: those of the tokens, (batch or 1, length); by default 0, 1, 2, ...
        padding: what fills up ``inputs`` where the ranks do not divide the length: labels there are -100,
            positions go on.

    Raises:
        ConfigError: lengths differ.
    """
    length = inputs.size(1)
    for name, other in (("labels", labels), ("positions", positions)):
        if other is not None and other.size(1) != length:
            raise ConfigError(f"{name} are of {other.size(1)} tokens, and inputs of {length}")
    if labels is not None and shifts_labels:
        labels = shifted(labels)
    if positions is None:
        positions = torch.arange(length, device=inputs.device).unsqueeze(0)
    missing = order.padded(length) - length
    if missing:
        inputs = filled(inputs, missing, padding)
        labels = None if labels is None else filled(labels, missing, IGNORED)
        behind = torch.arange(1, missing + 1, device=positions.device)
        positions = torch.cat([positions, positions[:, -1:] + behind], 1)
    return Batch(
        order.part(inputs, rank, 1),
        None if labels is None else order.part(labels, rank, 1),
        order.part(positions, rank, 1),
    )


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return for each token of whole sequences (batch, length) the label of the next one."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def filled(x: torch.Tensor, missing: int, value: float) -> torch.Tensor:
    """Return ``x`` (batch, length, ...) with ``missing`` tokens behind it."""
    return torch.cat([x, x.new_full((x.size(0), missing, *x.shape[2:]), value)], 1)
