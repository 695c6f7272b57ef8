"""BaseHook, with the methods that a trainer calls during a run, and hooks that each add a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini.parallel.trainer.metrics import AccuracyMetric, LossMetric, ThroughputMetric
from gemini.parallel.trainer.trainer_state import Training


class BaseHook:
    """Base class of hooks. A subclass overrides the methods that it needs; no setup is necessary.

    Hooks are called in order of ``priority``, the lowest first, and in the given order if it is equal.
    """

    priority = 10

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Called once, before anything else in a run, when all hooks are attached."""

    def before_train(self, trainer: Training) -> None:
        """Called before the first epoch."""

    def after_train(self, trainer: Training) -> None:
        """Called after the last epoch."""

    def before_train_epoch(self, trainer: Training) -> None:
        """Called before each epoch."""

    def after_train_epoch(self, trainer: Training) -> None:
        """Called after each epoch; ``trainer.cur_epoch`` counts it."""

    def before_train_iter(self, trainer: Training) -> None:
        """Called before each iteration."""

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Called after each iteration, with the results of the schedule; ``trainer.cur_step`` counts it."""

    def before_test(self, trainer: Training) -> None:
        """Called before a pass over the test data."""

    def after_test(self, trainer: Training) -> None:
        """Called after a pass over the test data."""

    def before_test_epoch(self, trainer: Training) -> None:
        """Called after :meth:`before_test`, when the model is in evaluation mode."""

    def after_test_epoch(self, trainer: Training) -> None:
        """Called before :meth:`after_test`, in evaluation mode."""

    def before_test_iter(self, trainer: Training) -> None:
        """Called before each batch of test data."""

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Called after each batch of test data."""


class LossHook(BaseHook):
    """Adds the metric ``Loss`` of training and of tests."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self.train_loss, self.test_loss = LossMetric(), LossMetric()

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Add the metrics."""
        trainer.metrics["train"]["Loss"] = self.train_loss
        trainer.metrics["test"]["Loss"] = self.test_loss

    def before_train_epoch(self, trainer: Training) -> None:
        """Reset the metric for an epoch."""
        self.train_loss.reset()

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a step."""
        self.train_loss.update(loss)

    def before_test_epoch(self, trainer: Training) -> None:
        """Reset the metric for a test."""
        self.test_loss.reset()

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a batch."""
        self.test_loss.update(loss)


class AccuracyHook(BaseHook):
    """Adds the metric ``Accuracy`` of tests: the share of correct samples. ``accuracy_func(output, label)``
    returns the number of correct ones, as :class:`gemini.parallel.trainer.Accuracy` does.
    """

    def __init__(self, accuracy_func: Callable[..., Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.accuracy = AccuracyMetric(accuracy_func)

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Add the metric."""
        trainer.metrics["test"]["Accuracy"] = self.accuracy

    def before_test_epoch(self, trainer: Training) -> None:
        """Reset the metric for a test."""
        self.accuracy.reset()

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a batch."""
        self.accuracy.update(output, label)


class ThroughputHook(BaseHook):
    """Adds the metric ``Throughput`` of training and of tests.

    Args:
        ignored_steps: the number of steps at the beginning of an epoch that are not counted.
        tflop_per_step: if given, the value is in TFLOPS per rank, else in samples per second of all ranks.
    """

    def __init__(self, ignored_steps: int = 0, tflop_per_step: float = 0.0, priority: int = 10) -> None:
        super().__init__(priority)
        self.train_pace = ThroughputMetric(ignored_steps, tflop_per_step)
        self.test_pace = ThroughputMetric(ignored_steps)

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Add the metrics."""
        trainer.metrics["train"]["Throughput"] = self.train_pace
        trainer.metrics["test"]["Throughput"] = self.test_pace

    def before_train_epoch(self, trainer: Training) -> None:
        """Reset the metric for an epoch."""
        self.train_pace.reset()

    def before_train_iter(self, trainer: Training) -> None:
        """Begin a step."""
        self.train_pace.begin()

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a step."""
        self.train_pace.update(trainer.schedule.batch_size)

    def before_test_epoch(self, trainer: Training) -> None:
        """Reset the metric for a test."""
        self.test_pace.reset()

    def before_test_iter(self, trainer: Training) -> None:
        """Begin a batch."""
        self.test_pace.begin()

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a batch."""
        self.test_pace.update(trainer.schedule.batch_size)
