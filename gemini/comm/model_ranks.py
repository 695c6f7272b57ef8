"""The ranks that hold the other parts of a model whose parameters were cut before it was wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gemini.comm.peers import Peers


@dataclass(frozen=True)
class ModelRanks:
    """The ranks of tensor or pipeline parallelism, at one place of data parallelism.

    They wrap their parts together and with one DEVICE budget, take one norm of all gradients, and skip a step
    together. ``counts(param)`` says whether this rank is the one whose gradient of a parameter counts in the
    norm: several may have the same parameter. ``alike`` are those among them whose chunks must be laid out
    as here, because they run the same operators; None: all.
    """

    peers: Peers
    counts: Callable[[torch.Tensor], bool]
    alike: Sequence[Peers] | None = None

    def bind(self, module: nn.Module) -> PartOfModel:
        """Return what the runtime keeps of this for ``module``, which is this rank's part."""
        names = [name for name, param in module.named_parameters() if not self.counts(param)]
        return PartOfModel(self.peers, frozenset(names))


@dataclass(frozen=True)
class PartOfModel:
    """``peers`` hold the other parts; ``uncounted`` names parameters whose gradients another one counts."""

    peers: Peers
    uncounted: frozenset[str]
