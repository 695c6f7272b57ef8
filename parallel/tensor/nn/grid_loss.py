"""Cross-entropy over a grid: each rank has some rows and some classes of the scores."""

from __future__ import annotations

import torch
from torch.nn import functional

from gemini.errors import ConfigError
from gemini.parallel.mesh import Axis
from gemini.parallel.tensor.loss import vocabulary_cross_entropy
from gemini.parallel.tensor.nn.grid_layer import GridLayer
from gemini.parallel.tensor.region import reduce


class CrossEntropyLoss(GridLayer):
    """nn.CrossEntropyLoss of the scores of :class:`Classifier`, (batch, ..., classes), and labels (batch,
    ...), both for this rank's part of the batch (:meth:`own_labels`). The loss is that of the whole batch,
    the same on all ranks.

    Build it after the classifier; ``inside``: the scores are between the two Linear layers of a pair.
    """

    def __init__(
        self,
        reduction: str = "mean",
        ignore_index: int = -100,
        *,
        label_smoothing: float = 0.0,
        inside: bool | None = None,
    ) -> None:
        """``reduction``: mean, sum, or none (this rank's rows). Raises ConfigError for any other."""
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ConfigError(f"reduction is {reduction!r}; choose mean, sum or none")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing is {label_smoothing}; give a number from 0 to 1")
        self.reduction, self.ignore_index = reduction, ignore_index
        self.label_smoothing = label_smoothing
        self.inside = self.building.scores_inside if inside is None else inside
        self.spread = self.grid.spread(inside=self.inside)

    def own_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a batch's labels. Raises ConfigError if the ranks do not divide it."""
        return self.grid.own_batch(labels, inside=self.inside)

    def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss in fp32. Raises ConfigError if the shapes of scores and labels differ."""
        if scores.shape[:-1] != labels.shape:
            raise ConfigError(
                f"scores of {tuple(scores.shape)} do not fit labels of {tuple(labels.shape)}; cut labels "
                "with criterion.own_labels(labels), and keep the classes in the last dimension"
            )
        losses = self._losses(scores, labels)
        if self.reduction == "none":
            return losses
        counted = (labels != self.ignore_index).sum()
        total = torch.stack([losses.sum().double(), counted.double()])
        rows = self.grid.axis(*self.spread.rows)
        if rows is not None:
            total = reduce(total, rows)
        found = total[0] / total[1] if self.reduction == "mean" else total[0]
        return found.float()

    def _losses(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each of this rank's rows."""
        classes = self.grid.axis(*self.spread.columns)
        if classes is None:
            return functional.cross_entropy(
                scores.flatten(0, -2).float(),
                labels.flatten(),
                ignore_index=self.ignore_index,
                reduction="none",
                label_smoothing=self.label_smoothing,
            ).view(labels.shape)
        losses = vocabulary_cross_entropy(
            scores,
            labels,
            classes,
            scores.size(-1) * classes.size,  # padding classes already score minus infinity
            ignore_index=self.ignore_index,
            reduction="none",
        )
        if not self.label_smoothing:
            return losses
        smoothed = losses + self.label_smoothing * self._lead(scores, labels, classes)
        return smoothed.masked_fill(labels == self.ignore_index, 0.0)

    def _lead(self, scores: torch.Tensor, labels: torch.Tensor, classes: Axis) -> torch.Tensor:
        """Return the difference between a row's own score and the mean of its scores."""
        fills = scores.isneginf()
        values = scores.float().masked_fill(fills, 0.0)
        local = labels - classes.rank * scores.size(-1)
        outside = (local < 0) | (local >= scores.size(-1))
        own = values.gather(-1, local.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
        sums = [own.masked_fill(outside, 0.0), values.sum(-1), (~fills).sum(-1).float()]
        leads, totals, counts = reduce(torch.stack(sums), classes).unbind()
        return leads - totals / counts

    def extra_repr(self) -> str:
        return f"{self.reduction!r}, mode={self.grid.mode!r}"
