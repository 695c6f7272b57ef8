"""What an optimizer keeps of parameters, as the chunks of its states know it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Elements of a tensor, counted from its start, that may share a value of a state: the scale of int8 moments.
# A layout sees to it that none of these blocks lies on both sides of a cut (CUT_NUMEL).
BLOCK_NUMEL = 256


def num_blocks(numel: int) -> int:
    """Return the number of blocks of a tensor of ``numel`` elements."""
    return -(-numel // BLOCK_NUMEL)


@dataclass(frozen=True)
class StateSpec:
    """One array that is kept of a parameter. ``name``: as its optimizer calls it. ``dtype``: of the value of
    every element, or of every block of 256."""

    name: str
    dtype: torch.dtype = torch.float32
    per_block: bool = False

    @property
    def key(self) -> str:
        """Its name among the states of a piece, where optimizers of one model may keep the same in different
        types one after the other."""
        return self.name if self.dtype == torch.float32 else f"{self.name}_{self.type_name}"

    @property
    def type_name(self) -> str:
        """The type, as torch calls it."""
        return str(self.dtype).removeprefix("torch.")

    def count(self, numel: int) -> int:
        """Return how many values there are for ``numel`` elements."""
        return num_blocks(numel) if self.per_block else numel

    def nbytes(self, numel: int) -> int:
        """Return their bytes for ``numel`` elements."""
        return self.count(numel) * self.dtype.itemsize
