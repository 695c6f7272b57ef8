"""Cut batches of whole sequences into each rank's part, and compute the positions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.sequence.mean_loss import IGNORED


@dataclass(frozen=True)
class SequenceCut:
    """A sequence cut over ``size`` ranks into equal parts.

    Without ``zigzag`` the parts are in rank order. With it, the sequence has twice as many stretches, and a
    rank gets one from the front and its mirror image from the back, which balances the work under a causal
    mask.
    """

    size: int
    zigzag: bool = False

    @property
    def num_stretches(self) -> int:
        """The number of equal stretches of the sequence."""
        return 2 * self.size if self.zigzag else self.size

    def padded(self, length: int) -> int:
        """Return the smallest length >= ``length`` that can be cut."""
        return -(-length // self.num_stretches) * self.num_stretches

    def stretches(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the stretches of ``rank``."""
        return (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)

    def part(self, whole: torch.Tensor, rank: int, dim: int) -> torch.Tensor:
        """Return the part of ``rank`` of a tensor of the whole sequence.

        Raises:
            ConfigError: its length cannot be cut.
        """
        if whole.size(dim) % self.num_stretches:
            raise ConfigError(
                f"a sequence of {whole.size(dim)} tokens cannot be cut into {self.num_stretches} equal "
                f"parts; pad it to {self.padded(whole.size(dim))} (SequenceParallel.cut does)"
            )
        pieces = whole.chunk(self.num_stretches, dim)
        found = [pieces[index] for index in self.stretches(rank)]
        return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim)

    def whole(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the whole tensor from the ``parts`` of all ranks, in rank order."""
        if not self.zigzag:
            return torch.cat(list(parts), dim)
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)

    def positions(self, length: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions in the sequence of the ``length`` tokens of ``rank``, as int64."""
        stretch = length // (2 if self.zigzag else 1)
        starts = [index * stretch for index in self.stretches(rank)]
        return torch.cat([torch.arange(start, start + stretch, device=device) for start in starts])


class Batch(NamedTuple):
    """A rank's part of a batch: tokens, the label of each, the position of each, all (batch, length, ...)."""

    inputs: torch.Tensor
    labels: torch.Tensor | None
    positions: torch.Tensor


def cut_batch(
    inputs: torch.Tensor,
    labels: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    order: SequenceCut,
    rank: int,
    shifts_labels: bool = True,
    padding: float = 0,
) -> Batch:
    """Return the part of whole sequences (batch, length, ...) for ``rank``.

    Args:
        labels: one per token, -100 to ignore it. With ``shifts_labels`` each token gets the label of the next
            one, as a language model predicts it; labels are shifted before they are cut.
        positions: those of the tokens, (batch or 1, length); default 0, 1, 2, ...
        padding: pads ``inputs`` if the ranks do not divide the length. Labels there are -100, and positions
            continue.

    Raises:
        ConfigError: lengths differ.
    """
    length = inputs.size(1)
    for name, other in (("labels", labels), ("positions", positions)):
        if other is not None and other.size(1) != length:
            raise ConfigError(f"{name} have {other.size(1)} tokens, but inputs have {length}")
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
    """Return for each token (batch, length) of whole sequences the label of the next; -100 for the last."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def filled(x: torch.Tensor, missing: int, value: float) -> torch.Tensor:
    """Return ``x`` (batch, length, ...) with ``missing`` tokens of ``value`` appended."""
    return torch.cat([x, x.new_full((x.size(0), missing, *x.shape[2:]), value)], 1)
