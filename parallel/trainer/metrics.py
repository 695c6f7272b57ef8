"""Metrics of a trainer's steps, over all ranks: loss, accuracy, learning rate and throughput."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from gemini.errors import ConfigError
from gemini.parallel.engine.schedule import num_samples
from gemini.parallel.launch import ParallelMode, global_context
from gemini.parallel.trainer.timer import now
from gemini.system.device import current_device


def sum_over_ranks(*values: float | torch.Tensor) -> list[float]:
    """Return the sums of ``values`` over data parallelism and over pipeline stages. Collective."""
    total = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=current_device()).detach() for value in values]
    )
    if dist.is_available() and dist.is_initialized():
        if not global_context.is_launched:
            dist.all_reduce(total)
        for mode in (ParallelMode.DATA, ParallelMode.PIPELINE):
            if global_context.is_launched and global_context.get_world_size(mode) > 1:
                dist.all_reduce(total, group=global_context.get_group(mode))
    return [float(value) for value in total.tolist()]


class Metric(ABC):
    """A number for watching training. Its values are over all ranks, so reading them is collective; None
    means that there is none yet.
    """

    epoch_only = False  # True: a single step has no value

    @abstractmethod
    def reset(self) -> None:
        """Reset for an epoch."""

    @abstractmethod
    def last_value(self) -> float | None:
        """Return the value of the last step."""

    @abstractmethod
    def value(self) -> float | None:
        """Return the value of all steps since :meth:`reset`."""

    def text(self) -> str:
        """Return :meth:`value` as text."""
        return _shown(self.value())

    def last_text(self) -> str:
        """Return :meth:`last_value` as text."""
        return _shown(self.last_value())


class LossMetric(Metric):
    """The mean loss of steps; the device is synchronized only when it is read."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """See :class:`Metric`."""
        self._last: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._count = 0

    def update(self, loss: torch.Tensor | None) -> None:
        """Add the loss of a step; None is ignored."""
        if loss is None:
            return
        self._last = loss.detach()
        self._total = self._last.double() if self._total is None else self._total + self._last
        self._count += 1

    def last_value(self) -> float | None:
        """See :class:`Metric`."""
        return _ratio(*sum_over_ranks(self._last if self._last is not None else 0.0, self._last is not None))

    def value(self) -> float | None:
        """See :class:`Metric`."""
        return _ratio(*sum_over_ranks(self._total if self._total is not None else 0.0, self._count))


class AccuracyMetric(Metric):
    """The share of correct samples, which ``count(output, label)`` counts."""

    def __init__(self, count: Callable[..., Any]) -> None:
        self._counted = count
        self.reset()

    def reset(self) -> None:
        """See :class:`Metric`."""
        self._last: tuple[Any, int] = (0.0, 0)
        self._right: Any = 0.0
        self._samples = 0

    def update(self, output: Any, label: Any) -> None:
        """Add a step; a step without output belongs to another pipeline stage and is ignored.

        Raises:
            ConfigError: there is no label either: the schedule was told to return none.
        """
        if output is None and label is None:
            raise ConfigError("accuracy needs outputs and labels; call fit(return_output_label=True)")
        if output is None:
            return
        with torch.no_grad():
            right = self._counted(output, label)
        right = right.double() if isinstance(right, torch.Tensor) else right
        self._last = (right, _num_labels(label))
        self._right = self._right + right
        self._samples += self._last[1]

    def last_value(self) -> float | None:
        """See :class:`Metric`."""
        return _ratio(*sum_over_ranks(*self._last))

    def value(self) -> float | None:
        """See :class:`Metric`."""
        return _ratio(*sum_over_ranks(self._right, self._samples))


class RateMetric(Metric):
    """The learning rate of the first group."""

    def __init__(self, *, epoch_only: bool) -> None:
        self.epoch_only = epoch_only
        self._rate: float | None = None

    def reset(self) -> None:
        """See :class:`Metric`; the rate is kept."""

    def update(self, rate: float) -> None:
        """Set the rate."""
        self._rate = float(rate)

    def last_value(self) -> float | None:
        """See :class:`Metric`."""
        return self._rate

    def value(self) -> float | None:
        """See :class:`Metric`."""
        return self._rate


class ThroughputMetric(Metric):
    """Samples per second of all ranks: of the last step, or from the first step to the last.

    Args:
        ignored_steps: the number of steps at the beginning of an epoch that are not counted, while caches
            fill.
        tflop_per_step: if given, the value is in TFLOPS per rank.
    """

    def __init__(self, ignored_steps: int = 0, tflop_per_step: float = 0.0) -> None:
        self._ignored, self._tflop = ignored_steps, tflop_per_step
        self.reset()

    def reset(self) -> None:
        """See :class:`Metric`."""
        self._steps = self._samples = self._last_samples = 0
        self._began = self._step_began = time.perf_counter()
        self._ended: float | None = None

    def begin(self) -> None:
        """Begin a step."""
        self._step_began = time.perf_counter()
        if self._steps == self._ignored:
            self._began = now()

    def update(self, samples: int) -> None:
        """End a step with ``samples`` samples on this rank."""
        self._steps += 1
        self._last_samples = samples
        if self._steps > self._ignored:
            self._samples += samples
        self._ended = None

    def last_value(self) -> float | None:
        """See :class:`Metric`."""
        seconds = now() - self._step_began
        return self._pace(self._last_samples, 1, seconds)

    def value(self) -> float | None:
        """See :class:`Metric`."""
        if self._ended is None:  # a GPU may still run the last step
            self._ended = now()
        return self._pace(self._samples, self._steps - self._ignored, self._ended - self._began)

    def text(self) -> str:
        """See :class:`Metric`."""
        return self._with_unit(self.value())

    def last_text(self) -> str:
        """See :class:`Metric`."""
        return self._with_unit(self.last_value())

    def _pace(self, samples: int, steps: int, seconds: float) -> float | None:
        if self._tflop:
            return self._tflop * steps / seconds if steps > 0 and seconds > 0 else None
        mine = samples / seconds if seconds > 0 else 0.0
        (total,) = sum_over_ranks(mine)
        return total / global_context.pipeline_parallel_size or None

    def _with_unit(self, value: float | None) -> str:
        unit = "TFLOPS" if self._tflop else "samples/s"
        return _shown(value) if value is None else f"{value:.5g} {unit}"


def _num_labels(label: Any) -> int:
    """Return the number of class indices in a label; class probabilities count once per sample."""
    if isinstance(label, torch.Tensor):
        return len(label) if label.is_floating_point() and label.dim() else label.numel()
    return num_samples(label)


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.5g}"


class Accuracy(nn.Module):
    """Counts the samples with the highest score at their class."""

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the number of ``scores`` (samples, ..., classes) with the highest score at ``target``
        (samples, ...).

        Raises:
            ConfigError: the shapes do not match.
        """
        if scores.shape[:-1] != target.shape:
            raise ConfigError(
                f"scores of {tuple(scores.shape)} do not fit targets of {tuple(target.shape)}; the last "
                "dimension of scores is the classes, and targets are class numbers (use MixupAccuracy for "
                "shares)"
            )
        return (scores.argmax(dim=-1) == target).sum()


class MixupAccuracy(nn.Module):
    """:class:`Accuracy` for mixed samples: each counts by the share of the class with the highest score."""

    def forward(self, scores: torch.Tensor, target: torch.Tensor | Mapping[str, Any]) -> torch.Tensor:
        """Return the count; ``scores`` as for :meth:`Accuracy.forward`.

        ``target`` has class indices, or shares of all classes in the shape of ``scores`` (torchvision's MixUp
        makes them), or is a mapping with ``targets_a``, ``targets_b`` and ``lam``, the share of the first.
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
    """Return 1 for each correct sample, else 0."""
    return (scores.argmax(dim=-1) == target).to(torch.float32)
