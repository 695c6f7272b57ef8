"""Cutting batches of whole sequences into each rank's part, and which tokens those are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.sequence.mean_loss import IGNORED


@dataclass(frozen=True)
class Order:
    """A sequence cut over ``size`` ranks into equal parts.

    In order of the ranks or, with ``zigzag``, in twice as many stretches, of which a rank has one from the
    front and its mirror image from the back: under a causal mask all ranks then have as much to do.
    """

    size: int
    zigzag: bool = False

    @property
    def num_stretches(self) -> int:
        """In how many equal stretches the sequence is cut."""
        return 2 * self.size if self.zigzag else self.size

    def padded(self, length: int) -> int:
        """Return the next length, from ``length`` on, that can be cut."""
        return -(-length // self.num_stretches) * self.num_stretches

    def stretches(self, rank: int) -> tuple[int, ...]:
        """Return which stretches ``rank`` has."""
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)

    def part(self, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """Return what ``rank`` has of a tensor of the whole sequence.

        Raises:
            ConfigError: its length cannot be cut.
        """
        if whole.size(dim) % self.num_stretches:
            raise ConfigError(
                f"a sequence of {whole.size(dim)} is not divided by {self.num_stretches}; pad it to "
                f"{self.padded(whole.size(dim))} (SequenceParallel.cut does)"
            )
        pieces = whole.chunk(self.num_stretches, dim)
        found = [pieces[index] for index in self.stretches(rank)]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim)

    def whole(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the tensor of which the ranks, in order, have these ``parts``."""
        if not self.zigzag:
            return torch.cat(list(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)

    def positions(self, length: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
        """Return where in the sequence the ``length`` tokens of ``rank`` are, as int64."""
        stretch = length // (2 if self.zigzag else 1)
        starts = [index * stretch for index in self.stretches(rank)]
        return torch.cat([torch.arange(start, start + stretch, device=device) for start in starts])


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
