"""BaseHook, what a trainer calls in the course of a run; and hooks that watch training: each adds its metric,
for those that log them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini.parallel.trainer.metrics import AccuracyMetric, LossMetric, ThroughputMetric
from gemini.parallel.trainer.trainer_state import Training


class BaseHook:
    """A class made from it overrides what it wants to be called for; nothing need be set up.

    Hooks are called in order of ``priority``, the lowest first, and as they were given where it is the same.
    """

    priority = 10

    def __init__(self, priority: int = 10) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Called once, before anything else of a run, when all hooks are there."""

    def before_train(self, trainer: Training) -> None:
        """Called before the first epoch."""

    def after_train(self, trainer: Training) -> None:
        """Called after the last one."""

    def before_train_epoch(self, trainer: Training) -> None:
        """Called before each epoch."""

    def after_train_epoch(self, trainer: Training) -> None:
        """Called after each; ``trainer.cur_epoch`` counts it."""

    def before_train_iter(self, trainer: Training) -> None:
        """Called before each iteration."""

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Called after each, with what the schedule returned; ``trainer.cur_step`` counts it."""

    def before_test(self, trainer: Training) -> None:
        """Called before a pass over the test data."""

    def after_test(self, trainer: Training) -> None:
        """Called after it."""

    def before_test_epoch(self, trainer: Training) -> None:
        """Called after :meth:`before_test`, when the model evaluates."""

    def after_test_epoch(self, trainer: Training) -> None:
        """Called before :meth:`after_test`, while it does."""

    def before_test_iter(self, trainer: Training) -> None:
        """Called before each batch of test data."""

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Called after each."""


class LossHook(BaseHook):
    """Adds ``Loss`` of training and of tests."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self.train_loss, self.test_loss = LossMetric(), LossMetric()

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Add the metrics."""
        trainer.metrics["train"]["Loss"] = self.train_loss
        trainer.metrics["test"]["Loss"] = self.test_loss

    def before_train_epoch(self, trainer: Training) -> None:
        """Begin an epoch."""
        self.train_loss.reset()

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a step."""
        self.train_loss.update(loss)

    def before_test_epoch(self, trainer: Training) -> None:
        """Begin a test."""
        self.test_loss.reset()

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a batch."""
        self.test_loss.update(loss)


class AccuracyHook(BaseHook):
    """Adds ``Accuracy`` of tests: the share of samples of which ``accuracy_func(output, label)`` returns how
    many are right, such as :class:`gemini.parallel.trainer.Accuracy`."""

    def __init__(self, accuracy_func: Callable[..., Any], priority: int = 0) -> None:
        super().__init__(priority)
        self.accuracy = AccuracyMetric(accuracy_func)

    def after_hook_is_attached(self, trainer: Training) -> None:
        """Add the metric."""
        trainer.metrics["test"]["Accuracy"] = self.accuracy

    def before_test_epoch(self, trainer: Training) -> None:
        """Begin a test."""
        self.accuracy.reset()

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a batch."""
        self.accuracy.update(output, label)


class ThroughputHook(BaseHook):
    """Adds ``Throughput`` of training and of tests.

    Args:
        ignored_steps: so many steps of an epoch are not counted.
        tflop_per_step: with it the value is TFLOPS per rank, else samples per second of all ranks.
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
        """Begin an epoch."""
        self.train_pace.reset()

    def before_train_iter(self, trainer: Training) -> None:
        """Begin a step."""
        self.train_pace.begin()

    def after_train_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a step."""
        self.train_pace.update(trainer.schedule.batch_size)

    def before_test_epoch(self, trainer: Training) -> None:
        """Begin a test."""
        self.test_pace.reset()

    def before_test_iter(self, trainer: Training) -> None:
        """Begin a batch."""
        self.test_pace.begin()

    def after_test_iter(self, trainer: Training, output: Any, label: Any, loss: Any) -> None:
        """Add a batch."""
        self.test_pace.update(trainer.schedule.batch_size)
