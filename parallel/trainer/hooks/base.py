"""BaseHook: what a trainer calls in the course of a run."""

from __future__ import annotations

from typing import Any

from gemini.parallel.trainer.state import Training


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
