"""How many samples of a batch a model has right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemini.errors import ConfigError


class Accuracy(nn.Module):
    """Counts the samples whose highest score is that of their class."""

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return how many of ``scores`` (samples, ..., classes) are highest at ``target`` (samples, ...).

        Raises:
            ConfigError: the shapes do not go together.
        """
        if scores.shape[:-1] != target.shape:
            raise ConfigError(
                f"scores of {tuple(scores.shape)} are not for targets of {tuple(target.shape)}; classes are "
                "the last dimension of scores, and targets have their numbers (MixupAccuracy takes shares)"
            )
        return (scores.argmax(dim=-1) == target).sum()


class MixupAccuracy(nn.Module):
    """:class:`Accuracy` of samples that may be mixtures: one counts by the share that the class with the
    highest score has in it."""

    def forward(self, scores: torch.Tensor, target: torch.Tensor | Mapping[str, Any]) -> torch.Tensor:
        """Return the count; ``scores`` as :meth:`Accuracy.forward` has them.

        ``target`` is numbers of classes, or shares of all classes, of the shape of ``scores`` (torchvision's
        MixUp makes them), or a mapping with ``targets_a``, ``targets_b`` and ``lam``, the share of the first.
        """
        if isinstance(target, Mapping):
            share = target.get("lam", 1.0)
            first = _hits(scores, target["targets_a"])
            if "targets_b" not in target:
                return first.sum()
            mixed: torch.Tensor = first * share + _hits(scores, target["targets_b"]) * (1 - share)
            return mixed.sum()
        if target.is_floating_point() and target.shape == scores.shape:
            return target.gather(-1, scores.argmax(dim=-1, keepdim=True)).sum()
        return Accuracy.forward(self, scores, target)  # type: ignore[arg-type]


def _hits(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return 1 for each sample that is right, else 0."""
    return (scores.argmax(dim=-1) == target).to(torch.float32)
