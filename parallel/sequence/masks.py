"""Attention masks between parts of a sequence: assembled for all queries, or for this rank's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.sequence.batch import SequenceCut

_ROWS, _KEYS = 2, 3  # dimensions of a mask: batch, heads, rows (queries), keys


@dataclass(frozen=True)
class AttentionMask:
    """The mask of a rank's queries over all keys, as ``scaled_dot_product_attention`` takes it: boolean (True
    means visible), or a bias for scores.

    ``mask`` broadcasts to (batch, heads, rows, keys). Its rows are those of all queries, of this rank's
    queries, or one for all; its keys are all keys or, with one row, this rank's keys. "All" may include the
    padding of the last parts, which is hidden.

    Attributes:
        here: the numbers of queries and keys on this rank.
        whole: the numbers of queries and keys in the sequence, without padding.
    """

    mask: torch.Tensor | None
    causal: bool
    here: tuple[int, int]
    whole: tuple[int, int]
    axis: Axis
    order: SequenceCut

    def __post_init__(self) -> None:
        if self.mask is None:
            return
        if self.causal:
            raise ConfigError("attention got a mask and is_causal=True, but torch takes only one of them")
        rows, keys = (1, *self.mask.shape)[-2:]
        all_rows, all_keys = self._filled()
        if keys in (1, self.whole[1], all_keys) and rows in (1, self.here[0], self.whole[0], all_rows):
            return
        if keys == self.here[1] and rows == 1:
            return
        raise ConfigError(
            f"a mask of {rows} x {keys} does not cover the sequence, in which each of {self.axis.size} ranks "
            f"has {self.here[0]} queries and {self.here[1]} keys; pass {self.here[0]} x {self.whole[1]} "
            f"(this rank's queries, all keys), 1 x {self.here[1]} (this rank's keys), or is_causal=True and "
            "no mask. generate() takes whole sequences: run it without sp, with the files of "
            "booster.save_model()"
        )

    def of_all_queries(self, heads: slice) -> torch.Tensor | None:
        """Return the mask of all queries and keys, for some ``heads``. Collective."""
        mask = self._of_all_keys()
        if mask is not None and mask.size(_ROWS) == self.here[0]:
            mask = self._gathered(mask, _ROWS)
        return mask if mask is None or mask.size(1) == 1 else mask[:, heads]

    def of_own_queries(self, device: torch.device) -> torch.Tensor | None:
        """Return the mask of this rank's queries, or one row for all, over all keys, with padding keys
        hidden. Collective.
        """
        mask = self._of_all_keys()
        rows, keys = (filled - whole for filled, whole in zip(self._filled(), self.whole, strict=True))
        if keys and mask is None and not self.causal:  # causal queries never see them
            mask = torch.ones(1, 1, 1, self.whole[1], dtype=torch.bool, device=device)
        if mask is None:
            return None
        if keys:
            hidden = False if mask.dtype == torch.bool else -torch.inf
            mask = functional.pad(mask.expand(*mask.shape[:3], self.whole[1]), (0, keys), value=hidden)
        if mask.size(_ROWS) == self.whole[0]:
            mask = self.order.part(functional.pad(mask, (0, 0, 0, rows)), self.axis.rank, _ROWS)
        return mask

    def _of_all_keys(self) -> torch.Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask[(None,) * (4 - self.mask.dim())]
        if mask.size(_KEYS) == self.here[1]:
            mask = self._gathered(mask, _KEYS)
        for dim, filled in zip((_ROWS, _KEYS), self._filled(), strict=True):
            if mask.size(dim) == filled:
                mask = mask.narrow(dim, 0, self.whole[dim - _ROWS])
        return mask

    def _filled(self) -> tuple[int, int]:
        """Return the numbers of queries and keys on all ranks, including padding."""
        return self.axis.size * self.here[0], self.axis.size * self.here[1]

    def _gathered(self, mask: torch.Tensor, dim: int) -> torch.Tensor:
        if mask.requires_grad:
            raise ConfigError(
                "a mask with a gradient (a learned bias) cannot be assembled from parts; give each rank the "
                "whole mask"
            )
        sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
        whole = self.order.whole(self.axis.all_gather(sent), dim).to(mask.dtype)
        return whole.narrow(dim, 0, self.whole[dim - _ROWS])
